"""Do low-pass filters make private image classifiers better? (DOPPLER)

    python examples/papers/doppler.py                    # digits, small CNN: 20 minutes, one core
    python examples/papers/doppler.py --quick            # a minute, to try it out
    python examples/papers/doppler.py --full             # all models, more steps and seeds; a day
    python examples/papers/doppler.py --dataset cifar10 --model paper --steps 2000
    python examples/papers/doppler.py --data my.npz      # x_train, y_train, x_test, y_test

Section 6 and appendix C of the paper on low-pass filters for private optimizers: DP-SGD, DP-AdamBC
and DP-GaLore with a filter and without, at ε = 1, 3, 8 and δ = 1/N^1.1; then, for DP-SGD at ε = 1,
the filters of tables 2 and 4, four ways of clipping, and a cosine schedule with warm-up.

- By default the images are the 1797 digits of scikit-learn, of 8 × 8 pixels: N = 1198 train, 299
  validate and 300 test.
- Without a filter DP-SGD has no momentum; DP-AdamBC and DP-GaLore have Adam's, β1 = 0.9.
- For each setting as many learning rates are tried. The one with the best mean of the last three
  validations is judged on the test images, from other initial weights. What the choice reveals
  about the validation images is not accounted.
- The paper does not list the layers of its 5-layer CNN. Here they are four convolutions with group
  normalization, and a dense layer.

All runs go into runs_*.csv as they end; whoever starts the script again has them from there.
Writes to output/papers/doppler: doppler.csv, .md and .png (accuracy against ε); _ablations.png;
_filters.png (figure 6); _gradients.png (figures 1 and 2: gradients that DP-SGD released at ε = 1,
and some without noise, which are as public as the images).
"""

import dataclasses
import functools
import itertools
import math
import os
import pathlib
import sys
import zlib
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import report
import tensorflow as tf
from scipy import signal

import dp_keras_opt as dp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from example_data import images  # noqa: E402

CLIP_NORM = 1.0
FLOOR = 0.5  # Adam's ε, in units of the noise in one coordinate
RANK = 8  # of DP-GaLore
RATES = {
    "DP-SGD": (0.25, 0.5, 1.0, 2.0, 4.0),
    "DP-AdamBC": (0.004, 0.008, 0.016, 0.032, 0.064),
    "DP-GaLore": (0.004, 0.008, 0.016, 0.032, 0.064),
}
FILTER = "first_order_v1"  # of the comparison between optimizers
PRESETS = tuple(dp.filters.PRESETS)
TABLES = {2: PRESETS[:5], 4: PRESETS[5:]}  # of the paper
CLIPPINGS = ("clip, flat", "clip, per layer", "normalize, flat", "normalize, per layer")
SCHEDULES = ("constant", "cosine")
ORDER = [  # what is varied, what should be better, and than what
    *(("filter", name, "none") for name in PRESETS if name not in ("none", FILTER)),
    ("filter", FILTER, "second_order"),
    ("clipping", "normalize, flat", "clip, flat"),
    ("clipping", "normalize, per layer", "clip, per layer"),
    ("clipping", "clip, flat", "clip, per layer"),
    ("clipping", "normalize, flat", "normalize, per layer"),
    ("schedule", "cosine", "constant"),
]
CLAIM = (
    "With a low-pass filter the test accuracy is 3 to 10 points higher, for every optimizer and ε. "
    "A second-order filter smooths too much for a short training. Normalizing is better than "
    "clipping, one norm better than one per layer, and a cosine schedule better than none."
)


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is run: of what the paper varies, and how often."""

    batch: int = 1000  # at most, and at most a fifth of the training images
    every: int = 20  # steps between validations
    tuning_seeds: int = 1  # runs at each learning rate; 0: the middle one of RATES, untested
    seeds: int = 5  # runs to judge by
    epsilons: tuple = (1.0, 3.0, 8.0)
    filters: tuple = PRESETS
    clippings: tuple = CLIPPINGS
    schedules: tuple = SCHEDULES

    validations = 10

    @property
    def steps(self):
        return self.validations * self.every


QUICK = Size(
    every=1, tuning_seeds=0, seeds=1, epsilons=(1.0,), filters=("none", FILTER),
    clippings=CLIPPINGS[:1], schedules=SCHEDULES[:1],
)  # fmt: skip
FULL = Size(every=100, tuning_seeds=2, seeds=10)


class Setting(NamedTuple):
    """What is compared. The ablations change one thing of `Setting(model)`."""

    model: str
    optimizer: str = "DP-SGD"
    filter: str = FILTER
    epsilon: float = 1.0
    clipping: str = CLIPPINGS[0]
    schedule: str = SCHEDULES[0]


class Outcome(NamedTuple):
    """What came out for a setting; accuracies are in percent."""

    sigma: float
    rate: float
    tests: Any  # (runs,)
    curves: Any  # (runs, validations)


class Data(NamedTuple):
    """Pairs of images and labels."""

    train: tuple
    validation: tuple
    test: tuple


def load(name, path, seed):
    """The three parts of the images; at most a fifth of those for training validate."""
    train, test = images(name, path, seed)
    cut = len(train[1]) - min(len(train[1]) // 5, 5000)
    return Data(tuple(a[:cut] for a in train), tuple(a[cut:] for a in train), test)


# Models. None normalizes over the batch.


def small_cnn(x):
    """Two convolutions."""
    for filters in (16, 32):
        x = keras.layers.Conv2D(filters, 3, padding="same", activation="tanh")(x)
        x = keras.layers.AveragePooling2D(2)(x)
    return keras.layers.Flatten()(x)


def paper_cnn(x):
    """Four convolutions; with the logits, five layers."""
    for filters, pool in ((32, 1), (64, 2), (64, 1), (128, 2)):
        x = keras.layers.Conv2D(filters, 3, padding="same")(x)
        x = keras.layers.Activation("relu")(keras.layers.GroupNormalization(8)(x))
        x = keras.layers.AveragePooling2D(pool)(x)
    return keras.layers.GlobalAveragePooling2D()(x)


def vit(x, width=32, heads=2, depth=2):
    """Pre-norm Transformer blocks on patches of an eighth of the image's side, at least 2."""
    layers, patch = keras.layers, max(2, x.shape[1] // 8)
    x = layers.Reshape((-1, width))(layers.Conv2D(width, patch, strides=patch)(x))
    places = keras.ops.cumsum(keras.ops.ones_like(x[..., 0], dtype="int32"), axis=1) - 1
    x = x + layers.Embedding(x.shape[1], width)(places)
    for _ in range(depth):
        normal = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(heads, width // heads)(normal, normal)
        hidden = layers.Dense(2 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(hidden)
    return layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))


MODELS = {"small": small_cnn, "vit": vit, "paper": paper_cnn}


def classifier(name, train):
    """A private model of the images, with new weights."""
    inputs = keras.Input(train[0].shape[1:])
    features = MODELS[name](keras.layers.Rescaling(2.0, offset=-1.0)(inputs))
    return dp.DPModel(inputs, keras.layers.Dense(int(train[1].max()) + 1)(features))


# Training.


@functools.cache
def noise_multiplier(sampling, steps, epsilon):
    """It is the same for all settings, which all release one mean gradient a step."""
    if math.isinf(epsilon):
        return 0.0
    optimizer = dp.optimizers.DPSGD(clip_norm=CLIP_NORM, batch_size=sampling.batch_size)
    delta = sampling.num_examples**-1.1
    return dp.accounting.calibrate(optimizer, sampling, steps, epsilon, delta)


def optimizer_for(setting, sigma, batch, steps):
    """The optimizer of a setting, its learning rate to be set."""
    bound, scope = setting.clipping.split(", ")
    options = {
        "clip_norm": CLIP_NORM,
        "batch_size": batch,
        "noise_multiplier": sigma,
        "clipping": scope.replace(" ", "_"),
        "normalize": bound == "normalize",
        "gradient_filter": None if setting.filter == "none" else setting.filter,
    }
    if setting.optimizer == "DP-SGD":
        return dp.optimizers.DPSGD(**options)
    options["second_moment"] = "bias_corrected"
    options["epsilon"] = FLOOR * sigma * CLIP_NORM / batch
    if setting.optimizer == "DP-AdamBC":
        return dp.optimizers.DPAdam(**options)
    return dp.optimizers.DPGaLore(rank=RANK, update_gap=max(1, steps // 5), **options)


class LearningRate(keras.callbacks.Callback):
    """Sets the learning rate of each step: constant, or half a cosine after a linear warm-up."""

    def __init__(self, rate, schedule, steps, warm_up=0.1):
        super().__init__()
        time = np.arange(1, steps + 1) / steps
        cosine = (1 + np.cos(np.pi * np.maximum(time - warm_up, 0) / (1 - warm_up))) / 2
        shape = np.minimum(time / warm_up, cosine) if schedule == "cosine" else np.ones(steps)
        self.rates = iter(rate * shape)

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = next(self.rates)


class Trainer:
    """Trains one setting again and again, as compiling may take longer than training.

    The model's ledger adds up all runs; each by itself has the ε of its setting.
    """

    def __init__(self, setting, data, size):
        keras.backend.clear_session()
        self.setting, self.data, self.size = setting, data, size
        batch = min(size.batch, len(data.train[1]) // 5)
        self.batches = dp.data.poisson_batches(data.train, batch, size.every, unit="image")
        sigma = noise_multiplier(self.batches.sampling, size.steps, setting.epsilon)
        self.model = classifier(setting.model, data.train)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.optimizer = optimizer_for(setting, sigma, batch, size.steps)
        # Without XLA, which cannot call back into Python (`record`).
        self.model.compile(self.optimizer, loss, metrics=["accuracy"], jit_compile=False)
        self.optimizer.build(self.model.trainable_variables)
        self.start = [variable.numpy() for variable in self.optimizer.variables]

    def __call__(self, rate, seed):
        """The results of a run, the columns of a row of runs_*.csv."""
        keras.utils.set_random_seed(seed)  # initial weights; the noise stays unpredictable
        fresh = classifier(self.setting.model, self.data.train)
        self.model.set_weights(fresh.get_weights())
        for variable, value in zip(self.optimizer.variables, self.start, strict=True):
            variable.assign(value)
        history = self.model.fit(
            self.batches,
            epochs=self.size.validations,
            validation_data=self.data.validation,
            validation_batch_size=500,
            callbacks=[LearningRate(rate, self.setting.schedule, self.size.steps)],
            verbose=0,
        ).history
        _, accuracy = self.model.evaluate(*self.data.test, batch_size=500, verbose=0)
        return {
            "σ": self.optimizer.noise_multiplier,
            "curve": " ".join(f"{100 * value:.2f}" for value in history["val_accuracy"]),
            "test": f"{100 * accuracy:.2f}",
        }

    def record(self, rate, seed, most=5000):
        """Trains; the gradients released, after the filter if there is one, in every step.

        Returns:
            (steps, weights), of at most so many weights, evenly spread.
        """
        gradients, stride = [], -(-self.model.count_params() // most)

        def take(queries, released):
            flat = tf.concat([tf.reshape(g, [-1]) for g in released[0].value], axis=0)
            tf.numpy_function(lambda g: gradients.append(g.copy()), [flat[::stride]], [])

        self.model.observe_releases(take)
        self(rate, seed)
        low_pass = self.optimizer.gradient_filter or dp.filters.LowPass.preset("none")
        b, a = low_pass.b, [1.0, *low_pass.a]
        weights = signal.lfilter(b, a, np.ones((len(gradients), 1)), axis=0)
        return signal.lfilter(b, a, gradients, axis=0) / weights


def comparisons(size, models):
    """Pairs of settings: with the filter, and without."""
    axes = itertools.product(models, RATES, size.epsilons)
    return [
        (Setting(model, optimizer, FILTER, epsilon), Setting(model, optimizer, "none", epsilon))
        for model, optimizer, epsilon in axes
    ]


def ablations(size, model):
    """{(title, what is varied): settings}."""
    filters = {
        (f"filters of table {number}", "filter"): [f for f in ("none", *names) if f in size.filters]
        for number, names in TABLES.items()
    }
    others = {
        ("clipping", "clipping"): size.clippings,
        ("learning rate", "schedule"): size.schedules,
    }
    return {
        (title, field): [Setting(model)._replace(**{field: v}) for v in dict.fromkeys(values)]
        for (title, field), values in (filters | others).items()
    }


def outcome(setting, data, size, seed, path):
    """The Outcome of a setting at the learning rate that is best for the validation images."""
    trainer = functools.cache(lambda: Trainer(setting, data, size))  # if there is a run to make
    first = seed + size.tuning_seeds

    def run(rate, number):
        key = setting._asdict() | {"rate": rate, "seed": number}
        row = report.remembered(path, key, lambda: trainer()(rate, number))
        return float(row["σ"]), float(row["test"]), np.array(row["curve"].split(), float)

    def validated(rate):
        return np.mean([run(rate, number)[2][-3:] for number in range(seed, first)])

    rates = RATES[setting.optimizer]
    rate = max(rates, key=validated) if size.tuning_seeds else rates[len(rates) // 2]
    sigmas, *accuracies = zip(*(run(rate, first + i) for i in range(size.seeds)), strict=True)
    return Outcome(sigmas[0], rate, *map(np.array, accuracies))


def experiment(data, size, models, seed, path):
    """{setting: Outcome}; the ablations are of the first model."""
    compared = itertools.chain(*comparisons(size, models))
    ablated = itertools.chain(*ablations(size, models[0]).values())
    settings = dict.fromkeys([*compared, *ablated])
    return {setting: outcome(setting, data, size, seed, path) for setting in settings}


# What came out.


def table(results):
    """One row for each setting."""
    rows = []
    for setting, (sigma, rate, tests, _) in results.items():
        mean, error = report.mean_and_error(tests)
        found = {"σ": sigma, "best η": rate, "test accuracy, %": float(mean), "±": float(error)}
        rows.append(setting._asdict() | found)
    return rows


def compare(results, better, worse):
    """How much more accurate a setting is, the standard error of that, and what it says."""
    means, errors = report.mean_and_error([results[s].tests for s in (better, worse)], axis=1)
    gain, error = means[0] - means[1], np.hypot(*errors)
    return gain, error, report.seen(gain, error)


def verdict(results, size, models):
    """Each part of the claim; more than 2 standard errors decide."""
    claimed = comparisons(size, models)
    texts = {pair: f"better with {FILTER} than without" for pair in claimed}
    for field, better, worse in ORDER:
        pair = tuple(Setting(models[0])._replace(**{field: value}) for value in (better, worse))
        if results.keys() >= set(pair):
            texts[pair] = f"{better} better than {worse}"
    found = {pair: compare(results, *pair) for pair in texts}
    gains, errors = np.array([found[pair][:2] for pair in claimed]).T
    better = gains > 2 * errors
    as_much = better & (gains >= 3) & (gains <= 10)
    word = "seen" if all(as_much) else "seen in part" if any(as_much) else "not seen"
    ends = sum(results[s].rate in (RATES[s.optimizer][0], RATES[s.optimizer][-1]) for s in results)
    lines = [
        f"3 to 10 points: {word}. On average it is {gains.mean():+.1f} ± "
        f"{np.linalg.norm(errors) / len(errors):.1f}. Of {len(claimed)} comparisons the filter is "
        f"better in {sum(better)}, by 3 to 10 points in {sum(as_much)}; as much as 3 points would "
        f"be more than 2 standard errors off in {sum(gains + 2 * errors < 3)}. ({size.steps} "
        f"steps; of runs {size.tuning_seeds} at each learning rate, and {size.seeds} at the best "
        f"one to judge it, which is at an end of its grid for {ends} of {len(results)} settings.)\n"
    ]
    for pair, text in texts.items():
        gain, error, word = found[pair]
        where = f"{pair[0].model} model, {pair[0].optimizer}, ε = {pair[0].epsilon:g}"
        lines.append(f"- {where}, {text}: {word}, {gain:+.1f} ± {error:.1f} points.")
    return "\n".join(lines)


def plot_comparisons(results, size, models, path):
    """Test accuracy against ε, optimizer by optimizer (figure 4)."""
    figure, panels = plt.subplots(
        len(models), len(RATES), figsize=(11, 0.6 + 3.2 * len(models)), sharey="row",
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for (model, optimizer), axes in zip(itertools.product(models, RATES), panels.flat, strict=True):
        for name, style in (("none", "C0--o"), (FILTER, "C1-s")):
            tests = [results[Setting(model, optimizer, name, e)].tests for e in size.epsilons]
            mean, error = report.mean_and_error(tests, axis=1)
            axes.errorbar(size.epsilons, mean, 2 * error, fmt=style, capsize=3, label=name)
        axes.set(title=f"{optimizer}, {model} model", xlabel="ε", xscale="log")
        axes.minorticks_off()
        axes.set_xticks(size.epsilons, [f"{epsilon:g}" for epsilon in size.epsilons])
        axes.grid(alpha=0.3)
    for axes in panels[:, 0]:
        axes.set_ylabel("test accuracy, %\n(± 2 standard errors)")
    panels[0, 0].legend(title="filter")
    save(figure, path)


def plot_ablations(results, size, model, path):
    """Validation accuracy against steps (figures 8, 9 and 11)."""
    figure, panels = plt.subplots(2, 2, figsize=(11, 8), sharey=True, layout="constrained")
    steps = np.arange(size.every, size.steps + 1, size.every)
    parts = ablations(size, model).items()
    for ((title, field), settings), axes in zip(parts, panels.flat, strict=True):
        for setting in settings:
            mean, error = report.mean_and_error(results[setting].curves)
            axes.errorbar(steps, mean, 2 * error, marker=".", label=getattr(setting, field))
        axes.set(title=title, xlabel="steps", ylabel="validation accuracy, %")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    base = Setting(model)
    figure.suptitle(
        f"{base.optimizer} at ε = {base.epsilon:g}, {model} model (± 2 standard errors)"
    )
    save(figure, path)


def plot_filters(path):
    """The filters of tables 2 and 4 in time and frequency (figure 6)."""
    figure, panels = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for (number, names), (left, right) in zip(TABLES.items(), panels, strict=True):
        low_passes = {name: dp.filters.LowPass.preset(name) for name in names}
        dp.plots.impulse_response(low_passes, axes=left)
        dp.plots.frequency_response(low_passes, axes=right)
        left.set(title=f"table {number}", ylim=(-0.06, 0.35))  # without a filter it begins at 1
        right.set(title=f"table {number}")
    save(figure, path)


def plot_gradients(results, data, size, model, seed, path):
    """Auto-correlation and spectrum of gradients and of noise (figures 1 and 2)."""
    plain, filtered = (Setting(model, filter=name) for name in ("none", FILTER))

    def record(setting, epsilon=plain.epsilon):
        trainer = Trainer(setting._replace(epsilon=epsilon), data, size)
        return trainer.record(results[setting].rate, seed), trainer

    exact, _ = record(plain, math.inf)
    released, trainer = record(plain)
    smooth, _ = record(filtered)
    std = trainer.optimizer.noise_multiplier * CLIP_NORM / trainer.optimizer.batch_size
    noise = np.random.default_rng(seed).normal(0, std, released.shape)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    parts = {"without noise": exact, "noise": noise}
    dp.plots.autocorrelation(parts | {"released": released}, min(50, size.steps), axes=left)
    dp.plots.spectrum(parts, axes=middle)
    low_pass = dp.filters.LowPass.preset(FILTER)
    dp.plots.spectrum({"released": released, "released, then filtered": smooth}, low_pass, right)
    left.set(title="gradients and noise")
    middle.set(title="gradients and noise")
    right.set(title=f"released at ε = {plain.epsilon:g}, and after {FILTER}")
    right.legend(loc="upper right", bbox_to_anchor=(1, 0.93))
    save(figure, path)


def save(figure, path):
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main():
    parser = report.parser(__doc__, "doppler")
    parser.add_argument("--full", action="store_true", help="all models, 1000 steps, 10 seeds")
    parser.add_argument("--dataset", choices=("digits", "mnist", "cifar10"), default="digits")
    parser.add_argument("--data", help="an .npz of x_train, y_train, x_test, y_test")
    parser.add_argument("--model", choices=tuple(MODELS), default="small")
    parser.add_argument("--steps", type=int, help="of training (rounded down to tens)")
    parser.add_argument("--seeds", type=int, help="runs to judge a setting by")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL if options.full else Size()
    size = dataclasses.replace(
        size,
        every=max(1, (options.steps or size.steps) // size.validations),
        seeds=options.seeds or size.seeds,
    )
    models = sorted(MODELS, key=lambda name: name != options.model)[: None if options.full else 1]
    data, folder = load(options.dataset, options.data, options.seed), options.output
    folder.mkdir(parents=True, exist_ok=True)
    same = repr((size.batch, size.every, size.tuning_seeds, CLIP_NORM, FLOOR, RANK)).encode()
    path = folder / f"runs_{zlib.crc32(data.train[0].tobytes() + same):08x}.csv"
    results = experiment(data, size, models, options.seed, path)
    report.write(folder, "doppler", table(results), CLAIM, verdict(results, size, models))
    plot_comparisons(results, size, models, folder / "doppler.png")
    plot_ablations(results, size, models[0], folder / "doppler_ablations.png")
    plot_filters(folder / "doppler_filters.png")
    plot_gradients(results, data, size, models[0], options.seed, folder / "doppler_gradients.png")


if __name__ == "__main__":
    main()
