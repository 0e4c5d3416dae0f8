"""The papers and books that the library follows: one list for docstrings, catalogue and docs.

Plain data, without imports of the library. Docstrings give the same arXiv id or DOI literally; a
test holds them to this list.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Reference:
    """A paper or a book.

    Attributes:
        authors: all of them, in the order of the title page.
        title: as published.
        venue: where it was published, with the year.
        year: of that publication.
        arxiv: the arXiv id, None where there is none.
        doi: the DOI, None where there is none.
        url: an address, for what has neither.
        version: of which version the numbers of algorithms, equations and theorems are, where
            versions differ: "v2" of arXiv, or the published one.
    """

    authors: tuple[str, ...]
    title: str
    venue: str
    year: int
    arxiv: str | None = None
    doi: str | None = None
    url: str | None = None
    version: str | None = None

    @property
    def identifier(self) -> str:
        """What a docstring gives: "arXiv:" or "doi:" and the id, else the address."""
        if self.arxiv:
            return f"arXiv:{self.arxiv}"
        return f"doi:{self.doi}" if self.doi else str(self.url)

    @property
    def link(self) -> str:
        """Where it can be read."""
        if self.arxiv:
            return f"https://arxiv.org/abs/{self.arxiv}"
        return f"https://doi.org/{self.doi}" if self.doi else str(self.url)

    @property
    def short(self) -> str:
        """One line: first author, title, year, identifier."""
        family = [name.removesuffix(" Jr.").rsplit(" ", 1)[-1] for name in self.authors]
        who = f"{family[0]} et al." if len(family) > 2 else " and ".join(family)
        return f"{who}, {self.title}, {self.year}, {self.identifier}"


#: All of them, by the key that the catalogue uses.
REFERENCES: dict[str, Reference] = {
    # Training.
    "abadi2016": Reference(
        (
            "Martín Abadi",
            "Andy Chu",
            "Ian Goodfellow",
            "H. Brendan McMahan",
            "Ilya Mironov",
            "Kunal Talwar",
            "Li Zhang",
        ),
        "Deep learning with differential privacy",
        "CCS 2016",
        2016,
        arxiv="1607.00133",
        doi="10.1145/2976749.2978318",
    ),
    "amid2022": Reference(
        (
            "Ehsan Amid",
            "Arun Ganesh",
            "Rajiv Mathews",
            "Swaroop Ramaswamy",
            "Shuang Song",
            "Thomas Steinke",
            "Vinith M. Suriyakumar",
            "Om Thakkar",
            "Abhradeep Thakurta",
        ),
        "Public data-assisted mirror descent for private model training",
        "ICML 2022",
        2022,
        arxiv="2112.00193",
    ),
    "aybat2019": Reference(
        ("Necdet Serhat Aybat", "Alireza Fallah", "Mert Gürbüzbalaban", "Asuman Ozdaglar"),
        "A universally optimal multistage accelerated stochastic gradient method",
        "NeurIPS 2019",
        2019,
        arxiv="1901.08022",
    ),
    "bu2023_automatic": Reference(
        ("Zhiqi Bu", "Yu-Xiang Wang", "Sheng Zha", "George Karypis"),
        "Automatic clipping: differentially private deep learning made easier and stronger",
        "NeurIPS 2023",
        2023,
        arxiv="2206.07136",
    ),
    "bu2023_bookkeeping": Reference(
        ("Zhiqi Bu", "Yu-Xiang Wang", "Sheng Zha", "George Karypis"),
        "Differentially private optimization on large model at small cost",
        "ICML 2023",
        2023,
        arxiv="2210.00038",
    ),
    "de2022": Reference(
        ("Soham De", "Leonard Berrada", "Jamie Hayes", "Samuel L. Smith", "Borja Balle"),
        "Unlocking high-accuracy differentially private image classification through scale",
        "arXiv, 2022",
        2022,
        arxiv="2204.13650",
    ),
    "duchi2011": Reference(
        ("John Duchi", "Elad Hazan", "Yoram Singer"),
        "Adaptive subgradient methods for online learning and stochastic optimization",
        "Journal of Machine Learning Research 12, 2011",
        2011,
        url="https://jmlr.org/papers/v12/duchi11a.html",
    ),
    "ganesh2025": Reference(
        ("Arun Ganesh", "Brendan McMahan", "Abhradeep Thakurta"),
        "On design principles for private adaptive optimizers",
        "PPML 2025",
        2025,
        arxiv="2507.01129",
        version="v1",
    ),
    "kairouz2021_subspaces": Reference(
        ("Peter Kairouz", "Mónica Ribero", "Keith Rush", "Abhradeep Thakurta"),
        "(Nearly) dimension independent private ERM with AdaGrad rates via publicly estimated "
        "subspaces",
        "COLT 2021",
        2021,
        arxiv="2008.06570",
        version="as published",
    ),
    "kalinin2025": Reference(
        ("Nikita P. Kalinin", "Jalaj Upadhyay", "Christoph H. Lampert"),
        "Continual release moment estimation with differential privacy",
        "arXiv, 2025",
        2025,
        arxiv="2502.06597",
    ),
    "kingma2015": Reference(
        ("Diederik P. Kingma", "Jimmy Ba"),
        "Adam: a method for stochastic optimization",
        "ICLR 2015",
        2015,
        arxiv="1412.6980",
    ),
    "kuru2022": Reference(
        ("Nurdan Kuru", "Ş. İlker Birbil", "Mert Gürbüzbalaban", "Sinan Yıldırım"),
        "Differentially private accelerated optimization algorithms",
        "SIAM Journal on Optimization 32, 2022",
        2022,
        arxiv="2008.01989",
        doi="10.1137/20M1355847",
        version="as published",
    ),
    "li2022": Reference(
        ("Tian Li", "Manzil Zaheer", "Sashank J. Reddi", "Virginia Smith"),
        "Private adaptive optimization with side information",
        "ICML 2022",
        2022,
        arxiv="2202.05963",
    ),
    "li2023": Reference(
        (
            "Tian Li",
            "Manzil Zaheer",
            "Ziyu Liu",
            "Sashank J. Reddi",
            "H. Brendan McMahan",
            "Virginia Smith",
        ),
        "Differentially private adaptive optimization with delayed preconditioners",
        "ICLR 2023",
        2023,
        arxiv="2212.00309",
        version="as published",
    ),
    "nesterov2004": Reference(
        ("Yurii Nesterov",),
        "Introductory lectures on convex optimization: a basic course",
        "Springer, 2004",
        2004,
        doi="10.1007/978-1-4419-8853-9",
    ),
    "park2023": Reference(
        ("Jinseong Park", "Hoki Kim", "Yujin Choi", "Jaewook Lee"),
        "Differentially private sharpness-aware training",
        "ICML 2023",
        2023,
        arxiv="2306.05651",
    ),
    "polyak1964": Reference(
        ("Boris T. Polyak",),
        "Some methods of speeding up the convergence of iteration methods",
        "USSR Computational Mathematics and Mathematical Physics 4(5), 1964",
        1964,
        doi="10.1016/0041-5553(64)90137-5",
    ),
    "reddi2018": Reference(
        ("Sashank J. Reddi", "Satyen Kale", "Sanjiv Kumar"),
        "On the convergence of Adam and beyond",
        "ICLR 2018",
        2018,
        arxiv="1904.09237",
    ),
    "tang2024": Reference(
        ("Qiaoyue Tang", "Frederick Shpilevskiy", "Mathias Lécuyer"),
        "DP-AdamBC: your DP-Adam is actually DP-SGD (unless you apply bias correction)",
        "AAAI 2024",
        2024,
        arxiv="2312.14334",
    ),
    "tieleman2012": Reference(
        ("Tijmen Tieleman", "Geoffrey Hinton"),
        "Lecture 6.5: rmsprop, divide the gradient by a running average of its recent magnitude",
        "Coursera, Neural networks for machine learning, 2012",
        2012,
        url="https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf",
    ),
    "ward2019": Reference(
        ("Rachel Ward", "Xiaoxia Wu", "Léon Bottou"),
        "AdaGrad stepsizes: sharp convergence over nonconvex landscapes",
        "ICML 2019",
        2019,
        arxiv="1806.01811",
    ),
    "wu2021": Reference(
        ("Xiaoxia Wu", "Lingxiao Wang", "Irina Cristali", "Quanquan Gu", "Rebecca Willett"),
        "Adaptive differentially private empirical risk minimization",
        "arXiv, 2021",
        2021,
        arxiv="2110.07435",
        version="arXiv",
    ),
    "ghazi2023": Reference(
        (
            "Badih Ghazi",
            "Yangsibo Huang",
            "Pritish Kamath",
            "Ravi Kumar",
            "Pasin Manurangsi",
            "Amer Sinha",
            "Chiyuan Zhang",
        ),
        "Sparsity-preserving differentially private training of large embedding models",
        "NeurIPS 2023",
        2023,
        arxiv="2311.08357",
    ),
    "gilani2025": Reference(
        ("Atefeh Gilani", "Naima Tasnim", "Lalitha Sankar", "Oliver Kosut"),
        "GeoClip: geometry-aware clipping for differentially private SGD",
        "NeurIPS 2025",
        2025,
        arxiv="2506.06549",
    ),
    "molina2026": Reference(
        (
            "Marc Molina Van den Bosch",
            "Riccardo Taiello",
            "Albert Sund Aillet",
            "Andrea Protani",
            "Miguel Angel Gonzalez Ballester",
            "Luigi Serio",
        ),
        "DP-KFC: data-free preconditioning for privacy-preserving deep learning",
        "ICML 2026",
        2026,
        arxiv="2605.13418",
    ),
    "kim2026": Reference(
        ("Jihwan Kim", "Chenglin Fan"),
        "DP-Muon: differentially private optimization via matrix-orthogonalized momentum",
        "arXiv, 2026",
        2026,
        arxiv="2605.12994",
    ),
    "pichapati2019": Reference(
        (
            "Venkatadheeraj Pichapati",
            "Ananda Theertha Suresh",
            "Felix X. Yu",
            "Sashank J. Reddi",
            "Sanjiv Kumar",
        ),
        "AdaCliP: adaptive clipping for private SGD",
        "arXiv, 2019",
        2019,
        arxiv="1908.07643",
    ),
    "tasnim2026": Reference(
        ("Naima Tasnim", "Lalitha Sankar", "Oliver Kosut"),
        "DP-MacAdam: differentially private mechanism with adaptive clipping and adaptive momentum",
        "arXiv, 2026",
        2026,
        arxiv="2606.05435",
    ),
    "xu2026": Reference(
        (
            "Xincheng Xu",
            "Thilina Ranbaduge",
            "Qing Wang",
            "Thierry Rakotoarivelo",
            "David Smith",
        ),
        "Enhancing DPSGD via per-sample momentum and low-pass filtering",
        "AAAI 2026",
        2026,
        arxiv="2511.08841",
    ),
    "zaheer2018": Reference(
        ("Manzil Zaheer", "Sashank J. Reddi", "Devendra Sachan", "Satyen Kale", "Sanjiv Kumar"),
        "Adaptive methods for nonconvex optimization",
        "NeurIPS 2018",
        2018,
        url="https://papers.nips.cc/paper/8186-adaptive-methods-for-nonconvex-optimization",
    ),
    "zhang2024": Reference(
        ("Xinwei Zhang", "Zhiqi Bu", "Mingyi Hong", "Meisam Razaviyayn"),
        "DOPPLER: differentially private optimizers with low-pass filter for privacy noise "
        "reduction",
        "NeurIPS 2024",
        2024,
        arxiv="2408.13460",
        version="v1",
    ),
    "zhang2025": Reference(
        (
            "Xinwei Zhang",
            "Zhiqi Bu",
            "Borja Balle",
            "Mingyi Hong",
            "Meisam Razaviyayn",
            "Vahab Mirrokni",
        ),
        "DiSK: differentially private optimizer with simplified Kalman filter for noise reduction",
        "ICLR 2025",
        2025,
        arxiv="2410.03883",
    ),
    "shin2025": Reference(
        ("Hyeju Shin", "Kyudan Jung", "Seongwon Yun", "Juyoung Yun"),
        "Spectral and temporal denoising for differentially private optimization",
        "arXiv, 2025",
        2025,
        arxiv="2505.04468",
        version="v1",
    ),
    "zhao2024": Reference(
        (
            "Jiawei Zhao",
            "Zhenyu Zhang",
            "Beidi Chen",
            "Zhangyang Wang",
            "Anima Anandkumar",
            "Yuandong Tian",
        ),
        "GaLore: memory-efficient LLM training by gradient low-rank projection",
        "ICML 2024",
        2024,
        arxiv="2403.03507",
    ),
    # Noise.
    "choquette2024": Reference(
        ("Christopher A. Choquette-Choo", "Arun Ganesh", "Thomas Steinke", "Abhradeep Thakurta"),
        "Privacy amplification for matrix mechanisms",
        "ICLR 2024",
        2024,
        arxiv="2310.15526",
    ),
    "chien2021": Reference(
        (
            "Steve Chien",
            "Prateek Jain",
            "Walid Krichene",
            "Steffen Rendle",
            "Shuang Song",
            "Abhradeep Thakurta",
            "Li Zhang",
        ),
        "Private alternating least squares: practical private matrix completion with tighter rates",
        "ICML 2021",
        2021,
        arxiv="2107.09802",
    ),
    "bu2020": Reference(
        ("Zhiqi Bu", "Jinshuo Dong", "Qi Long", "Weijie J. Su"),
        "Deep learning with Gaussian differential privacy",
        "Harvard Data Science Review 2(3), 2020",
        2020,
        arxiv="1911.11607",
        doi="10.1162/99608f92.cfc5dd25",
    ),
    "andrew2021": Reference(
        ("Galen Andrew", "Om Thakkar", "H. Brendan McMahan", "Swaroop Ramaswamy"),
        "Differentially private learning with adaptive clipping",
        "NeurIPS 2021",
        2021,
        arxiv="1905.03871",
    ),
    "denisov2022": Reference(
        (
            "Sergey Denisov",
            "H. Brendan McMahan",
            "Keith Rush",
            "Adam Smith",
            "Abhradeep Guha Thakurta",
        ),
        "Improved differential privacy for SGD via optimal private linear operators on adaptive "
        "streams",
        "NeurIPS 2022",
        2022,
        arxiv="2202.08312",
    ),
    "dvijotham2024": Reference(
        (
            "Krishnamurthy (Dj) Dvijotham",
            "H. Brendan McMahan",
            "Krishna Pillutla",
            "Thomas Steinke",
            "Abhradeep Thakurta",
        ),
        "Efficient and near-optimal noise generation for streaming differential privacy",
        "FOCS 2024",
        2024,
        arxiv="2404.16706",
    ),
    "kalinin2026_square_roots": Reference(
        ("Nikita P. Kalinin", "Ryan McKenna", "Jalaj Upadhyay", "Christoph H. Lampert"),
        "Back to square roots: an optimal bound on the matrix factorization error for multi-epoch "
        "differentially private SGD",
        "ICLR 2026",
        2026,
        arxiv="2505.12128",
    ),
    "kalinin2026": Reference(
        ("Nikita P. Kalinin", "Ryan McKenna", "Rasmus Pagh", "Christoph H. Lampert"),
        "DP-λCGD: efficient noise correlation for differentially private model training",
        "ICML 2026",
        2026,
        arxiv="2601.22334",
    ),
    "mcmahan2024": Reference(
        ("H. Brendan McMahan", "Zheng Xu", "Yanxiang Zhang"),
        "A hassle-free algorithm for private learning in practice: don't use tree aggregation, use "
        "BLTs",
        "arXiv, 2024",
        2024,
        arxiv="2408.08868",
    ),
    "choquette2023": Reference(
        (
            "Christopher A. Choquette-Choo",
            "Arun Ganesh",
            "Ryan McKenna",
            "H. Brendan McMahan",
            "Keith Rush",
            "Abhradeep Thakurta",
            "Zheng Xu",
        ),
        "(Amplified) banded matrix factorization: a unified approach to private training",
        "NeurIPS 2023",
        2023,
        arxiv="2306.08153",
    ),
    "dwork2006": Reference(
        ("Cynthia Dwork", "Frank McSherry", "Kobbi Nissim", "Adam Smith"),
        "Calibrating noise to sensitivity in private data analysis",
        "TCC 2006",
        2006,
        doi="10.1007/11681878_14",
    ),
    "fichtenberger2023": Reference(
        ("Hendrik Fichtenberger", "Monika Henzinger", "Jalaj Upadhyay"),
        "Constant matters: fine-grained error bound on differentially private continual "
        "observation",
        "ICML 2023",
        2023,
        arxiv="2202.11205",
    ),
    "holohan2021": Reference(
        ("Naoise Holohan", "Stefano Braghin"),
        "Secure random sampling in differential privacy",
        "ESORICS 2021",
        2021,
        arxiv="2107.10138",
    ),
    "kairouz2021_ftrl": Reference(
        (
            "Peter Kairouz",
            "Brendan McMahan",
            "Shuang Song",
            "Om Thakkar",
            "Abhradeep Thakurta",
            "Zheng Xu",
        ),
        "Practical and private (deep) learning without sampling or shuffling",
        "ICML 2021",
        2021,
        arxiv="2103.00039",
    ),
    "kalinin2024": Reference(
        ("Nikita P. Kalinin", "Christoph H. Lampert"),
        "Banded square root matrix factorization for differentially private model training",
        "NeurIPS 2024",
        2024,
        arxiv="2405.13763",
    ),
    "mironov2012": Reference(
        ("Ilya Mironov",),
        "On significance of the least significant bits for differential privacy",
        "CCS 2012",
        2012,
        doi="10.1145/2382196.2382264",
    ),
    # Accounting.
    "balle2018": Reference(
        ("Borja Balle", "Gilles Barthe", "Marco Gaboardi"),
        "Privacy amplification by subsampling: tight analyses via couplings and divergences",
        "NeurIPS 2018",
        2018,
        arxiv="1807.01647",
    ),
    "canonne2020": Reference(
        ("Clément L. Canonne", "Gautam Kamath", "Thomas Steinke"),
        "The discrete Gaussian for differential privacy",
        "NeurIPS 2020",
        2020,
        arxiv="2004.00010",
    ),
    "chua2024": Reference(
        (
            "Lynn Chua",
            "Badih Ghazi",
            "Pritish Kamath",
            "Ravi Kumar",
            "Pasin Manurangsi",
            "Amer Sinha",
            "Chiyuan Zhang",
        ),
        "How private are DP-SGD implementations?",
        "ICML 2024",
        2024,
        arxiv="2403.17673",
    ),
    "chua2025": Reference(
        (
            "Lynn Chua",
            "Badih Ghazi",
            "Charlie Harrison",
            "Ethan Leeman",
            "Pritish Kamath",
            "Ravi Kumar",
            "Pasin Manurangsi",
            "Amer Sinha",
            "Chiyuan Zhang",
        ),
        "Balls-and-bins sampling for DP-SGD",
        "AISTATS 2025",
        2025,
        arxiv="2412.16802",
    ),
    "doroshenko2022": Reference(
        (
            "Vadym Doroshenko",
            "Badih Ghazi",
            "Pritish Kamath",
            "Ravi Kumar",
            "Pasin Manurangsi",
        ),
        "Connect the dots: tighter discrete approximations of privacy loss distributions",
        "PoPETs 2022",
        2022,
        arxiv="2207.04380",
    ),
    "feldman2025": Reference(
        ("Vitaly Feldman", "Moshe Shenfeld"),
        "Privacy amplification by random allocation",
        "arXiv, 2025",
        2025,
        arxiv="2502.08202",
    ),
    "feldman2026": Reference(
        ("Vitaly Feldman", "Moshe Shenfeld"),
        "Efficient privacy loss accounting for subsampling and random allocation",
        "arXiv, 2026",
        2026,
        arxiv="2602.17284",
    ),
    "dong2022": Reference(
        ("Jinshuo Dong", "Aaron Roth", "Weijie Su"),
        "Gaussian differential privacy",
        "Journal of the Royal Statistical Society B 84(1), 2022",
        2022,
        arxiv="1905.02383",
    ),
    "kairouz2015": Reference(
        ("Peter Kairouz", "Sewoong Oh", "Pramod Viswanath"),
        "The composition theorem for differential privacy",
        "ICML 2015",
        2015,
        arxiv="1311.0776",
    ),
    "mironov2017": Reference(
        ("Ilya Mironov",),
        "Rényi differential privacy",
        "CSF 2017",
        2017,
        arxiv="1702.07476",
    ),
    "rogers2016": Reference(
        ("Ryan Rogers", "Aaron Roth", "Jonathan Ullman", "Salil Vadhan"),
        "Privacy odometers and filters: pay-as-you-go composition",
        "NeurIPS 2016",
        2016,
        arxiv="1605.08294",
    ),
    "feldman2021": Reference(
        ("Vitaly Feldman", "Tijana Zrnic"),
        "Individual privacy accounting via a Rényi filter",
        "NeurIPS 2021",
        2021,
        arxiv="2008.11193",
    ),
    "lecuyer2021": Reference(
        ("Mathias Lécuyer",),
        "Practical privacy filters and odometers with Rényi differential privacy and applications "
        "to differentially private deep learning",
        "arXiv, 2021",
        2021,
        arxiv="2103.01379",
    ),
    "smith2022": Reference(
        ("Adam Smith", "Abhradeep Thakurta"),
        "Fully adaptive composition for Gaussian differential privacy",
        "arXiv, 2022",
        2022,
        arxiv="2210.17520",
    ),
    "koskela2023": Reference(
        ("Antti Koskela", "Marlon Tobaben", "Antti Honkela"),
        "Individual privacy accounting with Gaussian differential privacy",
        "ICLR 2023",
        2023,
        arxiv="2209.15596",
    ),
    "tran2026": Reference(
        ("Long Tran", "Antti Koskela", "Ossi Räisä", "Antti Honkela"),
        "f-differential privacy filters: validity and approximate solutions",
        "arXiv, 2026",
        2026,
        arxiv="2602.06756",
    ),
    "mironov2019": Reference(
        ("Ilya Mironov", "Kunal Talwar", "Li Zhang"),
        "Rényi differential privacy of the sampled Gaussian mechanism",
        "arXiv, 2019",
        2019,
        arxiv="1908.10530",
    ),
    "papernot2022": Reference(
        ("Nicolas Papernot", "Thomas Steinke"),
        "Hyperparameter tuning with Rényi differential privacy",
        "ICLR 2022",
        2022,
        arxiv="2110.03620",
        version="v2",
    ),
    "ponomareva2023": Reference(
        (
            "Natalia Ponomareva",
            "Hussein Hazimeh",
            "Alex Kurakin",
            "Zheng Xu",
            "Carson Denison",
            "H. Brendan McMahan",
            "Sergei Vassilvitskii",
            "Steve Chien",
            "Abhradeep Thakurta",
        ),
        "How to DP-fy ML: a practical guide to machine learning with differential privacy",
        "Journal of Artificial Intelligence Research 77, 2023",
        2023,
        arxiv="2303.00654",
    ),
    "ganesh2024": Reference(
        ("Arun Ganesh",),
        "Tight group-level DP guarantees for DP-SGD with sampling via mixture of Gaussians "
        "mechanisms",
        "arXiv, 2024",
        2024,
        arxiv="2401.10294",
    ),
    "ganesh2025_truncated": Reference(
        ("Arun Ganesh",),
        "Tighter privacy analysis for truncated Poisson sampling",
        "arXiv, 2025",
        2025,
        arxiv="2508.15089",
    ),
    "vadhan2017": Reference(
        ("Salil Vadhan",),
        "The complexity of differential privacy",
        "Tutorials on the Foundations of Cryptography, Springer, 2017",
        2017,
        doi="10.1007/978-3-319-57048-8_7",
    ),
    "sommer2019": Reference(
        ("David M. Sommer", "Sebastian Meiser", "Esfandiar Mohammadi"),
        "Privacy loss classes: the central limit theorem in differential privacy",
        "PoPETs 2019",
        2019,
        doi="10.2478/popets-2019-0029",
    ),
    "zhu2022": Reference(
        ("Yuqing Zhu", "Jinshuo Dong", "Yu-Xiang Wang"),
        "Optimal accounting of differential privacy via characteristic function",
        "AISTATS 2022",
        2022,
        arxiv="2106.08567",
    ),
    "wang2019": Reference(
        ("Yu-Xiang Wang", "Borja Balle", "Shiva Prasad Kasiviswanathan"),
        "Subsampled Rényi differential privacy and analytical moments accountant",
        "AISTATS 2019",
        2019,
        arxiv="1808.00087",
    ),
    # Audits, documentation, and what is beside privacy.
    "mitchell2019": Reference(
        (
            "Margaret Mitchell",
            "Simone Wu",
            "Andrew Zaldivar",
            "Parker Barnes",
            "Lucy Vasserman",
            "Ben Hutchinson",
            "Elena Spitzer",
            "Inioluwa Deborah Raji",
            "Timnit Gebru",
        ),
        "Model cards for model reporting",
        "FAT* 2019",
        2019,
        arxiv="1810.03993",
        doi="10.1145/3287560.3287596",
    ),
    "box1958": Reference(
        ("G. E. P. Box", "Mervin E. Muller"),
        "A note on the generation of random normal deviates",
        "The Annals of Mathematical Statistics 29(2), 1958",
        1958,
        doi="10.1214/aoms/1177706645",
    ),
    "qiao2019": Reference(
        ("Siyuan Qiao", "Huiyu Wang", "Chenxi Liu", "Wei Shen", "Alan Yuille"),
        "Micro-batch training with batch-channel normalization and weight standardization",
        "arXiv, 2019",
        2019,
        arxiv="1903.10520",
    ),
    "salmon2011": Reference(
        ("John K. Salmon", "Mark A. Moraes", "Ron O. Dror", "David E. Shaw"),
        "Parallel random numbers: as easy as 1, 2, 3",
        "SC 2011",
        2011,
        doi="10.1145/2063384.2063405",
    ),
    "steele2014": Reference(
        ("Guy L. Steele Jr.", "Doug Lea", "Christine H. Flood"),
        "Fast splittable pseudorandom number generators",
        "OOPSLA 2014",
        2014,
        doi="10.1145/2660193.2660195",
    ),
    "bruna2013": Reference(
        ("Joan Bruna", "Stéphane Mallat"),
        "Invariant scattering convolution networks",
        "IEEE Transactions on Pattern Analysis and Machine Intelligence 35(8), 2013",
        2013,
        arxiv="1203.1513",
    ),
    "tramer2021": Reference(
        ("Florian Tramèr", "Dan Boneh"),
        "Differentially private learning needs better features (or much more data)",
        "ICLR 2021",
        2021,
        arxiv="2011.11660",
    ),
    "casacuberta2022": Reference(
        ("Sílvia Casacuberta", "Michael Shoemate", "Salil Vadhan", "Connor Wagaman"),
        "Widespread underestimation of sensitivity in differentially private libraries and how to "
        "fix it",
        "CCS 2022",
        2022,
        arxiv="2207.10635",
    ),
    "gopi2020": Reference(
        (
            "Sivakanth Gopi",
            "Pankaj Gulhane",
            "Janardhan Kulkarni",
            "Judy Hanwen Shen",
            "Milad Shokouhi",
            "Sergey Yekhanin",
        ),
        "Differentially private set union",
        "ICML 2020",
        2020,
        arxiv="2002.09745",
    ),
    "korolova2009": Reference(
        (
            "Aleksandra Korolova",
            "Krishnaram Kenthapadi",
            "Nina Mishra",
            "Alexandros Ntoulas",
        ),
        "Releasing search queries and clicks privately",
        "WWW 2009",
        2009,
        doi="10.1145/1526709.1526733",
    ),
    "carlini2019": Reference(
        ("Nicholas Carlini", "Chang Liu", "Úlfar Erlingsson", "Jernej Kos", "Dawn Song"),
        "The secret sharer: evaluating and testing unintended memorization in neural networks",
        "USENIX Security 2019",
        2019,
        arxiv="1802.08232",
    ),
    "carlini2022": Reference(
        (
            "Nicholas Carlini",
            "Steve Chien",
            "Milad Nasr",
            "Shuang Song",
            "Andreas Terzis",
            "Florian Tramèr",
        ),
        "Membership inference attacks from first principles",
        "IEEE Symposium on Security and Privacy 2022",
        2022,
        arxiv="2112.03570",
    ),
    "mahloujifar2025": Reference(
        ("Saeed Mahloujifar", "Luca Melis", "Kamalika Chaudhuri"),
        "Auditing f-differential privacy in one run",
        "ICML 2025",
        2025,
        arxiv="2410.22235",
    ),
    "watson2022": Reference(
        ("Lauren Watson", "Chuan Guo", "Graham Cormode", "Alexandre Sablayrolles"),
        "On the importance of difficulty calibration in membership inference attacks",
        "ICLR 2022",
        2022,
        arxiv="2111.08440",
    ),
    "yeom2018": Reference(
        ("Samuel Yeom", "Irene Giacomelli", "Matt Fredrikson", "Somesh Jha"),
        "Privacy risk in machine learning: analyzing the connection to overfitting",
        "CSF 2018",
        2018,
        arxiv="1709.01604",
    ),
    "steinke2023": Reference(
        ("Thomas Steinke", "Milad Nasr", "Matthew Jagielski"),
        "Privacy auditing with one (1) training run",
        "NeurIPS 2023",
        2023,
        arxiv="2305.08846",
        version="v1",
    ),
}
