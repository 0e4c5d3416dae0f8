"""Does the map of regimes predict who wins real trainings?

    python examples/papers/borders.py              # minutes; needs the results of choosing.py

The quadratic of a task (see quadratics.py) is measured at its initial weights, on data that are
public as all of these are: the second moments of examples' gradients are its curvatures, their mean
says how far the optimum is. Noise, steps and batches are those of the real runs. What the methods
leave of that quadratic's loss, each at its best learning rate, is the prediction; nothing is fitted.

It is held against the runs of docs/how_to/choosing/tuned-*.csv: whether the method that is predicted
to win leads (is the best, or within two standard errors of it), and whether each pair of methods
that differ by more than two standard errors is in the predicted order.

Writes borders.csv, .md and .png to output/papers/borders.
"""

import csv
import dataclasses
import pathlib
import sys

import keras
import numpy as np
import quadratics
import regimes
import report
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.tuning import runs
from dp_keras_opt.tuning.candidates import get

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import choosing  # noqa: E402

SPARSE = {"ratings", "definitions"}  # examples have few of the features
CLAIM = "A quadratic that is measured before training says which optimizer wins."
EXAMPLES, GROUPS = 4_000, 24
#: Candidate: the rule, whether weights are averaged.
LINEAR = {
    "DPSGD, momentum": (quadratics.momentum(0.9), False),
    "DPSGD, momentum, average": (quadratics.momentum(0.9), True),
    "DPSGD, momentum, planned noise": (quadratics.momentum(0.9), False),
    "DPSGD, momentum, planned noise, average": (quadratics.momentum(0.9), True),
    "DPNesterov, planned noise": (
        quadratics.momentum((1 - 0.1**0.5) / (1 + 0.1**0.5), nesterov=True), False,
    ),
}  # fmt: skip
ADAPTIVE = (
    "DPAdam, bias-corrected",
    "DPAdam, bias-corrected, planned noise",
    "DPAdam, scale-then-privatize, planned noise",
)


def gradient_moments(task, count, seed=0):
    """The mean of examples' gradients and of their squares at the initial weights, (weights,)."""
    keras.utils.set_random_seed(seed)
    model = task.build()
    loss = keras.losses.get(task.loss)
    variables = model.trainable_variables

    @tf.function
    def gradient(x, y):
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(loss(y, model(x, training=True)))
        gradients = tape.gradient(value, [v.value for v in variables])
        return [tf.convert_to_tensor(g) for g in gradients]

    x, y = task.train
    rows = np.random.default_rng(seed).permutation(len(y))[:count]
    total = squares = 0.0
    for row in rows:
        one = keras.tree.map_structure(lambda a, row=row: tf.constant(a[row : row + 1]), (x, y))
        flat = np.concatenate([np.ravel(g) for g in gradient(*one)]).astype(np.float64)
        total, squares = total + flat, squares + flat**2
    return total / len(rows), squares / len(rows), len(rows)


def measured(task, sparse, count=EXAMPLES):
    """The quadratic of a task, without its noise."""
    mean, second, count = gradient_moments(task, count)
    there = second > 1e-12 * second.max()
    mean, second = mean[there], second[there]
    total = second.sum()
    # e = mean/second, in weights that are such that gradients have the norm 1. Squares of the
    # estimated mean have the variance of the estimate in them.
    squares = (mean**2 - (second - mean**2) / (count - 1)) / second**2 * total
    edges = np.geomspace(second.min(), second.max() * 1.001, GROUPS + 1)
    group = np.digitize(second, edges) - 1
    counts = np.bincount(group, minlength=GROUPS)
    there = counts > 0
    curvatures = np.bincount(group, second, GROUPS)[there] / counts[there] / total
    distances = np.bincount(group, squares, GROUPS)[there] / counts[there]
    distances = np.sqrt(np.maximum(distances, 0.0))
    return quadratics.Problem(curvatures, counts[there], distances, 0.0, task.batch_size, sparse)


def noise_of(task, name, epsilon, delta):
    """(ν, the coefficients of the noise, the steps) of a candidate's run."""
    candidate = get(name)
    optimizer = runs.optimizer_for(
        task, candidate, candidate.middle(), task.batches(candidate).sampling, epsilon, delta
    )
    coefficients = getattr(optimizer.noise, "coefficients", (1.0,))
    sigma = optimizer.noise_multiplier
    return sigma / task.batch_size, tuple(coefficients), task.steps_of(candidate)


def predicted(problem, name, noise, coefficients, steps, seed=0):
    """The loss that a candidate leaves of the quadratic, at its best learning rate."""
    problem = dataclasses.replace(problem, noise=noise)
    if name in LINEAR:
        rule, average = LINEAR[name]
        rates = regimes.RATES / max(problem.curvatures)
        responses = quadratics.impulse_responses(rule, rates, problem.curvatures, steps)
        if average:
            responses = quadratics.averaged(responses)
        return float(quadratics.linear_losses(problem, responses, coefficients).min())
    settings = {"rate": regimes.ADAPTIVE_RATES * max(problem.distances)}
    if "scale-then-privatize" in name:
        shares = np.repeat(regimes.SHARES, len(settings["rate"]))
        settings = {"rate": np.tile(settings["rate"], len(regimes.SHARES)), "share": shares}
    impulse = np.eye(1, steps)[0]
    power = np.sum(quadratics.signal.lfilter([1.0], coefficients, impulse) ** 2)
    noises = quadratics.draws(problem, steps, seed, coefficients)
    *_, squares = quadratics.adam(problem, settings, noises, power)
    return quadratics.best(problem, squares)[0]


def real(name):
    """The comparison of choosing.py on a task, as it is in the repository; None without."""
    path = ROOT / "docs" / "how_to" / "choosing" / f"tuned-{name}.csv"
    if not path.exists():
        return None
    with open(path, newline="", encoding="utf-8") as file:
        runs_of = [row for row in csv.DictReader(file) if row["part"] == "test"]
    cells = {}
    for row in runs_of:
        cells.setdefault((row["candidate"], float(row["epsilon"])), []).append(float(row["score"]))
    rows = []
    for (candidate, epsilon), scores in cells.items():
        mean, error = report.mean_and_error(scores)
        rows.append({"candidate": candidate, "epsilon": epsilon, "score": mean,
                     "standard_error": error, "scores": scores})  # fmt: skip
    higher = choosing.EVERY[name]().higher_is_better
    rows.sort(key=lambda row: (row["epsilon"], row["score"] * (-1 if higher else 1)))
    return dp.tuning.Comparison([r for r in rows if r["candidate"] in (*LINEAR, *ADAPTIVE)], higher)


def main():
    options = report.parser(__doc__, "borders").parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for name in choosing.EVERY:
        comparison = real(name)
        if comparison is None:
            continue
        task = choosing.EVERY[name]()
        problem = measured(task, name in SPARSE, 50 if options.quick else EXAMPLES)
        print(name, problem.counts, problem.curvatures, problem.distances, problem.loss(problem.distances**2))
        for epsilon in choosing.EPSILONS:
            pred = {}
            for candidate in (*LINEAR, *ADAPTIVE):
                pred[candidate] = predicted(problem, candidate, *noise_of(task, candidate, epsilon, choosing.DELTA))
            order = sorted(pred, key=pred.get)
            print(name, epsilon, [(c, round(pred[c], 5)) for c in order], comparison.leading(epsilon), flush=True)


if __name__ == "__main__":
    main()
