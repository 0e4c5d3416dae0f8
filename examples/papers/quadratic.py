"""The quadratic example: which learning rates does private Adam give to steep and flat coordinates?

    python examples/papers/quadratic.py              # two minutes
    python examples/papers/quadratic.py --quick      # fewer seeds, seconds

Sections 4.1 to 4.4 of the paper on design principles for private adaptive optimizers: the loss
c_x/2·(x − a)² + c_y/2·(y − b)², each step a fresh example (a, b) ~ N(0, I), c = (1, 0.01). Adam
should learn 1/√v̂ = (1/c_x, 1/c_y). For noise from below c_y to above c_x this shows

- what each method learns, with the parameters held at the optimum, and how often v̂ < 0;
- its twin (section 4.2): the learning problem without noise, on wider data, whose gradients are
  distributed as the method's own noisy ones;
- the excess loss after 1000 steps from (10, 10), η and ε tuned for each method and noise on one
  half of the seeds and judged on the other.

As in the paper, gradients are not clipped, so nothing here is private. To compare at equal privacy
all the same, σ is the noise on the plain gradient of a clip norm that hardly binds: 3 times the
root mean square norm at the optimum, ‖c‖. Scaled gradients have a norm of √2 instead, so that
scale-then-privatize takes σ_s = σ√2/‖c‖ in its geometry; independent moments take √2·σ on the
gradient and √2·σ·3‖c‖ on its square. The simulation is NumPy; `tests/docs/test_papers.py` holds it
against `DPAdam`.

Writes quadratic.csv, .md and .png to output/papers/quadratic.
"""

import itertools

import numpy as np
import report

CURVATURE = np.array([1.0, 0.01])
BETA_1, BETA_2 = 0.9, 0.999
SIGMAS = np.array([0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 2.0])
RATES = np.array([0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3])
EPSILONS = (1e-7, 1e-2, 1e-1, 1.0)
SOURCES = ("non-private", "post-processing", "bias-corrected", "independent moments", "noiseless",
           "scale-then-privatize")  # fmt: skip
CLAIM = (
    "Noise imposes a floor on v̂ in post-processing, v̂ = c² + σ². Unbiased estimates (bias "
    "correction, independent moments) give different preconditioners to two problems with the same "
    "gradients, and can be negative. Scale-then-privatize learns a preconditioner proportional to "
    "the non-private one, and the noise then has the geometry of the gradients."
)


def adam(source, draws, theta, rate, std, std_on_square=0.0, epsilon=1e-7, curvature=CURVATURE):
    """θ and the estimate of the second moment after Adam's last step; all arguments broadcast.

    Args:
        source: one of `SOURCES`.
        draws: for each step an example, and the unit noise on gradient and square.
        theta: where to start.
        rate: η.
        std, std_on_square: of the noise on gradient (in its geometry) and square.
    """
    mu = nu = nu_hat = 0.0
    for t, (example, z, z_on_square) in enumerate(draws, 1):
        scale = 1 / (np.sqrt(nu_hat) + epsilon) if source == "scale-then-privatize" else 1.0
        exact = curvature * (theta - example)
        g = (scale * exact + std * z) / scale
        square = g**2
        if source == "noiseless":
            square = exact**2
        if source == "independent moments":
            square = exact**2 + std_on_square * z_on_square
        mu = BETA_1 * mu + (1 - BETA_1) * g
        nu = BETA_2 * nu + (1 - BETA_2) * square
        nu_hat = nu / (1 - BETA_2**t)
        estimate = nu_hat - std**2 if source == "bias-corrected" else nu_hat
        theta = theta - rate * mu / (1 - BETA_1**t) / root(source, estimate, epsilon)
    return theta, estimate


def root(source, estimate, epsilon):
    """What Adam divides by."""
    if source == "bias-corrected":
        return np.sqrt(np.maximum(estimate, epsilon**2))
    return np.sqrt(np.maximum(estimate, 0.0)) + epsilon


def noise_stds(source, sigma):
    """Standard deviation of the noise on gradient and square, at equal privacy."""
    norm = np.linalg.norm(CURVATURE)
    if source == "independent moments":
        return np.sqrt(2) * sigma, np.sqrt(2) * sigma * 3 * norm
    factor = {"non-private": 0.0, "scale-then-privatize": np.sqrt(2) / norm}.get(source, 1.0)
    return factor * sigma, 0.0


def steps_of(seed, steps, shape, width=1.0):
    """Examples (`width` wide) and two unit noises for each step."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        example, z, z_on_square = rng.normal(size=(3, *shape, 2))
        yield width * example, z, z_on_square


def expected(source, std, steps):
    """E v̂ after so many steps at the optimum; the noise power of scale-then-privatize is σ_s²·v̂."""
    if source in ("bias-corrected", "independent moments", "noiseless"):
        return CURVATURE**2 + 0 * std
    if source != "scale-then-privatize":
        return CURVATURE**2 + std**2
    nu = nu_hat = 0.0
    for t in range(1, steps + 1):
        nu = BETA_2 * nu + (1 - BETA_2) * (CURVATURE**2 + std**2 * nu_hat)
        nu_hat = nu / (1 - BETA_2**t)
    return nu_hat


def learnt(source, seeds, steps, seed):
    """v̂ at the optimum of the problem and of its twin, each (σ, seeds, 2), and E v̂, (σ, 1, 2)."""
    stds = noise_stds(source, SIGMAS[:, None, None])
    _, estimate = adam(source, steps_of(seed, steps, (seeds,)), np.zeros(2), 0.0, *stds)
    power = stds[0] ** 2 * np.ones(2)
    if source == "scale-then-privatize":  # in the steady state v̂ = c²/(1 − σ_s²); beyond 1, none
        power = np.where(power < 1, CURVATURE**2 * power / (1 - power), np.nan)
    width = np.sqrt(CURVATURE**2 + power) / CURVATURE
    twin_draws = steps_of(seed + 1, steps, (seeds,), width)
    _, twin = adam(source, twin_draws, np.zeros(2), 0.0, 0.0 * stds[0])
    return estimate, twin, expected(source, stds[0], steps)


def converged(source, sigma, seeds, steps, seed):
    """(excess loss on the second half of the seeds, η, ε), the best on the first half."""
    rate, epsilon = (a.reshape(-1, 1, 1) for a in np.meshgrid(RATES, EPSILONS))
    draws, start = steps_of(seed, steps, (seeds,)), np.full(2, 10.0)
    theta, _ = adam(source, draws, start, rate, *noise_stds(source, sigma), epsilon)
    first, others = np.array_split((CURVATURE / 2 * theta**2).sum(axis=-1), 2, axis=1)
    best = first.mean(axis=1).argmin()
    return others[best], rate[best].item(), epsilon[best].item()


def run(seeds, steps, seed):
    """{source: (v̂, v̂ of the twin, E v̂)} and {(source, σ): (excess losses, η, ε)}."""
    moments = {source: learnt(source, seeds, 12 * steps, seed) for source in SOURCES}
    ends = {
        (source, sigma): converged(source, sigma, seeds, steps, seed + 2)
        for source, sigma in itertools.product(SOURCES, SIGMAS)
    }
    return moments, ends


def table(moments, ends):
    """One row for each σ and method; learning rates are medians, in units of 1/c."""
    rows = []
    for (i, sigma), source in itertools.product(enumerate(SIGMAS), SOURCES):
        estimate, twin, _ = moments[source]
        rate_x, rate_y = learning_rates(source, estimate[i])
        losses, rate, epsilon = ends[source, sigma]
        mean, error = report.mean_and_error(losses)
        rows.append(
            {"σ": sigma, "method": source, "c_x/√v̂_x": rate_x, "c_y/√v̂_y": rate_y,
             "twin's c_y/√v̂_y": learning_rates(source, twin[i])[1],
             "v̂_y < 0": (estimate[i, :, 1] < 0).mean(), "excess loss": mean, "±": error,
             "best η": rate, "best ε": epsilon}
        )  # fmt: skip
    return rows


def learning_rates(source, estimate):
    """Median over seeds of 1/√v̂, in units of 1/c."""
    return np.median(CURVATURE / root(source, estimate, 1e-7), axis=0)


def errors_off(sample, other):
    """How many standard errors the means over seeds differ, at most; NaN where there is no twin."""
    (mean, error), (other_mean, other_error) = (
        report.mean_and_error(np.broadcast_to(a, sample.shape), axis=1) for a in (sample, other)
    )
    return np.nanmax(np.abs(mean - other_mean) / np.hypot(error, other_error))


def verdict(moments, ends):
    """Whether each claim was seen; means agree if they are within 3 standard errors everywhere."""
    seen = ("not seen", "seen")
    estimate, _, theory = moments["post-processing"]
    off = errors_off(estimate, theory)
    rate_x, rate_y = learning_rates("post-processing", estimate[-1]) / CURVATURE
    lines = [
        f"the floor v̂ = c² + σ²: {seen[int(off < 3)]} ({off:.1f} standard errors off at most); "
        f"at σ = {SIGMAS[-1]:g} the flat coordinate's learning rate is {rate_y / rate_x:.2f} times "
        f"the steep one's, where 1/c asks for {CURVATURE[0] / CURVATURE[1]:g}"
    ]
    steady = noise_stds("scale-then-privatize", SIGMAS)[0] < 1
    estimate, _, theory = moments["scale-then-privatize"]
    off = errors_off(estimate[steady], theory[steady])
    lines.append(
        f"scale-then-privatize's v̂ in proportion to c²: {seen[int(off < 3)]} for σ_s < 1 "
        f"({off:.1f} standard errors off at most); beyond, at σ = {SIGMAS[~steady].tolist()}, v̂ "
        "has no steady state"
    )
    for source in SOURCES[1:]:
        estimate, twin, _ = moments[source]
        off, negative = errors_off(estimate, twin), (estimate[..., 1] < 0).mean(axis=1).max()
        losses = [(ends["post-processing", s][0] - ends[source, s][0]) for s in SIGMAS]
        gain, error = report.mean_and_error(losses, axis=1)
        lines.append(
            f"{source}: {'the same' if off < 3 else 'different'} preconditioners on twin problems "
            f"({off:.1f} standard errors); v̂_y < 0 in up to {negative:.0%} of the runs; excess "
            "loss, by more than 2 standard errors, below that of post-processing at σ = "
            f"{SIGMAS[gain > 2 * error].tolist()}, above it at {SIGMAS[gain < -2 * error].tolist()}"
        )
    return "\n\n" + "\n".join(f"- {line}." for line in lines)


def plot(moments, ends, path):
    """The learnt geometry, the share of negative v̂ and the excess loss, against σ."""
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 4.4))
    styles = ["k-", "C0-", "C4-", "C3-", "C1--", "C2-"]
    for source, style in zip(SOURCES, styles, strict=True):
        estimate, wide = moments[source][0], {"lw": 4, "alpha": 0.3} if style == "k-" else {}
        rates = CURVATURE / root(source, estimate, 1e-7)
        low, mid, high = np.quantile(rates[..., 1] / rates[..., 0], (0.25, 0.5, 0.75), axis=1)
        left.fill_between(SIGMAS, low, high, color=style.rstrip("-"), alpha=0.15, lw=0)
        left.plot(SIGMAS, mid, style, marker=".", label=source, **wide)
        middle.plot(SIGMAS, (estimate[..., 1] < 0).mean(axis=1), style, marker=".", **wide)
        mean, error = report.mean_and_error([ends[source, s][0] for s in SIGMAS], axis=1)
        right.errorbar(SIGMAS, mean, 2 * error, fmt=style, marker=".", **wide)
    left.set(ylim=(0.005, 5e5), title="flat over steep learning rate\n(1: as 1/c; with quartiles)")
    middle.set(ylim=(-0.02, 0.6), title="share of runs with v̂ < 0\n(flat coordinate)")
    right.set(ylim=(1e-3, 100), title="excess loss after 1000 steps\n(± 2 standard errors)")
    left.set_yscale("log")
    right.set_yscale("log")
    for axes in figure.axes:
        axes.set(xscale="log", xlabel="noise σ")
        for c, name in zip(CURVATURE, ("$c_x$", "$c_y$"), strict=True):
            axes.axvline(c, color="0.7", lw=0.8, ls="--", zorder=0)
            axes.text(c, 0.93, f" {name}", color="0.4", transform=axes.get_xaxis_transform())
        axes.grid(alpha=0.3)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.legend(*left.get_legend_handles_labels(), loc="lower center", ncol=6, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main():
    options = report.parser(__doc__, "quadratic").parse_args()
    with np.errstate(over="ignore", invalid="ignore"):  # where tuning tries too large an η
        moments, ends = run(40 if options.quick else 1000, 1000, options.seed)
    report.write(options.output, "quadratic", table(moments, ends), CLAIM, verdict(moments, ends))
    plot(moments, ends, options.output / "quadratic.png")


if __name__ == "__main__":
    main()
