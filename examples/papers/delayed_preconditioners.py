"""DP² against DP-SGD, DP-RMSProp, AdaDPS and its own ablations at equal ε, on MovieLens-100k.

    python examples/papers/delayed_preconditioners.py          # about 45 minutes on an idle core
    python examples/papers/delayed_preconditioners.py --quick  # two epochs, untuned, to try it
    python examples/papers/delayed_preconditioners.py --full   # the paper's setting, two days

All take the same number of steps, with noise calibrated to the same ε: that of the paper's σ = 0.5.
By default there are 40 times fewer steps than in the paper, of 16 times larger batches, and delays
in proportion. AdaDPS is told 1% of the training ratings as public data.

Of each grid of the paper as many configurations are tried, on a tenth of the training ratings that
is held out (no ε covers that). DP², with the largest grid, gets help: its search starts from the
best of DP-SGD. What wins is trained on all training ratings, from several initial weights, and
meets the test ratings. runs.csv remembers each run: an interrupted experiment goes on.
"""

import csv
import functools
import itertools
import json
import os
import pathlib
import sys
import time
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # the other examples

import keras
import matplotlib.pyplot as plt
import numpy as np
import report
from movielens import DELTA, factorization, train_and_test

import dp_keras_opt as dp

CLAIM = (
    "at equal ε DP² beats DP-SGD, DP-RMSProp and its ablations, is as good as AdaDPS without its "
    "public data, and gets to DP-SGD's best error in up to 4 times fewer steps (figure 6)."
)


class Setting(NamedTuple):
    """How long to train on how many ratings, and how much to try."""

    ratings: int
    batch_size: int
    epochs: int
    trials: int  # configurations of each method; 0: the paper's values, untested
    seeds: int

    @property
    def steps_per_epoch(self):
        return self.ratings // self.batch_size

    @property
    def steps(self):
        return self.epochs * self.steps_per_epoch


QUICK = Setting(ratings=20_000, batch_size=1024, epochs=2, trials=0, seeds=2)
DEFAULT = Setting(ratings=80_000, batch_size=1024, epochs=20, trials=20, seeds=5)
FULL = Setting(ratings=80_000, batch_size=64, epochs=50, trials=20, seeds=5)


SGD = {"learning_rate": (0.03, 0.1, 0.3, 1.0, 3.0, 5.0), "clip_norm": (0.1, 0.25, 0.5, 1.0)}
RMSPROP = {
    "learning_rate": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    "clip_norm": SGD["clip_norm"],
    "epsilon": (1e-7, 1e-5, 1e-3, 1e-2),
}
ADADPS = RMSPROP | {"clip_norm": (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0)}
DP2_ONE_CLIP_NORM = SGD | {
    "adaptive_learning_rate": RMSPROP["learning_rate"],
    "epsilon": RMSPROP["epsilon"],
    "delay": (0.02, 0.25, 0.5, 0.8),  # of all steps: 1250 to 50,000 of the paper's 62,500
}
DP2 = DP2_ONE_CLIP_NORM | {"adaptive_clip_norm": ADADPS["clip_norm"]}
EXTRA_QUERY = functools.partial(dp.optimizers.DP2RMSprop, ablation="extra_query")
NOISE_FIRST = functools.partial(dp.optimizers.DP2RMSprop, ablation="noise_before_preconditioning")
METHODS = {  # name: optimizer, grid, and what the paper chose from it for these data
    "DP-SGD": (dp.optimizers.DPSGD, SGD, (0.1, 1.0)),
    "DP-RMSProp": (dp.optimizers.DPRMSprop, RMSPROP, (0.001, 0.5, 1e-3)),
    "AdaDPS": (dp.optimizers.AdaDPS, ADADPS, (0.01, 10.0, 1e-2)),
    "DP²": (dp.optimizers.DP2RMSprop, DP2, (0.1, 1.0, 0.03, 1e-3, 0.5, 5.0)),
    # For the ablations it does not say: the values of DP².
    "DP² with extra query": (EXTRA_QUERY, DP2, (0.1, 1.0, 0.03, 1e-3, 0.5, 5.0)),
    "DP² with noise first": (NOISE_FIRST, DP2_ONE_CLIP_NORM, (0.1, 1.0, 0.03, 1e-3, 0.5)),
}


def paper_epsilon():
    """What the paper's σ = 0.5 costs over 50 epochs of batches of 64."""
    optimizer = dp.optimizers.DPSGD(clip_norm=1.0, batch_size=64, noise_multiplier=0.5)
    sampling = dp.accounting.Sampling.poisson(FULL.ratings, FULL.batch_size)
    return dp.accounting.epsilon(optimizer, sampling, steps=FULL.steps, delta=DELTA)


def make_optimizer(name, configuration, setting):
    """The optimizer of a method, its noise to be calibrated."""
    if "delay" in configuration:
        configuration = {"adaptive_clip_norm": configuration["clip_norm"]} | configuration
        configuration["delay"] = max(1, round(configuration["delay"] * setting.steps))
    return METHODS[name][0](**configuration, batch_size=setting.batch_size)


CALIBRATED = {}


def calibrate(optimizer, *arguments):
    """Sets the noise, which is found once for all optimizers with as many private releases."""
    key = sum(not release.is_public for release in optimizer.releases_for(1.0)), *arguments
    if key not in CALIBRATED:
        CALIBRATED[key] = dp.accounting.calibrate(optimizer, *arguments, DELTA)
    optimizer.noise_multiplier = CALIBRATED[key]


def rows(data, start, stop=None):
    """A part of the ratings."""
    x, y = data
    return {name: ids[start:stop] for name, ids in x.items()}, y[start:stop]


def train(name, configuration, seed, data, sizes, setting, epsilon):
    """Trains on the first part of `data`; ε spent, and errors on the second after each epoch."""
    keras.backend.clear_session()
    (private, held_out), size = data, setting.batch_size
    batches = dp.data.poisson_batches(private, size, setting.steps_per_epoch, unit="rating")
    optimizer = make_optimizer(name, configuration, setting)
    calibrate(optimizer, batches.sampling, setting.steps, epsilon)
    if optimizer.needs_public:  # they are in the private batches too: all methods sample alike
        batches = dp.data.with_public(batches, rows(private, 0, len(private[1]) // 100))
    keras.utils.set_random_seed(seed)  # initial weights; the noise stays unpredictable
    model = factorization(*sizes)
    model.compile(optimizer=optimizer, loss="mse")
    history = model.fit(
        batches,
        epochs=setting.epochs,
        validation_data=held_out,
        verbose=0,
        validation_batch_size=10_000,
    ).history
    return {"epsilon": model.ledger.epsilon(DELTA), "errors": history["val_loss"]}


class Runs:
    """Results of runs, kept in a file."""

    def __init__(self, path):
        self.path, self.results = path, {}
        if path.exists():
            with open(path, newline="", encoding="utf-8") as file:
                self.results = {tuple(key): json.loads(result) for *key, result in csv.reader(file)}

    def __call__(self, key, compute):
        """The result for this key: from the file, or a new one."""
        key, start = tuple(map(str, key)), time.perf_counter()
        if key not in self.results:
            self.results[key] = result = compute()
            with open(self.path, "a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow([*key, json.dumps(result)])
            print(f"run {len(self.results)}, {time.perf_counter() - start:.0f} s: "
                  f"{result['errors'][-1]:.4f} {' '.join(key)}", flush=True)  # fmt: skip
        return self.results[key]


def likely(configuration, sgd):
    """Whether DP² takes over the SGD phase of DP-SGD's winner, and up to a factor of 3 its noise
    (η·C·σ) where it clips preconditioned gradients. True of other methods."""
    if "delay" not in configuration:
        return True
    rate, bound = configuration["adaptive_learning_rate"], configuration.get("adaptive_clip_norm")
    noise = rate * bound / (sgd["learning_rate"] * sgd["clip_norm"]) if bound else 1.0
    return sgd.items() <= configuration.items() and 1 / 3 <= noise <= 3


def tune(grid, chosen, run, trials, seed, sgd):
    """The configuration with the least final error of those tried: the paper's, random
    ones that are likely given DP-SGD's winner, and from half-way on grid neighbours of the best."""
    everything = list(itertools.product(*(range(len(values)) for values in grid.values())))
    rng, errors = np.random.default_rng(seed), {}

    def configuration(place):
        return {name: grid[name][i] for name, i in zip(grid, place, strict=True)}

    def next_place():
        untried = [place for place in everything if place not in errors]
        if not errors:
            return tuple(v.index(value) for v, value in zip(grid.values(), chosen, strict=True))
        if len(errors) < trials / 2:
            liked = [place for place in untried if likely(configuration(place), sgd)]
        else:
            best = min(errors, key=errors.get)
            liked = [place for place in untried if np.abs(np.subtract(place, best)).sum() == 1]
        return (liked or untried)[rng.integers(len(liked or untried))]

    while len(errors) < min(trials, len(everything)):
        place = next_place()
        error = run(configuration(place))["errors"][-1]
        errors[place] = error if np.isfinite(error) else np.inf
    return configuration(min(errors, key=errors.get) if errors else next_place())


def experiment(setting, epsilon, seed, runs):
    """Tunes and trains all methods; {method: (configuration, ε, test errors [seeds, epochs])}."""
    ratings, test, sizes = train_and_test(seed=seed)
    ratings, cut = rows(ratings, 0, setting.ratings), setting.ratings * 9 // 10
    stages = {"tune": (rows(ratings, 0, cut), rows(ratings, cut)), "test": (ratings, test)}
    about = f"{setting.ratings}/{setting.batch_size}/{setting.epochs}/{epsilon:.4g}/{seed}"

    def run(stage, name, configuration, number=0):
        key = about, stage, name, json.dumps(configuration), number
        arguments = name, configuration, seed + number, stages[stage], sizes, setting, epsilon
        return runs(key, lambda: train(*arguments))

    results = {}
    for name, (_, grid, chosen) in METHODS.items():
        sgd = results["DP-SGD"][0] if results else None
        tried = functools.partial(run, "tune", name)
        best = tune(grid, chosen, tried, setting.trials, seed, sgd)
        final = [run("test", name, best, number) for number in range(setting.seeds)]
        results[name] = best, final[0]["epsilon"], np.array([each["errors"] for each in final])
    return results


def table(results, setting):
    """A row for each method."""
    sgd, lines = results["DP-SGD"][2].mean(axis=0), {}
    for name, (configuration, epsilon, errors) in results.items():
        mean, deviation = report.mean_and_error(errors[:, -1])
        reached = np.flatnonzero(errors.mean(axis=0) <= sgd.min())
        epochs = reached[0] + 1 if len(reached) else np.inf
        lines[name] = {
            "method": name,
            "tuned": ", ".join(f"{key} {value:g}" for key, value in configuration.items()),
            "ε": epsilon,
            "test MSE": float(mean),
            "standard error": float(deviation),
            "steps to DP-SGD's best": epochs * setting.steps_per_epoch,
            "speed-up": float((sgd.argmin() + 1) / epochs),
        }
    return lines


def verdict(lines):
    """What of the claim the numbers show; a difference counts from two standard errors on."""
    ours, found = lines["DP²"], []
    for name in [name for name in lines if name != "DP²"]:
        difference = ours["test MSE"] - lines[name]["test MSE"]
        error = np.hypot(ours["standard error"], lines[name]["standard error"])
        relation = "beats" if difference < 0 else "loses to"
        relation = relation if abs(difference) > 2 * error else "is level with"
        expected = ("beats", "is level with") if name == "AdaDPS" else ("beats",)
        seen = "seen" if relation in expected else "not seen"
        found.append(f"{seen}: DP² {relation} {name} (MSE {difference:+.4f} ± {error:.4f})")
    speed_up = ours["speed-up"]
    seen = "seen" if speed_up >= 4 else "seen in part" if speed_up > 1 else "not seen"
    reach = f"takes {1 / speed_up:.2f} of the steps" if speed_up else "never gets"
    return "; ".join([*found, f"{seen}: DP² {reach} to DP-SGD's best error"]) + "."


def plot(results, setting, path):
    """Test error against the step."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    steps = setting.steps_per_epoch * np.arange(1, setting.epochs + 1)
    for (name, (_, _, errors)), marker in zip(results.items(), "os^Dvx", strict=True):
        mean, deviation = report.mean_and_error(errors)
        (line,) = axes.plot(steps, mean, marker=marker, fillstyle="none", linewidth=1, label=name)
        band = mean - 2 * deviation, mean + 2 * deviation
        axes.fill_between(steps, *band, color=line.get_color(), alpha=0.2, linewidth=0)
    best = results["DP-SGD"][2].mean(axis=0).min()
    axes.axhline(best, color="black", linestyle="--", linewidth=1, label="best of DP-SGD")
    axes.set_ylim(top=best + 0.15)  # the start is the same for all
    axes.set_xlabel(f"step, of {setting.batch_size} ratings in expectation")
    axes.set_ylabel("test error (MSE), ± 2 standard errors")
    axes.set_title(f"MovieLens-100k, all at ε = {results['DP-SGD'][1]:.1f}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)


def main():
    parser = report.parser(__doc__, "delayed_preconditioners")
    parser.add_argument("--full", action="store_true", help="50 epochs of batches of 64")
    parser.add_argument("--epsilon", type=float, help="privacy budget (default: the paper's, 11)")
    options = parser.parse_args()
    setting = FULL if options.full else QUICK if options.quick else DEFAULT
    epsilon = options.epsilon or paper_epsilon()
    print(f"{setting.steps} steps of {setting.batch_size} ratings at ε = {epsilon:.3f}")
    options.output.mkdir(parents=True, exist_ok=True)
    results = experiment(setting, epsilon, options.seed, Runs(options.output / "runs.csv"))
    lines = table(results, setting)
    plot(results, setting, options.output / "movielens.png")
    report.write(options.output, "movielens", list(lines.values()), CLAIM, verdict(lines))


if __name__ == "__main__":
    main()
