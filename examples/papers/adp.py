"""Noise that follows the step sizes: DP-SGD against ADP-SGD at equal ε.

    python examples/papers/adp.py              # a quarter of an hour on one core
    python examples/papers/adp.py --quick      # fewer steps and seeds, under a minute

With the paper's step sizes, η/√(20 + t) and η·(0.1 − a√t), a such that η_T = 1e-10, T growing.

A convex problem, where the noise term of the error bound can be measured: logistic regression on
one of d items, F(θ) = mean of ln(1 + exp(−z·θ_item)). The gradient of an example has a norm below
1, the clip norm, so that nothing is clipped. The theorem bounds Σ η_t·E‖∇F(θ_t)‖²/Σ η_t; measured
is by how much this exceeds that of a run without noise on the same batches, and the ratio of
DP-SGD's excess to that of ADP-SGD stands beside the theorem's factor, T·Σ η_t²/(Σ η_t)². Beside it,
the same for the loss after the last step. Batches are all of the data, for which the factor holds,
or Poisson samples of 5% or 0.1%. With η = 1/L old noise is forgotten, with η = 0.01/L it piles
up. Both methods get the same noise, up to size, and all noise also with the opposite sign, which
keeps out of the ratios what is odd in it. NumPy; `tests/docs/test_papers.py` holds it
against `ADPSGD`.

A small CNN on scikit-learn's 8×8 digits, in place of the paper's on CIFAR-10: test accuracy, the
best of those after each tenth of the steps (as in the paper: chosen on the test set), and the last.

Writes convex.csv, digits.csv, their .md, and adp.png to output/papers/adp.
"""

import dataclasses
import itertools
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import report

import dp_keras_opt as dp
from dp_keras_opt import theory
from dp_keras_opt.accounting.composition import adp_noise_multiplier
from dp_keras_opt.noise import schedules

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from example_data import digits  # noqa: E402

STEP_SIZES = {
    "1/√(20 + t)": lambda t, steps: 1 / (20 + t) ** 0.5,
    "0.1 − a√t": lambda t, steps: 0.1 - (0.1 - 1e-10) * (t / steps) ** 0.5,
}
METHODS = ("DP-SGD", "ADP-SGD")
BATCHES = {"all": 1.0, "Poisson, 5%": 0.05, "Poisson, 0.1%": 0.001}
ROUNDED = 0.15  # to multiples of which ln α is rounded
PACES = (1.0, 0.01)  # η·L
SETTINGS = list(itertools.product(STEP_SIZES, PACES))
CLAIM = (
    "At equal ε the noise term of ADP-SGD's error bound is smaller by a factor of "
    "T·Σ η_t²/(Σ η_t)², which grows like ln T for η_t = η/√(20 + t)."
)
CLAIM_ON_IMAGES = "At equal ε and T, ADP-SGD's accuracy is mostly higher, and the gap grows with T."


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is run: of the convex problem, then on the digits."""

    items: int = 2000
    records: int = 4_000_000
    steps: tuple = (183, 735, 2940, 11760)
    seeds: int = 4
    epsilon: float = 1.0
    delta: float = 1e-8
    image_steps: tuple = (80, 320, 1280)
    image_seeds: int = 4
    image_epsilon: float = 3.0


QUICK = Size(
    items=200, records=400_000, steps=(4, 8), seeds=2, image_steps=(10,), image_seeds=2
)  # fmt: skip
IMAGE_BATCH, IMAGE_CLIP, IMAGE_DELTA = 128, 1.0, 1e-4


@keras.saving.register_keras_serializable(package="papers")
class StepSizes(keras.optimizers.schedules.LearningRateSchedule):
    """The paper's step sizes by their name in `STEP_SIZES`, for t = 0, …, T − 1."""

    def __init__(self, name, steps):
        self.name, self.steps = name, steps

    def __call__(self, step):
        return STEP_SIZES[self.name](keras.ops.cast(step, "float32"), self.steps)

    def get_config(self):
        return {"name": self.name, "steps": self.steps}


def make_optimizer(method, name, steps, sampling, clip_norm=1.0):
    """DP-SGD or ADP-SGD with step sizes of this name.

    The accountant prices samples slowly where each step has a noise level of its own; there
    ADP-SGD is DP-SGD with the same noise schedule, rounded to few levels.
    """
    rates, options = StepSizes(name, steps), {"batch_size": sampling.batch_size}
    if method == "DP-SGD":
        return dp.optimizers.DPSGD(rates, clip_norm=clip_norm, **options)
    adp = dp.optimizers.ADPSGD(rates, steps, clip_norm=clip_norm, **options)
    if sampling.takes_all:
        return adp
    logs = ROUNDED * np.round(np.log(adp.noise_schedule.alphas(0, steps)) / ROUNDED)
    rounded = schedules.Fixed(np.exp(logs))
    return dp.optimizers.DPSGD(rates, clip_norm=clip_norm, noise_schedule=rounded, **options)


# The convex problem.


class Items:
    """Logistic regression on one of d items; each θ holds a log-odds for each item, (…, d)."""

    def __init__(self, items, records, seed):
        rng = np.random.default_rng(seed)
        self.records, self.each = records, records // items
        self.positives = rng.binomial(self.each, _share(rng.normal(size=items)))
        self.smoothness = 0.25 / items  # L

    def gradient(self, share):
        """∇F, from the share of positive outcomes that θ predicts."""
        return (self.each * share - self.positives) / self.records

    def loss(self, theta):
        """F(θ)."""
        losses = self.each * np.logaddexp(0, theta) - self.positives * theta
        return losses.sum(axis=-1) / self.records

    def samples(self, probability, seeds, rng):
        """Poisson samples without end: records of each item, positive ones, (seeds, items) each."""
        shape = seeds, len(self.positives)
        while True:
            positives = rng.binomial(self.positives, probability, shape)
            yield (
                positives + rng.binomial(self.each - self.positives, probability, shape),
                positives,
            )


def _share(theta):
    return 1 / (1 + np.exp(-theta))


def descend(problem, theta, rates, scales, batches, batch_size, draws):
    """(Σ η_t‖∇F(θ_t)‖²/Σ η_t, θ after the last step), each of them (…) or (…, d).

    Args:
        problem: `Items`.
        theta: where to start, (…, d).
        rates: η_t, (T, …).
        scales: standard deviation of the noise in the mean gradient, (T, …).
        batches: for each step the batch's number of records of each item, and of positive ones.
        batch_size: expected number of records in a batch.
        draws: for each step standard normals that broadcast to theta.
    """
    rates, scales, total = rates[..., None], scales[..., None], 0.0
    for rate, scale, (counts, positives), noise in zip(rates, scales, batches, draws, strict=False):
        share = _share(theta)
        exact = problem.gradient(share)
        total = total + rate[..., 0] * np.einsum("...d,...d->...", exact, exact)
        step = (counts * share - positives) / batch_size + scale * noise
        theta = theta - rate * step
    return total / rates.sum(axis=0)[..., 0], theta


def plan(problem, batches, steps, size):
    """(B, step sizes (T, settings), standard deviations of the noise (T, settings, methods))."""
    batch_size = round(BATCHES[batches] * problem.records)
    sampling = (
        dp.accounting.Sampling.full(problem.records)
        if batches == "all"
        else dp.accounting.Sampling.poisson(problem.records, batch_size)
    )
    scales = {}
    for name, method in itertools.product(STEP_SIZES, METHODS):
        optimizer = make_optimizer(method, name, steps, sampling)
        multiplier = dp.accounting.calibrate(optimizer, sampling, steps, size.epsilon, size.delta)
        scales[name, method] = multiplier * optimizer.noise_schedule.alphas(0, steps) / batch_size
    rates = [
        pace / problem.smoothness * STEP_SIZES[name](np.arange(steps), steps)
        for name, pace in SETTINGS
    ]
    scales = [[scales[name, method] for method in METHODS] for name, _ in SETTINGS]
    return batch_size, np.array(rates).T, np.moveaxis(scales, -1, 0)


def convex(size, seed):
    """{(batches, T): (step sizes, scales, excess of Σ η_t‖∇F‖²/Σ η_t, of F(θ_T))}.

    Excesses over the run without noise are (settings, methods, seeds).
    """
    problem = Items(size.items, size.records, seed)
    results = {}
    for batches, steps in itertools.product(BATCHES, size.steps):
        batch_size, rates, scales = plan(problem, batches, steps, size)
        rng = np.random.default_rng([seed, batch_size, steps])
        # θ: settings, methods (the last without noise), signs of the noise, seeds, items.
        shape = len(SETTINGS), len(METHODS) + 1, 2, size.seeds, size.items
        scales = np.concatenate([scales, 0 * scales[..., :1]], axis=-1)
        counts = (
            itertools.repeat((problem.each, problem.positives))
            if batches == "all"
            else problem.samples(BATCHES[batches], size.seeds, rng)
        )
        draws = (np.array([z, -z]) for z in _normals(rng, shape[-2:]))
        average, theta = descend(
            problem, np.zeros(shape), rates[..., None, None, None],
            scales[..., None, None], counts, batch_size, draws,
        )  # fmt: skip
        excess = [
            values[:, :-1].mean(axis=2) - values[:, -1:].mean(axis=2)
            for values in (average, problem.loss(theta))
        ]
        results[batches, steps] = rates, scales, *excess
        print(f"batches: {batches}, T = {steps}: done", flush=True)
    return results


def _normals(rng, shape):
    while True:
        yield rng.standard_normal(shape)


def ratio(pair):
    """Mean of the first over mean of the second, with its standard error; (2, seeds)."""
    (a, b), count = pair, len(pair[0])
    value = a.mean() / b.mean()
    return value, np.std(a - value * b, ddof=1) / b.mean() / np.sqrt(count)


def convex_rows(results):
    """A row for each setting: the factor, and ratios of the noise terms of DP-SGD and ADP-SGD."""
    rows = []
    for (batches, steps), (rates, scales, average, last) in results.items():
        for i, (name, pace) in enumerate(SETTINGS):
            first, second = np.einsum("t,tm->m", rates[:, i] ** 2, scales[:, i, :-1] ** 2)
            (gain, error), (gain_last, error_last) = ratio(average[i]), ratio(last[i])
            rows.append(
                {"batches": batches, "η_t/η": name, "ηL": pace, "T": steps,
                 "factor": theory.adp_improvement(rates[:, i]),
                 "factor at the accountant's noise": float(first / second),
                 "measured": float(gain), "±": float(error),
                 "F(θ_T)": float(gain_last), "± (F)": float(error_last)}
            )  # fmt: skip
    return sorted(rows, key=lambda row: (row["batches"], row["ηL"], row["η_t/η"]), reverse=True)


def convex_verdict(rows):
    """Measured ratios beside the factor, setting by setting; two standard errors decide."""
    lines = []
    for batches, pace, name in dict.fromkeys((r["batches"], r["ηL"], r["η_t/η"]) for r in rows):
        some = [r for r in rows if (r["batches"], r["ηL"], r["η_t/η"]) == (batches, pace, name)]
        gains, errors, factors, spent, last, last_errors = (
            np.array([row[key] for row in some])
            for key in (
                "measured", "±", "factor", "factor at the accountant's noise", "F(θ_T)", "± (F)"
            )
        )  # fmt: skip
        grows = gains[-1] - gains[0] > 2 * np.hypot(errors[-1], errors[0])
        off = gains / factors - 1
        lines.append(
            f"- batches: {batches}; η_t = η·({name}), ηL = {pace:g}: ADP-SGD's noise term smaller "
            f"at {np.sum(gains - 1 > 2 * errors)} of {len(some)} T, larger at "
            f"{np.sum(1 - gains > 2 * errors)}; ratio {gains[0]:.3f} to {gains[-1]:.3f}, the "
            f"factor {factors[0]:.3f} to {factors[-1]:.3f} ({off.min():+.0%} to {off.max():+.0%} "
            f"off), at the accountant's noise {spent[0]:.3f} to {spent[-1]:.3f}; "
            f"ratio {'grows' if grows else 'does not grow'} with T. Loss after the last step: "
            f"smaller at {np.sum(last - 1 > 2 * last_errors)}, larger at "
            f"{np.sum(1 - last > 2 * last_errors)}; ratio {last[0]:.3f} to {last[-1]:.3f}."
        )
    return "excess of DP-SGD over that of ADP-SGD.\n\n" + "\n".join(lines)


# The digits.


def cnn():
    """Two convolutions and two dense layers, 13,706 weights."""
    layers = keras.layers
    images = keras.Input((8, 8, 1))
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(images)
    x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(32, 3, padding="same", activation="relu")(x)
    x = layers.Flatten()(layers.MaxPooling2D()(x))
    x = layers.Dense(64, activation="relu")(x)
    return dp.DPModel(images, layers.Dense(10)(x))


def train(method, name, steps, seed, parts, multiplier):
    """Test accuracy after each tenth of the steps."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)  # of the initial weights; noise and batches are always new
    private, test = parts
    batches = dp.data.poisson_batches(private, IMAGE_BATCH, steps // 10)
    optimizer = make_optimizer(method, name, steps, batches.sampling, IMAGE_CLIP)
    optimizer.noise_multiplier = multiplier
    model = cnn()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    history = model.fit(batches, epochs=10, validation_data=test, verbose=0)
    return np.array(history.history["val_accuracy"])


def images(size, seed):
    """{(name, T, method): accuracies (seeds, 10)}; the seeds are of initial weights."""
    x, y = digits()
    order = np.random.default_rng(seed).permutation(len(x))
    parts = [(x[rows], y[rows]) for rows in np.split(order, [len(x) * 8 // 10])]
    sampling = dp.accounting.Sampling.poisson(len(parts[0][0]), IMAGE_BATCH)
    results = {}
    for steps, name, method in itertools.product(size.image_steps, STEP_SIZES, METHODS):
        optimizer = make_optimizer(method, name, steps, sampling, IMAGE_CLIP)
        multiplier = dp.accounting.calibrate(
            optimizer, sampling, steps, size.image_epsilon, IMAGE_DELTA
        )
        seeds = range(seed, seed + size.image_seeds)
        runs = np.array([train(method, name, steps, i, parts, multiplier) for i in seeds])
        results[name, steps, method] = runs
        theorem = adp_noise_multiplier(
            size.image_epsilon, IMAGE_DELTA, sampling.num_examples, IMAGE_BATCH,
            optimizer.noise_schedule.alphas(0, steps),
        )  # fmt: skip
        print(f"{name}, T = {steps}, {method}: σ = {multiplier:.3f} ({theorem:.0f} by theorem 4.1 "
              f"of the paper), accuracy {runs[:, -1].mean():.3f}", flush=True)  # fmt: skip
    return results


def gaps(results, name, steps):
    """{"best" or "last": accuracies (methods, seeds)}."""
    runs = np.array([results[name, steps, method] for method in METHODS])
    return {"best": runs.max(axis=-1), "last": runs[..., -1]}


def image_rows(results):
    """A row for each step size and T: accuracies, and what ADP-SGD gains."""
    rows = []
    for name, steps in dict.fromkeys(key[:2] for key in results):
        rates = STEP_SIZES[name](np.arange(steps), steps)
        row = {"η_t": name, "T": steps, "factor": theory.adp_improvement(rates)}
        for which, accuracies in gaps(results, name, steps).items():
            for method, values in zip(METHODS, accuracies, strict=True):
                mean, error = report.mean_and_error(values)
                row |= {f"{method}, {which}": mean, f"± ({method}, {which})": error}
            gain, error = report.mean_and_error(accuracies[1] - accuracies[0])
            row |= {f"gain, {which}": gain, f"± (gain, {which})": error}
        rows.append(row)
    return sorted(rows, key=lambda row: list(STEP_SIZES).index(row["η_t"]))


def image_verdict(rows, size):
    """What was gained, where it exceeds two standard errors, and whether it grows."""
    lines = [
        f"accuracy of ADP-SGD less that of DP-SGD, {size.image_seeds} initial weights, "
        f"C = {IMAGE_CLIP:g}, ε = {size.image_epsilon:g} at δ = {IMAGE_DELTA:g}.\n"
    ]
    for name, which in itertools.product(STEP_SIZES, ("best", "last")):
        some = [row for row in rows if row["η_t"] == name]
        gains, errors = (
            np.array([row[key] for row in some]) for key in (f"gain, {which}", f"± (gain, {which})")
        )
        grows = gains[-1] - gains[0] > 2 * np.hypot(errors[-1], errors[0])
        lines.append(
            f"- {name}, {which}: higher at {np.sum(gains > 2 * errors)} of {len(some)} T, lower at "
            f"{np.sum(gains < -2 * errors)}; {gains[0]:+.4f} ± {errors[0]:.4f} at T = "
            f"{some[0]['T']}, {gains[-1]:+.4f} ± {errors[-1]:.4f} at {some[-1]['T']}; the gap "
            f"{'grows' if grows else 'is not seen to grow'} with T."
        )
    return "\n".join(lines)


def plot(rows, image_rows, path):
    """Ratios of the noise terms, and what is gained in accuracy, against T; by step sizes."""
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(len(STEP_SIZES), 3, figsize=(11, 6.6), sharex="col", sharey="col")
    for name, (left, middle, right) in zip(STEP_SIZES, grid, strict=True):
        for (i, batches), (pace, style) in itertools.product(
            enumerate(BATCHES), zip(PACES, ("o-", "s:"), strict=True)
        ):
            some = [r for r in rows if (r["batches"], r["η_t/η"], r["ηL"]) == (batches, name, pace)]
            for axes, key, error in ((left, "measured", "±"), (middle, "F(θ_T)", "± (F)")):
                axes.errorbar(
                    *_columns(some, "T", key, error), fmt=f"C{i}{style}", ms=4,
                    label=f"batches: {batches}; ηL = {pace:g}",
                )  # fmt: skip
        left.plot(*_columns(some, "T", "factor"), "k", lw=6, alpha=0.2, label="the bounds' factor")
        some = [row for row in image_rows if row["η_t"] == name]
        for which, style in (("best", "C4o-"), ("last", "C4s:")):
            columns = _columns(some, "T", f"gain, {which}", f"± (gain, {which})")
            right.errorbar(*columns, fmt=style, ms=4, label=f"{which} accuracy")
        left.set_ylabel(f"η_t/η = {name}")
        for axes, level in ((left, 1), (middle, 1), (right, 0)):
            axes.set(xscale="log")
            axes.axhline(level, color="0.4", lw=0.8)
            axes.grid(alpha=0.3)
    grid[0, 0].set_title("noise term of DP-SGD over that\nof ADP-SGD: Σ η‖∇F‖²/Σ η", fontsize=10)
    grid[0, 1].set_title("the same for the loss\nafter the last step", fontsize=10)
    grid[0, 2].set_title("digits: accuracy of ADP-SGD\nless that of DP-SGD", fontsize=10)
    for axes in grid[-1]:
        axes.set_xlabel("steps T (bars: ± 2 standard errors)")
    grid[0, 2].legend(fontsize=8)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.legend(
        *grid[0, 0].get_legend_handles_labels(), loc="lower left", ncol=4, frameon=False, fontsize=9
    )
    figure.savefig(path, dpi=95)
    plt.close(figure)


def _columns(rows, *keys):
    """Columns of a table; a third one, of standard errors, doubled."""
    columns = [[row[key] for row in rows] for key in keys]
    return columns[:2] + [2 * np.array(column) for column in columns[2:]]


def main():
    options = report.parser(__doc__, "adp").parse_args()
    size = QUICK if options.quick else Size()
    rows = convex_rows(convex(size, options.seed))
    report.write(options.output, "convex", rows, CLAIM, convex_verdict(rows))
    on_images = image_rows(images(size, options.seed))
    report.write(
        options.output, "digits", on_images, CLAIM_ON_IMAGES, image_verdict(on_images, size)
    )
    plot(rows, on_images, options.output / "adp.png")


if __name__ == "__main__":
    main()
