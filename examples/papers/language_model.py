"""A small Transformer learns to write: which second moment, in low and in high noise? (Figure 3)

    python examples/papers/language_model.py                 # half an hour on two cores
    python examples/papers/language_model.py --quick         # a minute, to try it out
    python examples/papers/language_model.py --full          # more steps, trials and seeds
    python examples/papers/language_model.py --data my.txt   # your own text

Section 5.2 of the paper on design principles for private adaptive optimizers fine-tunes TinyBERT on
arXiv abstracts; here one causal Transformer block learns the next character of English prose from
nothing. Kept is the ratio σ√d/B of noise to clip norm in the mean gradient of d weights: 0.137 in
the paper's low noise and 1.02 in its high noise. The low one hides next to nothing, here as there.

- The unit of privacy is one sequence of 33 characters; a sentence spans several.
- The text is cut in order: 80% to train, 10% to validate, 10% to test. The alphabet is fixed
  beforehand. What the choice of settings reveals about the validation part is not accounted.
- Learning rate, C and ε are drawn within `RANGES` (a Latin hypercube), as often for every method
  and noise, and chosen by the validation loss after the last step. The paper fixes C = 1 but for
  scale-then-privatize, and tunes momentum for DP-SGD, which is 0.9 here; β2 is 0.99.
- The chosen settings are run anew from other initial weights, and judged on the test part.

All runs go into runs_*.csv as they end; whoever starts the script again has them from there.
Writes language_model.csv, .md and .png to output/papers/language_model.
"""

import dataclasses
import itertools
import math
import os
import pathlib
import sys
import zlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import report
from scipy.stats import qmc

import dp_keras_opt as dp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from example_data import prose  # noqa: E402

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,;:!?'\"-()[]"  # after these: all the others
VOCABULARY, LENGTH, WIDTH, HEADS = len(ALPHABET) + 1, 32, 64, 4
DELTA = 1e-6
NOISES = {"low": 0.137, "high": 1.02}  # σ√d/B
METHODS = ["post-processing", "bias-corrected", "independent", "scale-then-privatize", "DP-SGD"]
ADAM = {"rate": (3e-3, 3e-2), "clip": (0.2, 1.0), "epsilon": (0.1, 10.0)}
RANGES = {method: ADAM for method in METHODS}  # ε in units of σC/B, the noise in one coordinate
RANGES["independent"] = ADAM | {"rate": (3e-3, 1e-1), "epsilon": (3.0, 100.0)}
# C in units of B/σ, beyond which v̂ would grow without end; ε as it is
RANGES["scale-then-privatize"] = ADAM | {"clip": (0.1, 0.9), "epsilon": (3e-5, 1e-3)}
RANGES["DP-SGD"] = {"rate": (0.3, 6.0), "clip": (0.2, 1.0), "epsilon": (1.0, 1.0)}  # has no ε
KEY = ["noise", "method", "rate", "clip", "epsilon", "seed"]
TEXTS = ("noise", "method", "curve")  # the other columns are numbers
LOWER = {"low": ["bias-corrected", "scale-then-privatize"], "high": ["scale-then-privatize"]}
CLAIM = (
    "The test loss of scale-then-privatize is lower than that of post-processing, in both noises; "
    "that of independent moments and of DP-SGD is higher; bias correction is slightly better in "
    "low noise, worse in high noise, and half of its v̂ are negative."
)


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is run: steps, batch size, settings tried, seeds to judge by, rows to judge on."""

    steps: int = 60
    every: int = 10  # steps between validations
    batch: int = 128
    trials: int = 4
    seeds: int = 3
    rows: int = 4096


QUICK = Size(steps=6, every=3, batch=32, trials=1, seeds=1, rows=256)
FULL = Size(steps=600, every=30, batch=256, trials=12, seeds=5, rows=8192)


def sequences(text):
    """Train, validation and test parts as disjoint rows of LENGTH + 1 character numbers."""
    numbers = {character: i for i, character in enumerate(ALPHABET)}
    tokens = np.array([numbers.get(c, len(ALPHABET)) for c in text.lower()], "int32")
    rows = tokens[: len(tokens) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    return np.split(rows, [len(rows) * 8 // 10, len(rows) * 9 // 10])


def xy(rows, count=None):
    """Inputs and targets of next-character prediction; of `count` rows, evenly spread."""
    rows = rows[np.linspace(0, len(rows) - 1, min(count or len(rows), len(rows))).astype(int)]
    return rows[:, :-1], rows[:, 1:]


def transformer():
    """One pre-norm block between embeddings and logits; every layer has a fast clipping rule."""
    layers = keras.layers
    tokens = keras.Input((LENGTH,), dtype="int32")
    places = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(VOCABULARY, WIDTH)(tokens) + layers.Embedding(LENGTH, WIDTH)(places)
    normal = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
    x = x + attention(normal, normal, use_causal_mask=True)
    hidden = layers.Dense(2 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
    x = x + layers.Dense(WIDTH)(hidden)
    return dp.DPModel(tokens, layers.Dense(VOCABULARY)(layers.LayerNormalization()(x)))


def optimizer_for(setting, batch, sigma, independent, noise="gaussian", strength=1.0):
    """The optimizer of a setting, whose clip norm and ε are in the units of RANGES.

    Args:
        setting: a dict of KEY.
        batch: expected batch size B.
        sigma: noise multiplier.
        independent: what estimates the second moment in the method of that name.
        noise: the mechanism.
        strength: standard deviation of its noise at a step, in units of σC/B.
    """
    method, rate, clip, epsilon = (setting[k] for k in ("method", "rate", "clip", "epsilon"))
    options = {"clip_norm": clip, "batch_size": batch, "noise_multiplier": sigma, "noise": noise}
    if method == "DP-SGD":
        return dp.optimizers.DPSGD(rate, momentum=0.9, **options)
    source = independent if method == "independent" else method.replace("-", "_")
    unit = strength * sigma / batch
    epsilon *= unit * clip
    if method == "scale-then-privatize":
        options["clip_norm"], epsilon = clip / unit, setting["epsilon"]
    return dp.optimizers.DPAdam(rate, beta_2=0.99, epsilon=epsilon, second_moment=source, **options)


def new_model(seed):
    """The Transformer with the initial weights of a seed; the noise stays unpredictable."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    return transformer()


def train(setting, parts, size):
    """Trains with one setting; returns the columns beyond KEY of a row of results."""
    model = new_model(setting["seed"])
    sigma = NOISES[setting["noise"]] * size.batch / math.sqrt(model.count_params())
    # Poisson batches: more examples than this in hardly any
    independent = dp.optimizers.moments.Independent(int(size.batch + 6 * size.batch**0.5))
    optimizer = optimizer_for(setting, size.batch, sigma, independent)
    batches = dp.data.poisson_batches(
        xy(parts[0]), size.batch, steps_per_epoch=size.every, unit="sequence"
    )
    return fitted(model, optimizer, batches, parts, size)


def fitted(model, optimizer, batches, parts, size, accountant="rdp"):
    """What `train` returns, after one `fit` of the model on the batches."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss)
    history = model.fit(
        batches,
        epochs=size.steps // size.every,
        validation_data=xy(parts[1], size.rows // 4),
        validation_batch_size=256,
        callbacks=[dp.callbacks.OptimizerReport()],
        verbose=0,
    ).history
    return {
        "curve": " ".join(f"{value:.4f}" for value in history["val_loss"]),
        "test": model.evaluate(*xy(parts[2], size.rows), batch_size=256, verbose=0),
        "σ": optimizer.noise_multiplier,
        "C": optimizer.clip_norm,
        "ε": getattr(optimizer, "epsilon", math.nan),
        "privacy": model.ledger.epsilon(DELTA, accountant),
        "negative": np.mean(history.get("negative_v", np.nan)),
        "norm": np.mean(history["gradient_norm"]),
    }


def run(setting, parts, size, path, train=train):
    """The result of `train` as a dict: from the table in `path`, or else added to it."""
    key = {name: setting[name] for name in KEY}
    row = report.remembered(path, key, lambda: train(setting, parts, size))
    numbers = {name: float(value) for name, value in row.items() if name not in TEXTS}
    return row | numbers | {"curve": np.array(row["curve"].split(), float)}


def settings(noise, method, ranges, trials, seed):
    """The settings to try, spread over the ranges on a logarithmic scale."""
    low, high = np.log10(list(ranges.values())).T
    draws = low + (high - low) * qmc.LatinHypercube(len(low), rng=seed).random(trials)
    rounded = [[float(f"{10**x:.3g}") for x in draw] for draw in draws]
    common = {"noise": noise, "method": method, "seed": seed}
    return [common | dict(zip(ranges, draw, strict=True)) for draw in rounded]


def experiment(pairs, parts, size, seed, path, ranges=RANGES, train=train):
    """{(noise, method): results from different initial weights, at the settings tuned}."""
    results = {pair: [] for pair in pairs}
    tried = {pair: settings(*pair, ranges[pair[1]], size.trials, seed) for pair in results}
    for candidates in tried.values() if size.trials > 1 else ():
        candidates.sort(key=lambda s: final_loss(run(s, parts, size, path, train)))
    for new_seed, pair in itertools.product(range(seed + 1, seed + 1 + size.seeds), results):
        results[pair].append(run(tried[pair][0] | {"seed": new_seed}, parts, size, path, train))
    return results


def runs_file(folder, parts, size):
    """Where the runs of such data and size go; those with more seeds begin with the same."""
    same = zlib.crc32(parts[0].tobytes() + repr(dataclasses.replace(size, seeds=0)).encode())
    return folder / f"runs_{same:08x}.csv"


def final_loss(result):
    """Validation loss after the last step; ∞ where training diverged."""
    return np.nan_to_num(result["curve"][-1], nan=np.inf)


def table(results):
    """One row for each noise and method."""
    rows = []
    for (noise, method), runs in results.items():
        first, (loss, error) = runs[0], report.mean_and_error([run["test"] for run in runs])
        negative, norm = (np.mean([run[name] for run in runs]) for name in ("negative", "norm"))
        adam = method != "DP-SGD"
        rows.append(
            {"noise": noise, "method": method, "σ": first["σ"], f"ε at δ = {DELTA:g}":
             first["privacy"], "η": first["rate"], "C": first["C"], "Adam's ε":
             first["ε"] if adam else "", "test loss": loss, "±": error,
             "v̂ < 0": negative if adam else "", "gradient_norm": norm}
        )  # fmt: skip
    return rows


def verdict(results, size):
    """Each method against post-processing; more than 2 standard errors decide."""
    effort = f"{size.steps} steps, {size.trials} settings tried, {size.seeds} initial weights"
    lines = [f"test loss minus that of {METHODS[0]}, ± standard error ({effort}).\n"]
    for noise, method in itertools.product(NOISES, METHODS[1:]):
        pair = [[r["test"] for r in results[noise, name]] for name in (METHODS[0], method)]
        (base, loss), errors = report.mean_and_error(pair, axis=1)
        gap, error = loss - base, np.hypot(*errors)
        sign, word = (-1, "lower") if method in LOWER[noise] else (1, "higher")
        seen = report.seen(sign * gap, error)
        lines.append(f"- {noise} noise, {method} {word}: {seen}, {gap:+.4f} ± {error:.4f}.")
    for noise in NOISES:
        share = np.mean([run["negative"] for run in results[noise, "bias-corrected"]])
        lines.append(f"- {noise} noise, negative v̂ under bias correction: {share:.0%}.")
    return "\n".join(lines)


def plot(results, validation, size, path):
    """Validation loss against steps, noise by noise."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(NOISES), figsize=(10, 4.8), sharey=True)
    steps = np.arange(size.every, size.steps + 1, size.every)
    shares = np.unique(validation, return_counts=True)[1] / validation.size
    for noise, axes in zip(NOISES, panels, strict=True):
        for method, style in zip(METHODS, ("C0-", "C4-", "C3-", "C2-", "k--"), strict=True):
            mean, error = report.mean_and_error([run["curve"] for run in results[noise, method]])
            axes.errorbar(steps, mean, 2 * error, fmt=style, marker=".", label=method)
        axes.axhline(-shares @ np.log(shares), color="0.5", ls=":", label="character frequencies")
        one = results[noise, METHODS[0]][0]
        spent = f"ε = {one['privacy']:.3g} at δ = {DELTA:g}"
        axes.set(xlabel="steps", title=f"{noise} noise: σ = {one['σ']:.2g}, {spent}")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("validation loss, nats per character\n(± 2 standard errors)")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="lower center", ncol=6, frameon=False,
        columnspacing=1.2, handlelength=1.6,
    )  # fmt: skip
    figure.savefig(path, dpi=100)
    plt.close(figure)


def arguments(module_doc, name, quick, default, full, hours):
    """(options of the command line, the `Size` that they ask for); makes the output folder."""
    parser = report.parser(module_doc, name)
    parser.add_argument("--full", action="store_true", help=f"ten times the steps; {hours}")
    parser.add_argument("--data", help="a text file")
    parser.add_argument("--seeds", type=int, help="initial weights to judge a method by")
    options = parser.parse_args()
    size = quick if options.quick else full if options.full else default
    options.output.mkdir(parents=True, exist_ok=True)
    return options, dataclasses.replace(size, seeds=options.seeds or size.seeds)


def main():
    options, size = arguments(__doc__, "language_model", QUICK, Size(), FULL, "hours")
    parts = sequences(prose(options.data))
    path = runs_file(options.output, parts, size)
    pairs = itertools.product(NOISES, METHODS)
    results = experiment(pairs, parts, size, options.seed, path)
    report.write(options.output, "language_model", table(results), CLAIM, verdict(results, size))
    plot(results, parts[1], size, options.output / "language_model.png")


if __name__ == "__main__":
    main()
