"""Accelerated methods under pure privacy: the synthetic experiment of the paper, complete.

    python examples/papers/accelerated.py              # six minutes on one core
    python examples/papers/accelerated.py --quick      # a smaller problem, seconds

Regularised logistic regression on n = 10⁵ examples in d = 20 dimensions, F(x) = mean of
ln(1 + exp(−z·uᵀx)) + 0.01‖x‖², from x_0 = (10, …, 10), at ε = 1 with Laplace noise (δ = 0) for one
example replaced. Six methods: gradient descent, heavy ball, Nesterov, Nesterov in stages, and the
last two with the noise schedule and the number of steps that minimise their error bounds. Batches
are all of the data or fresh subsets of 1000; T = 100, 200, 500, 1000; step size c/L, c = 0.1 or 1;
20 runs. The noise is what `accounting.calibrate` finds.

The authors' code gives Laplace(b) a standard deviation of b instead of √2·b, and so plots a budget
about √2 times larger; it also has other constants in the choice of T. All is run both ways. What is
printed as published was read off the paper's curves, whose w is another draw.

The iterations are NumPy, 20 runs at a time, and `tests/docs/test_papers.py` holds them against
`model.fit` of the library's optimizers. Writes accelerated.csv, .md and .png (figures 3 and 4) to
output/papers/accelerated.
"""

import dataclasses
import functools
import itertools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import report
from scipy import optimize, special

import dp_keras_opt as dp
from dp_keras_opt import theory
from dp_keras_opt.noise import schedules

DIMENSION, LAMBDA, EPSILON, START = 20, 0.01, 1.0, 10.0
CLIP = 20.0  # never binds: the L1 norm of an example's gradient is at most ‖u‖₁ ≤ d
PLAIN, OPTIMAL = ("GD", "HB", "NAG", "MASG"), ("NAG-opt", "MASG-opt")
METHODS = PLAIN + OPTIMAL
NOISES = ("correct", "authors'")
SCALES = (0.1, 1.0)  # c
BLOCK = 4096  # rows of the data that are gone through at once
PUBLISHED = {  # whole batches, c = 1
    100: {"GD": 12.5, "NAG": 0.0132, "HB": 0.0132, "NAG-opt": 0.0052, "MASG-opt": 0.0051},
    1000: {"GD": 0.148, "NAG": 1.38, "HB": 1.42, "NAG-opt": 0.0057, "MASG-opt": 0.0052},
}
CLAIM = (
    "At c = 1 the methods with optimal noise and number of steps have the smallest errors, on all "
    "of the data and on subsets; at c = 0.1 NAG-opt ends below MASG-opt. Accelerated methods "
    "converge faster than gradient descent. After many steps, each with little budget, they can "
    "end above it, but the best T of heavy ball beats the best T of gradient descent. All of the "
    "data is better than subsets for accelerated methods, but not by an order of magnitude."
)


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is run: examples in all and in a subset, numbers of steps T, repetitions."""

    examples: int = 100_000
    subset: int = 1000
    steps: tuple = (100, 200, 500, 1000)
    runs: int = 20

    @property
    def batches(self):
        return self.examples, self.subset


QUICK = Size(examples=4000, subset=400, steps=(50, 100), runs=4)


class Problem:
    """The data, the objective, and its constants; points are columns, (d, runs)."""

    def __init__(self, examples, seed):
        u = np.random.RandomState(1).random_sample((DIMENSION, examples)).T
        w = np.random.default_rng(seed).normal(size=DIMENSION)
        self.examples, self.mu = examples, 2 * LAMBDA
        self.smoothness = np.linalg.norm(u.T @ u / examples, 2) + 2 * LAMBDA
        signed = np.sign(u @ w)[:, None] * u
        self.signed = signed.astype(np.float32)  # z·u, all that the loss depends on
        self.optimum = self._minimum(signed)

    @staticmethod
    def _minimum(signed):
        def value_and_gradient(x):
            margin = signed @ x
            value = np.mean(np.logaddexp(0, -margin)) + LAMBDA * x @ x
            return value, 2 * LAMBDA * x - special.expit(-margin) @ signed / len(signed)

        start = np.zeros(DIMENSION)
        return optimize.minimize(value_and_gradient, start, jac=True, tol=1e-8).fun

    def error(self, x):
        """F(x) − F* of each column."""
        point, total = x.astype(np.float32), 0.0
        for rows in self._blocks():
            margin = rows @ point
            loss = np.log1p(np.exp(-np.abs(margin))) - np.minimum(margin, 0)
            total = total + loss.sum(axis=0, dtype=np.float64)
        return total / self.examples + LAMBDA * np.sum(x**2, axis=0) - self.optimum

    def gradient(self, x, size, rng):
        """The mean gradient over a fresh subset (or all) for each column, regulariser and all."""
        point = x.astype(np.float32)
        if size == self.examples:
            slopes = sum(rows.T @ _share_wrong(rows @ point) for rows in self._blocks())
        else:
            subsets = [rng.choice(self.examples, size, False, shuffle=False) for _ in x.T]
            rows = self.signed[np.array(subsets)]  # (runs, size, d)
            share = _share_wrong(np.matmul(rows, point.T[:, :, None]))
            slopes = np.matmul(rows.transpose(0, 2, 1), share)[:, :, 0].T
        return 2 * LAMBDA * x - slopes / size

    def _blocks(self):
        return (self.signed[start : start + BLOCK] for start in range(0, self.examples, BLOCK))


def _share_wrong(margin):
    """1/(1 + exp(margin)), in its place."""
    with np.errstate(over="ignore"):  # 1/(1 + ∞) is right
        np.exp(margin, out=margin)
    margin += 1
    return np.reciprocal(margin, out=margin)


@dataclasses.dataclass
class Plan:
    """What one training does at each of its T (or T') steps.

    Attributes:
        rates, betas: step sizes and momentum, (T,); β = 0 where the momentum starts anew.
        scales: b_t of the Laplace noise in the mean gradient, (T,).
        nesterov: whether the gradient is taken at the extrapolated point.
    """

    rates: np.ndarray
    betas: np.ndarray
    scales: np.ndarray
    nesterov: bool


def plan(problem, method, steps, c, size, authors):
    """The `Plan` of a method at ε = 1."""
    base, _, optimal = method.partition("-")
    schedule = optimal_schedule(problem, base, steps, c, size, authors) if optimal else None
    steps = schedule.length if optimal else steps
    sampling = (
        dp.accounting.Sampling.full(size, "replace_one")
        if size == problem.examples
        else dp.accounting.Sampling.without_replacement(problem.examples, size)
    )
    optimizer = dp.optimizers.DPSGD(
        clip_norm=CLIP, batch_size=size, noise="laplace", noise_schedule=schedule
    )
    multiplier = dp.accounting.calibrate(optimizer, sampling, steps, EPSILON, delta=0)
    scales = multiplier * optimizer.noise_schedule.alphas(0, steps) * CLIP / size
    stages, rates = np.ones(steps), np.full(steps, c / problem.smoothness)
    if base == "MASG":
        stages, rates = theory.multistage_stages(problem.mu, problem.smoothness, steps, c)
    goes_on = np.diff(stages, prepend=stages[0]) == 0
    betas = theory.nesterov_momentum(problem.mu, rates) * goes_on * (base != "GD")
    return Plan(rates, betas, scales, nesterov=base in ("NAG", "MASG"))


def optimal_schedule(problem, base, steps, c, size, authors):
    """The noise schedule that minimises the error bound, of at most so many steps."""
    options = {
        "mechanism": "laplace", "initial_error": 10.0, "authors": authors, "epsilon": EPSILON,
        "noise_cost": DIMENSION * (2 * CLIP) ** 2 / (problem.examples * EPSILON) ** 2,
        "sampling_probability": size / problem.examples,
    }  # fmt: skip
    mu, smoothness = problem.mu, problem.smoothness
    if base == "NAG":
        return schedules.nesterov_optimal(mu, smoothness, c / smoothness, steps, **options)
    return schedules.multistage_optimal(mu, smoothness, steps, c, **options)


def iterate(plan, gradient, x, draws):
    """x after each step of a plan.

    Args:
        plan: a `Plan`.
        gradient: function of x that gives the mean gradient.
        x: where to start.
        draws: Laplace noise of scale 1, one array for each step.
    """
    velocity = np.zeros_like(x)
    for rate, beta, scale, noise in zip(plan.rates, plan.betas, plan.scales, draws, strict=True):
        point = x + beta * velocity if plan.nesterov else x
        velocity = beta * velocity - rate * (gradient(point) + scale * noise)
        x = x + velocity
        yield x


def run(problem, size, seed):
    """{(m, c, method, T, noise): (steps, errors (steps, runs))}, for a choice of the steps."""
    results = {}
    shape = (DIMENSION, size.runs)
    for m, c, method, steps, noise in itertools.product(
        size.batches, SCALES, METHODS, size.steps, NOISES
    ):
        rng = np.random.default_rng([seed, m, int(10 * c), METHODS.index(method), steps])
        made = plan(problem, method, steps, c, m, authors=noise == "authors'")
        factor = np.sqrt(0.5) if noise == "authors'" else 1.0
        draws = (factor * rng.laplace(size=shape) for _ in made.rates)
        gradient = functools.partial(problem.gradient, size=m, rng=rng)
        path = iterate(made, gradient, np.full(shape, START), draws)
        kept = np.unique(np.geomspace(1, len(made.rates), 25).round().astype(int))
        errors = [problem.error(x) for t, x in enumerate(path, 1) if t in kept]
        results[m, c, method, steps, noise] = kept, np.array(errors)
        print(f"m = {m}, c = {c:g}, {method}, T = {steps}, {noise} noise: T' = {kept[-1]}, "
              f"{np.mean(errors[-1]):.4g}", flush=True)  # fmt: skip
    return results


def table(results):
    """One row for each setting and method: the error after the last step, with each noise."""
    rows = []
    for m, c, method, steps in dict.fromkeys(key[:-1] for key in results):
        row = {"m": m, "c": c, "T": steps, "method": method}
        for noise in NOISES:
            taken, errors = results[m, c, method, steps, noise]
            mean, error = report.mean_and_error(errors[-1])
            row |= {f"T', {noise}": int(taken[-1]), f"F − F*, {noise} noise": mean}
            row |= {f"± ({noise})": error}
        published = PUBLISHED.get(steps, {}) if (m, c) == (Size.examples, 1.0) else {}
        rows.append(row | {"published": published.get(method, "")})
    return sorted(rows, key=lambda row: (-row["m"], row["c"], row["T"]))


def verdict(results, size):
    """Whether each part of the claim was seen; more than two standard errors decide."""
    lines, few, many = [], size.steps[0], size.steps[-1]
    for noise, m in itertools.product(NOISES, size.batches):
        last, best = ends(results, size, m, 1.0, noise)
        _, best_slow = ends(results, size, m, 0.1, noise)
        pairs = {  # each of the first below the second
            "optimal methods below the same without": [
                (a, a.removesuffix("-opt"), t) for a, t in itertools.product(OPTIMAL, size.steps)
            ],
            "below all others": itertools.product(OPTIMAL, PLAIN, size.steps),
            "heavy ball and Nesterov below gradient descent after few steps": [
                (a, "GD", few) for a in ("HB", "NAG")
            ],
            "above it after many": [("GD", a, many) for a in ("HB", "NAG")],
        }
        parts = {
            part: [
                f"{a} and {b} at T = {t}" for a, b, t in trio if not less(last[a, t], last[b, t])
            ]
            for part, trio in pairs.items()
        }
        parts["best T of heavy ball below that of gradient descent"] = (
            [] if less(best["HB"], best["GD"]) else ["these"]
        )
        parts["at c = 0.1 best T of NAG-opt below that of MASG-opt"] = (
            [] if less(best_slow["NAG-opt"], best_slow["MASG-opt"]) else ["these"]
        )
        seen = [
            f"{part}: {'not seen for ' if missing else 'seen'}{', '.join(missing)}"
            for part, missing in parts.items()
        ]
        lines.append(f"- {noise} noise, m = {m}: {'; '.join(seen)}.")
    for noise in NOISES:
        (_, whole), (_, subset) = (ends(results, size, m, 1.0, noise) for m in size.batches)
        ratios = [f"{a} {subset[a].mean() / whole[a].mean():.2f}" for a in METHODS]
        lines.append(
            f"- {noise} noise, error of subsets over that of all, at the best T: "
            f"{', '.join(ratios)}."
        )
    return "at c = 1 unless said otherwise.\n\n" + "\n".join(lines)


def ends(results, size, m, c, noise):
    """{(method, T): last errors}, and {method: those at the best T}."""
    last = {
        (a, t): results[m, c, a, t, noise][1][-1] for a, t in itertools.product(METHODS, size.steps)
    }
    return last, {a: min((last[a, t] for t in size.steps), key=np.mean) for a in METHODS}


def less(a, b):
    """Whether the mean of a is below that of b by more than two standard errors."""
    (mean_a, error_a), (mean_b, error_b) = map(report.mean_and_error, (a, b))
    return mean_a + 2 * np.hypot(error_a, error_b) < mean_b


def plot(results, size, path):
    """Figures 3 and 4: error against steps, a row for each m and c, a column for each method."""
    import matplotlib.pyplot as plt

    settings = list(itertools.product(size.batches, SCALES))
    figure, grid = plt.subplots(
        len(settings), len(METHODS), figsize=(13, 9), sharex=True, sharey=True
    )
    for (m, c), line in zip(settings, grid, strict=True):
        line[0].set_ylabel(f"m = {m}, c = {c:g}\nF − F*")
        for method, axes in zip(METHODS, line, strict=True):
            for (i, steps), (noise, style) in itertools.product(
                enumerate(size.steps), zip(NOISES, ("-", ":"), strict=True)
            ):
                taken, errors = results[m, c, method, steps, noise]
                label = f"T = {steps}" if noise == "correct" else None
                axes.loglog(taken, errors.mean(axis=1), f"C{i}{style}", label=label)
            axes.grid(alpha=0.3)
    for method, top, bottom in zip(METHODS, grid[0], grid[-1], strict=True):
        top.set_title(method)
        bottom.set_xlabel("step")
    figure.tight_layout(rect=(0, 0.04, 1, 1), h_pad=0.4, w_pad=0.4)
    figure.legend(
        *grid[0, 0].get_legend_handles_labels(), loc="lower center", ncol=len(size.steps),
        frameon=False, title="mean of all runs; dotted: the authors' noise",
    )  # fmt: skip
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main():
    options = report.parser(__doc__, "accelerated").parse_args()
    size = QUICK if options.quick else Size()
    results = run(Problem(size.examples, options.seed), size, options.seed)
    report.write(options.output, "accelerated", table(results), CLAIM, verdict(results, size))
    plot(results, size, options.output / "accelerated.png")


if __name__ == "__main__":
    main()
