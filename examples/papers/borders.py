"""Does a task that is made linear before the training predict which optimizer wins?

    python examples/papers/borders.py --tasks ratings clothes text tabular incomes  # half an hour
    python examples/papers/borders.py              # hours: long runs, a model of 426,000 weights
    python examples/papers/borders.py --quick      # a minute, to try it out

It goes on if interrupted.

The map of regimes.py has curvatures as one wishes. Here they are those of the tasks of choosing.py.
The gradients a_i of 500 examples at the initial weights, clipped, are the rows of a problem
of least squares, ½·mean (1 + a_i·Δ)², which is the task as far as it is linear: its gradients at
Δ = 0 are those of the task. What of the task cannot be learned they do not say, so that it is tried
with none, and with half of the squared targets made of noise. It is trained as the real runs are,
with their clip norm, noise, batches and steps, by the rules of the optimizers, each at the best of
its learning rates: no figure of a real run is used.

What it leaves is held against docs/how_to/choosing/tuned-*.csv: whether who is predicted to win
leads, that is, is the best or within two standard errors of it; and whether of two optimizers that
are further apart than two standard errors the better one is the one that was predicted.

Writes borders-all.csv (the predictions), borders.csv and .md (a table) to output/papers/borders.
"""

import csv
import dataclasses
import itertools
import pathlib
import sys

import keras
import numpy as np
import report
import tensorflow as tf
from scipy import signal

from dp_keras_opt.tuning import Comparison, runs
from dp_keras_opt.tuning.candidates import get

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import choosing  # noqa: E402

EXAMPLES = 500
RATES = 2.0 ** np.arange(-8, 3)  # of SGD, in units of what the steepest direction takes
STEP_SIZES = 2.0 ** np.arange(0, 13)  # of Adam, in units of 1/(√weights·steps)
SHARES = (0.1, 0.5)
UNEXPLAINED = (0.0, 0.5)
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-4
#: Of each candidate, the rule; and whether weights are averaged over the second half.
CANDIDATES = {
    "DPSGD, momentum": ("momentum", False),
    "DPSGD, momentum, average": ("momentum", True),
    "DPSGD, momentum, planned noise": ("momentum", False),
    "DPSGD, momentum, planned noise, average": ("momentum", True),
    "DPNesterov, planned noise": ("nesterov", False),
    "DPAdam, bias-corrected": ("bias-corrected", False),
    "DPAdam, bias-corrected, planned noise": ("bias-corrected", False),
    "DPAdam, scale-then-privatize, planned noise": ("scale-then-privatize", False),
}
HIGHER_IS_BETTER = {"clothes", "tabular", "definitions", "incomes"}
CLAIM = "A task that is made linear before the training predicts which optimizer wins."


@dataclasses.dataclass(frozen=True)
class Run:
    """How a real run is trained.

    Attributes:
        rows: a, (examples, weights), of norms up to 1, the clip norm.
        batch_size: B.
        steps: T.
        noise: σ/B.
        coefficients: of the Toeplitz matrix whose inverse correlates the noise.
        unexplained: the share of the targets' squares that is noise, new in each step.
    """

    rows: np.ndarray
    batch_size: int
    steps: int
    noise: float
    coefficients: tuple[float, ...] = (1.0,)
    unexplained: float = 0.0

    def settings(self, rule):
        """The rates, and clip norms, to try: (settings, 1), the latter None without a geometry."""
        weights = self.rows.shape[1]
        if rule in ("momentum", "nesterov"):
            steepest = np.linalg.norm(self.rows, 2) ** 2 / len(self.rows)
            return _column(RATES / steepest), None
        rates = STEP_SIZES / (np.sqrt(weights) * self.steps)
        if rule == "bias-corrected":
            return _column(rates), None
        rates, shares = np.array(list(itertools.product(rates, SHARES))).T
        return _column(rates), _column(shares / self.noise)

    def gradients(self, weights, counts, errors, z, scales=None, clip_norms=1.0):
        """A step's released gradients, (settings, weights), not in their geometry any more."""
        residuals = np.sqrt(1 - self.unexplained) + weights @ self.rows.T
        residuals += np.sqrt(self.unexplained) * errors
        squares = (self.rows**2).sum(axis=1) if scales is None else scales**2 @ (self.rows**2).T
        norms = np.abs(residuals) * np.sqrt(squares)
        kept = residuals * np.minimum(1, clip_norms / np.maximum(norms, 1e-12))
        noise = self.noise * (1.0 if scales is None else clip_norms / scales) * z
        return (kept * counts) @ self.rows / self.batch_size + noise

    def draws(self, seed):
        """For each step how often each example is in the batch, its error, and unit noise."""
        rng = np.random.default_rng(seed)
        examples, weights = self.rows.shape
        past = np.zeros((len(self.coefficients) - 1, weights), np.float32)
        for _ in range(self.steps):
            z = rng.standard_normal(weights, np.float32)
            z = (z - np.float32(self.coefficients[1:]) @ past) / np.float32(self.coefficients[0])
            past = np.concatenate([z[None], past])[: len(past)]
            counts = rng.poisson(self.batch_size / examples, examples).astype(np.float32)
            yield counts, rng.standard_normal(examples, np.float32), z

    def losses(self, rule, average, seed=0):
        """What is left of the loss, at each setting."""
        rates, clip_norms = self.settings(rule)
        w = np.zeros((len(rates), self.rows.shape[1]), np.float32)
        m, v, total, power = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w), 0.0
        response = _row_norms(self.coefficients, self.steps)
        for t, drawn in enumerate(self.draws(seed), 1):
            if rule in ("momentum", "nesterov"):
                beta = 0.9 if rule == "momentum" else (1 - 0.1**0.5) / (1 + 0.1**0.5)
                g = self.gradients(w, *drawn)
                m = beta * m + g
                w -= rates * (m if rule == "momentum" else beta * m + g)
            else:
                scales = None
                if clip_norms is not None:
                    scales = 1 / (np.sqrt(v / max(1 - BETA_2 ** (t - 1), 1e-12)) + EPSILON)
                g = self.gradients(w, *drawn, scales, 1.0 if scales is None else clip_norms)
                m += (1 - BETA_1) * (g - m)
                v += (1 - BETA_2) * (g * g - v)
                power += (1 - BETA_2) * (response[t - 1] * self.noise**2 - power)
                unbiased = 1 - BETA_2**t
                root = np.sqrt(v / unbiased) + EPSILON
                if clip_norms is None:
                    floor = power / unbiased
                    root = np.sqrt(np.maximum(v / unbiased - floor, self.noise**2))
                w -= rates / (1 - BETA_1**t) * m / root
            if t > self.steps // 2:
                total += w
        if average:
            w = total / (self.steps - self.steps // 2)
        target = np.sqrt(1 - self.unexplained)
        losses = 0.5 * np.mean((target + w.astype(np.float64) @ self.rows.T) ** 2, axis=1)
        return np.where(np.isfinite(losses), losses, np.inf)


def _row_norms(coefficients, steps):
    """‖row t of C⁻¹‖², (steps,)."""
    return np.cumsum(signal.lfilter([1.0], coefficients, np.eye(1, steps)[0]) ** 2)


def _column(values):
    return np.asarray(values, np.float32)[:, None]


def clipped_gradients(model, task, count, seed=0):
    """Those of `count` examples, one after the other, each a vector in units of the clip norm."""
    loss, variables = keras.losses.get(task.loss), model.trainable_variables

    @tf.function
    def gradient(x, y):
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(loss(y, model(x, training=True)))
        gradients = tape.gradient(value, [v.value for v in variables])
        return tf.concat([tf.reshape(tf.convert_to_tensor(g), [-1]) for g in gradients], 0)

    x, y = task.train
    for place in np.random.default_rng(seed).permutation(len(y))[:count]:
        one = keras.tree.map_structure(lambda a, at=place: tf.constant(a[at : at + 1]), (x, y))
        yield tf.clip_by_norm(gradient(*one), task.clip_norm).numpy() / task.clip_norm


def linearized(task, count, seed=0):
    """The clipped gradients of examples at the initial weights, in units of the clip norm."""
    keras.utils.set_random_seed(seed)
    rows = np.array(list(clipped_gradients(task.build(), task, count, seed)), np.float32)
    return rows[:, np.any(rows != 0, axis=0)]  # what no example moves has noise, and no loss


def predicted(task, rows, name, epsilon, delta, unexplained):
    """What a candidate leaves of the loss of the task that was made linear, and its setting."""
    candidate, (rule, average) = get(name), CANDIDATES[name]
    sampling = task.batches(candidate).sampling
    optimizer = runs.optimizer_for(task, candidate, candidate.middle(), sampling, epsilon, delta)
    run = Run(
        rows,
        task.batch_size,
        task.steps_of(candidate),
        optimizer.noise_multiplier / task.batch_size,
        tuple(getattr(optimizer.noise, "coefficients", (1.0,))),
        unexplained,
    )
    losses = run.losses(rule, average)
    place = int(losses.argmin())
    return {"test": f"{losses[place]:.6g}", "setting": place, "of": len(losses)}


def real(name):
    """(candidate, ε) -> (mean, standard error) of what choosing.py found; {} where it was not run.

    Lower is better: the sign of scores of which higher is better is turned.
    """
    path = ROOT / "docs" / "how_to" / "choosing" / f"tuned-{name}.csv"
    scores = {}
    if path.exists():
        sign = -1 if name.removesuffix("-long") in HIGHER_IS_BETTER else 1
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row["part"] == "test" and row["candidate"] in CANDIDATES:
                    key = row["candidate"], float(row["epsilon"])
                    scores.setdefault(key, []).append(sign * float(row["score"]))
    return {key: report.mean_and_error(values) for key, values in scores.items()}


def leading(found):
    """Of {candidate: (mean, standard error)}, the best and those within two standard errors."""
    rows = [
        {"candidate": name, "epsilon": 0.0, "score": mean, "standard_error": error}
        for name, (mean, error) in sorted(found.items(), key=lambda item: item[1][0])
    ]
    return Comparison(rows, higher_is_better=False).leading(0.0)


def agreement(prediction, found):
    """(pairs in the predicted order, pairs) of those that the runs tell apart."""
    pairs = [
        (one, other)
        for one, other in itertools.combinations(found, 2)
        if abs(found[one][0] - found[other][0]) > 2 * np.hypot(found[one][1], found[other][1])
    ]
    right = sum(
        (found[one][0] < found[other][0]) == (prediction[one] < prediction[other])
        for one, other in pairs
    )
    return right, len(pairs)


def table(predictions, runs_of):
    """One row for each share that is noise, task and ε."""
    rows = []
    for (share, task, epsilon), prediction in predictions.items():
        found = {name: runs_of[task][name, epsilon] for name in prediction}
        winner, leaders = min(prediction, key=prediction.get), leading(found)
        right, pairs = agreement(prediction, found)
        rows.append(
            {"noise in the targets": share, "task": task, "ε": epsilon, "predicted": winner,
             "leads": winner in leaders, "leading": "; ".join(leaders),
             "pairs in order": f"{right} of {pairs}"}
        )  # fmt: skip
    return rows


def of_linear_rules(predictions):
    """Without those of rules that are not linear in the gradients."""
    return {
        key: {n: p for n, p in found.items() if CANDIDATES[n][0] in ("momentum", "nesterov")}
        for key, found in predictions.items()
    }


def verdict(rows):
    """How many winners, and how many pairs, were predicted."""
    lines = []
    for share in dict.fromkeys(row["noise in the targets"] for row in rows):
        here = [row for row in rows if row["noise in the targets"] == share]
        right, pairs = (
            sum(int(row["pairs in order"].split(" of ")[place]) for row in here) for place in (0, 1)
        )
        lines.append(
            f"with {share:.0%} of the targets noise the predicted winner leads in "
            f"{sum(row['leads'] for row in here)} of {len(here)} runs, and {right} of {pairs} "
            "pairs that the runs tell apart are in the predicted order"
        )
    return "; ".join(lines) + "."


def main():
    parser = report.parser(__doc__, "borders")
    parser.add_argument("--tasks", nargs="+", choices=choosing.EVERY, default=choosing.EVERY)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    suffix = "-quick" * options.quick
    runs_of = {name: found for name in options.tasks if (found := real(name))}
    predictions = {}
    for name, found in runs_of.items():
        task, rows = choosing.EVERY[name](), None
        keys = sorted(found, key=lambda key: key[1])
        for share, (candidate, epsilon) in itertools.product(UNEXPLAINED, keys):

            def compute(task=task, candidate=candidate, epsilon=epsilon, share=share):
                nonlocal rows
                if rows is None:
                    rows = linearized(task, 30 if options.quick else EXAMPLES, options.seed)
                return predicted(task, rows, candidate, epsilon, choosing.DELTA, share)

            key = {
                "task": name, "epsilon": epsilon, "candidate": candidate, "unexplained": share
            }  # fmt: skip
            row = report.remembered(options.output / f"borders-all{suffix}.csv", key, compute)
            predictions.setdefault((share, name, epsilon), {})[candidate] = float(row["test"])
        if options.quick:
            break
    rows = table(predictions, runs_of)
    linear = verdict(table(of_linear_rules(predictions), runs_of))
    seen = f"{verdict(rows)} Of linear rules alone: {linear}"
    report.write(options.output, f"borders{suffix}", rows, CLAIM, seen)


if __name__ == "__main__":
    main()
