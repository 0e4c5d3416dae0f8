"""Noise that takes itself back: how much less of it is in the sums, and what does Adam gain?

    python examples/papers/correlated.py                 # half an hour on two cores
    python examples/papers/correlated.py --quick         # two minutes, to try it out
    python examples/papers/correlated.py --full          # more steps, methods, trials; half a day
    python examples/papers/correlated.py --data my.txt   # your own text

Section 5.2 and figure 3 of the paper on design principles for private adaptive optimizers. First,
without training: the error of the prefix sums of gradients (RMSE) against ε, for independent, tree,
square-root and banded noise. Then the three columns of figure 3: banded noise; independent noise
that has the same RMSE, at a much larger ε; and independent noise at the ε of the banded one. Last,
post-processing and scale-then-privatize with each of the four noises at that ε.

- The model, its text and its tuning are those of language_model.py, the ε that of the paper: 10.
- The examples come in one fixed order, epoch after epoch, and all epochs are one `fit`: correlated
  noise lives as long as a run. Where the text is too long for several epochs, a fixed part of it is
  used, evenly spread.
- The neighbouring relation is zero_out, which is the one that gives the paper's ε.
- As many settings are tried for every noise and method, drawn within the same ranges in units of
  that noise at one step.

All runs go into runs_*.csv as they end; whoever starts the script again has them from there.
Writes to output/papers/correlated: correlated.csv, .md and .png (all noises and methods);
correlated_figure_3.csv and .md; correlated_rmse.csv and .md.
"""

import dataclasses
import functools
import os
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import language_model
import numpy as np
import report

import dp_keras_opt as dp

EPSILON = 10.0
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # of the curves; PLD is slow for larger ones
NOISES = ("independent", "tree", "square root", "banded")
LOW = "independent, low"  # has the RMSE of banded noise
COLUMNS = (LOW, "banded", "independent")  # of figure 3
METHODS = ("post-processing", "scale-then-privatize", "DP-SGD")
EVERYWHERE = METHODS[:2]  # with each of the noises; the others in the columns only
ADAM = {"rate": (5e-3, 1e-1)}  # the noise of a step is larger, the more of it is taken back
RANGES = language_model.RANGES | {
    method: language_model.RANGES[method] | ADAM for method in (*EVERYWHERE, "bias-corrected")
}
RANGES["DP-SGD"] = RANGES["DP-SGD"] | {"rate": (0.2, 3.0)}
RMSE_CLAIM = (
    "At equal ε the RMSE of banded noise (T = 2000, b = 128, at most 3 participations) is 0.134 of "
    "that of independent noise."
)
CLAIM = (
    "Scale-then-privatize has a lower test loss than post-processing in all three columns, DP-SGD "
    "a higher one. With every method, banded noise is better than independent noise at equal ε, "
    "and worse than independent noise of equal RMSE."
)


class Column(NamedTuple):
    """The header of a column of figure 3."""

    sigma: float  # noise multiplier, relative to one participation
    rmse: float
    epsilon: float


class Plan(NamedTuple):
    """What the price of noise and the error that it makes depend on."""

    steps: int
    every: int  # steps of an epoch: how far apart an example takes part
    batch: int
    bands: int
    delta: float

    @property
    def sampling(self):
        examples = self.every * self.batch
        return dp.accounting.Sampling.fixed_order(examples, self.batch, "zero_out", unit="sequence")

    def mechanism(self, noise):
        """The mechanism of one of NOISES, or of LOW."""
        if noise == "tree":
            return dp.noise.TreeAggregation(self.steps)
        if noise == "square root":
            return dp.noise.SquareRootFactorization(self.steps, self.bands)
        return dp.noise.BandedMatrix(self.steps, self.bands if noise == "banded" else 1)

    def sensitivity(self, noise):
        return self.mechanism(noise).sensitivity(self.steps, self.every)

    def rmse(self, noise, sigma):
        """Error of the prefix sums of mean gradients, at clip norm 1."""
        at_equal_price = dp.noise.prefix_sum_rmse(self.mechanism(noise), self.steps, self.every)
        return at_equal_price * sigma / self.sensitivity(noise) / self.batch

    def epsilon(self, noise, sigma):
        optimizer = dp.optimizers.DPSGD(
            clip_norm=1.0, batch_size=self.batch, noise_multiplier=sigma,
            noise=self.mechanism(noise),
        )  # fmt: skip
        return dp.accounting.epsilon(optimizer, self.sampling, self.steps, self.delta, "pld")

    def sigma(self, noise, epsilon=EPSILON):
        """The noise multiplier, relative to one participation, that has this price."""
        if noise == LOW:
            return self.rmse("banded", self.sigma("banded", epsilon)) / self.rmse(noise, 1.0)
        return one_release(epsilon, self.delta) * self.sensitivity(noise)

    def column(self, noise, sigma):
        return Column(sigma, self.rmse(noise, sigma), self.epsilon(noise, sigma))

    def strength(self, noise):
        """Root mean square over the steps of the noise, in units of σC/B."""
        mechanism = self.mechanism(noise)
        return float(np.sqrt(np.mean([mechanism.std(step) ** 2 for step in range(self.steps)])))


# Figure 3: the paper does not say how many steps its epochs have. 830 are in 1.7 million abstracts.
PAPER = Plan(steps=2000, every=830, batch=2048, bands=128, delta=1e-7)
PRINTED = {
    LOW: Column(0.134, 2.97e-3, 149.1),
    "banded": Column(1.0, 2.97e-3, 10.0),
    "independent": Column(1.0, 2.22e-2, 10.0),
}


@dataclasses.dataclass(frozen=True)
class Size(language_model.Size):
    """Four epochs; `every` is the length of one."""

    steps: int = 128
    every: int = 32
    batch: int = 256
    trials: int = 4
    seeds: int = 4
    methods: tuple = METHODS
    epsilons: tuple = dataclasses.field(default=EPSILONS, repr=False)  # no run depends on them

    @property
    def plan(self):
        bands = min(self.every, PAPER.bands)
        return Plan(self.steps, self.every, self.batch, bands, language_model.DELTA)

    @property
    def pairs(self):
        """(noise, method) of all that is trained."""
        columns = [(noise, method) for noise in COLUMNS for method in self.methods]
        return dict.fromkeys(columns + [(n, method) for n in NOISES for method in EVERYWHERE])


QUICK = Size(steps=8, every=2, batch=32, trials=1, seeds=1, rows=256, epsilons=(0.5, 1.0))
FULL = Size(
    steps=1280, every=320, trials=12, seeds=5, rows=8192,
    methods=(*METHODS, "independent", "bias-corrected"),
)  # fmt: skip


@functools.cache
def one_release(epsilon, delta):
    """The noise multiplier at which one Gaussian release costs ε; all steps of a run are one."""
    optimizer = dp.optimizers.DPSGD(clip_norm=1.0, batch_size=1)
    one = dp.accounting.Sampling.full(1, "zero_out")
    return dp.accounting.calibrate(optimizer, one, 1, epsilon, delta, "pld")


def train(setting, parts, size):
    """As `language_model.train`, with the noise of the setting and epochs in a fixed order."""
    plan, noise = size.plan, setting["noise"]
    model = language_model.new_model(setting["seed"])
    optimizer = language_model.optimizer_for(
        setting, size.batch, plan.sigma(noise), dp.optimizers.moments.Independent(None, "zero_out"),
        plan.mechanism(noise), plan.strength(noise),
    )  # fmt: skip
    batches = dp.data.fixed_order_epochs(
        language_model.xy(parts[0]), size.batch, adjacency="zero_out", unit="sequence"
    )
    return language_model.fitted(model, optimizer, batches, parts, size, "pld")


def shortened(parts, size):
    """The parts of the text, with as many rows to train on as are in the epochs."""
    count = size.every * size.batch
    if len(parts[0]) < count:
        raise SystemExit(f"The text has {len(parts[0])} rows to train on; {count} are needed.")
    rows = np.linspace(0, len(parts[0]) - 1, count).astype(int)
    return [parts[0][rows], *parts[1:]]


def rmse_table(plans, epsilons):
    """One row for each plan, ε and noise."""
    return [
        {"steps": plan.steps, "epoch": plan.every, "batch": plan.batch, "bands": plan.bands,
         "δ": plan.delta, "ε": epsilon, "noise": noise, "σ": plan.sigma(noise, epsilon),
         "sensitivity": plan.sensitivity(noise),
         "RMSE": plan.rmse(noise, plan.sigma(noise, epsilon))}
        for plan in plans for epsilon in epsilons for noise in NOISES
    ]  # fmt: skip


def rmse_verdict(plans):
    """Each noise against independent noise, and the header of figure 3 as printed and as here."""
    lines = ["RMSE in units of that of independent noise, at any ε.\n"]
    for plan in plans:
        errors = {noise: plan.rmse(noise, plan.sensitivity(noise)) for noise in NOISES}  # one price
        shares = {noise: error / errors["independent"] for noise, error in errors.items()}
        rest = ", ".join(f"{noise} {shares[noise]:.3f}" for noise in NOISES[1:])
        lines.append(f"- {plan.steps} steps in epochs of {plan.every}, {plan.bands} bands: {rest}.")
    ours, printed = header(), PRINTED[LOW]
    right = abs(ours[LOW].sigma - printed.sigma) < 1e-3
    lines.append(
        f"- The paper's σ of equal RMSE, {printed.sigma}: {'seen' if right else 'contradicted'}, "
        f"{ours[LOW].sigma:.4f}, at which ε = {ours[LOW].epsilon:.1f} (the paper has "
        f"{printed.epsilon}); at σ = {printed.sigma} itself ε would be "
        f"{PAPER.epsilon(LOW, printed.sigma):.1f}."
    )
    ratios = [PRINTED[noise].rmse / ours[noise].rmse for noise in COLUMNS]
    lines.append(
        f"- The RMSE that the paper prints is {min(ratios):.3f} to {max(ratios):.3f} times ours at "
        f"C = 1 and B = {PAPER.batch}, as if B were {PAPER.batch / max(ratios):.0f} to "
        f"{PAPER.batch / min(ratios):.0f}. It does not say how it is normalised."
    )
    return "\n".join(lines)


@functools.cache
def header():
    """{column: its header} of figure 3, computed here."""
    equal = PAPER.rmse("banded", 1.0) / PAPER.rmse(LOW, 1.0)
    return {noise: PAPER.column(noise, equal if noise == LOW else 1.0) for noise in COLUMNS}


def figure_3(results, size):
    """The three columns of figure 3, and below them the header of the paper's."""
    plan, paper, losses = size.plan, header(), tests(results)
    here = {noise: plan.column(noise, plan.sigma(noise)) for noise in COLUMNS}

    def row(name, cell):
        return {"": name} | {noise: cell(noise) for noise in COLUMNS}

    def loss(noise, method):
        return "{:.4f} ± {:.4f}".format(*report.mean_and_error(losses[noise, method]))

    return [
        row("σ", lambda noise: f"{here[noise].sigma:.4g}"),
        row("RMSE at C = 1", lambda noise: f"{here[noise].rmse:.3g}"),
        row(f"ε at δ = {plan.delta:g}", lambda noise: f"{here[noise].epsilon:.2f}"),
        *(row(method, functools.partial(loss, method=method)) for method in size.methods),
        row("paper's σ (printed)", lambda n: f"{paper[n].sigma:.4g} ({PRINTED[n].sigma:g})"),
        row(
            f"paper's RMSE at C = 1, B = {PAPER.batch} (printed)",
            lambda noise: f"{paper[noise].rmse:.3g} ({PRINTED[noise].rmse:.3g})",
        ),
        row(
            f"paper's ε at δ = {PAPER.delta:g} (printed)",
            lambda noise: f"{paper[noise].epsilon:.2f} ({PRINTED[noise].epsilon})",
        ),
    ]


def tests(results):
    """{(noise, method): test losses}."""
    return {pair: [run["test"] for run in runs] for pair, runs in results.items()}


def table(results, size):
    """One row for each noise and method."""
    rows = []
    for (noise, method), runs in results.items():
        first, (loss, error) = runs[0], report.mean_and_error([run["test"] for run in runs])
        rows.append(
            {"noise": noise, "method": method, "σ": first["σ"],
             "RMSE at C = 1": size.plan.rmse(noise, first["σ"]),
             f"ε at δ = {size.plan.delta:g}": first["privacy"], "η": first["rate"], "C": first["C"],
             "Adam's ε": "" if method == "DP-SGD" else first["ε"], "test loss": loss, "±": error}
        )  # fmt: skip
    return rows


def verdict(results, size, claims):
    """Whether the first of each pair has the lower test loss."""
    losses = tests(results)
    lines = [
        f"test loss of the second minus that of the first, ± standard error ({size.steps} steps, "
        f"{size.trials} settings tried, {size.seeds} initial weights).\n"
    ]
    for text, first, second in claims:
        (low, high), errors = report.mean_and_error([losses[first], losses[second]], axis=1)
        gain, error = high - low, np.hypot(*errors)
        lines.append(f"- {text}: {report.seen(gain, error)}, {gain:+.4f} ± {error:.4f}.")
    return "\n".join(lines)


def papers_claims(size):
    """(in words, lower, higher) for figure 3; all have the sign that the paper has."""
    after, scaled = EVERYWHERE
    for noise in COLUMNS:
        yield f"{noise} noise: {scaled} below {after}", (noise, scaled), (noise, after)
    for noise in COLUMNS:
        for method in size.methods:
            if method == "bias-corrected" and noise == LOW:
                yield f"{noise} noise: {method} below {after}", (noise, method), (noise, after)
            elif method not in EVERYWHERE:
                yield f"{noise} noise: {after} below {method}", (noise, after), (noise, method)
    for low, high in zip(COLUMNS, COLUMNS[1:], strict=False):
        for method in size.methods:
            yield f"{method}: {low} noise below {high} noise", (low, method), (high, method)


def further_claims():
    """The same for what the paper did not train: every correlated noise, at equal ε."""
    after, scaled = EVERYWHERE
    for noise in NOISES[1:]:
        yield f"{noise} noise: {scaled} below {after}", (noise, scaled), (noise, after)
    for method in EVERYWHERE:
        for noise in NOISES[1:]:
            yield f"{method}: {noise} noise below independent", (noise, method), (NOISES[0], method)
        for noise in NOISES[1:3]:
            yield f"{method}: banded noise below {noise}", ("banded", method), (noise, method)


def plot(results, size, path):
    """RMSE against ε, and test losses: of figure 3's columns and of all noises at equal ε."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 2, figsize=(10, 8))
    for plan, axes in zip((size.plan, PAPER), panels[0], strict=True):
        for noise, style in zip(NOISES, ("C3-", "C1-", "C0-", "C2--"), strict=True):
            errors = [plan.rmse(noise, plan.sigma(noise, epsilon)) for epsilon in size.epsilons]
            axes.loglog(size.epsilons, errors, style, label=noise)
        epochs = f"{plan.steps} steps in epochs of {plan.every}, {plan.bands} bands"
        axes.set(xlabel=f"ε at δ = {plan.delta:g}", title=epochs)
        axes.set_ylabel(f"RMSE of prefix sums (C = 1, B = {plan.batch})")
        axes.grid(alpha=0.3)
    for columns, style, label in ((PRINTED, "x", "printed"), (header(), "o", "computed here")):
        _, errors, epsilons = zip(*columns.values(), strict=True)
        panels[0, 1].loglog(epsilons, errors, f"k{style}", mfc="none", label=f"figure 3, {label}")
    panels[0, 1].legend(fontsize="small")
    draw(panels[1, 0], results, COLUMNS, size.methods)
    panels[1, 0].set(title="figure 3's columns")
    panels[1, 0].set_ylabel("test loss, nats per character\n(± 2 standard errors)")
    draw(panels[1, 1], results, NOISES, EVERYWHERE)
    panels[1, 1].set(title=f"all noises at ε = {EPSILON:g}")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def draw(axes, results, noises, methods):
    """Test losses with bars of 2 standard errors, methods side by side at each noise."""
    losses, colors = tests(results), ("C0", "C2", "k", "C3", "C4")
    for i, (method, color) in enumerate(zip(methods, colors, strict=False)):
        x = np.arange(len(noises)) + 0.12 * (i - (len(methods) - 1) / 2)
        mean, error = report.mean_and_error([losses[noise, method] for noise in noises], axis=1)
        axes.errorbar(x, mean, 2 * error, fmt="o", color=color, capsize=3, label=method)
    axes.set_xticks(range(len(noises)), noises)
    axes.margins(x=0.1)
    axes.grid(alpha=0.3)
    axes.legend()


def write(results, size, folder):
    """All tables and the picture."""
    plans = (size.plan, PAPER)
    errors = rmse_table(plans, size.epsilons)
    report.write(folder, "correlated_rmse", errors, RMSE_CLAIM, rmse_verdict(plans))
    claimed = verdict(results, size, papers_claims(size))
    report.write(folder, "correlated_figure_3", figure_3(results, size), CLAIM, claimed)
    more = "Of tree and square-root noise it says nothing."
    rest = verdict(results, size, further_claims())
    report.write(folder, "correlated", table(results, size), f"{CLAIM} {more}", rest)
    plot(results, size, folder / "correlated.png")


def main():
    options, size = language_model.arguments(
        __doc__, "correlated", QUICK, Size(), FULL, "half a day"
    )
    parts = shortened(language_model.sequences(language_model.prose(options.data)), size)
    path = language_model.runs_file(options.output, parts, size)
    results = language_model.experiment(size.pairs, parts, size, options.seed, path, RANGES, train)
    write(results, size, options.output)


if __name__ == "__main__":
    main()
