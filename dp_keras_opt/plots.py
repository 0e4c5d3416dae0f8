"""Pictures, with matplotlib (the extra `plots`).

References, whose figures some of these draw again: [1] Zhang, Bu, Hong and Razaviyayn, "DOPPLER:
differentially private optimizers with low-pass filter for privacy noise reduction", NeurIPS 2024,
arXiv:2408.13460; [2] Kuru, Birbil, Gürbüzbalaban and Yıldırım, "Differentially private accelerated
optimization algorithms", SIAM Journal on Optimization 32(2), 2022, doi:10.1137/20M1355847,
arXiv:2008.01989.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dp_keras_opt import filters, theory
from dp_keras_opt.accounting.risk import Risk
from dp_keras_opt.private_validation import PrivateValidation

__all__ = [
    "autocorrelation",
    "frequency_response",
    "heavy_ball_bound",
    "heavy_ball_rate",
    "impulse_response",
    "multistage_noise",
    "norm_histogram",
    "roc",
    "scores",
    "spectrum",
    "trade_off",
    "training_curve",
]


def norm_histogram(norms: npt.ArrayLike, clip_norm: float | None = None, axes: Any = None) -> Any:
    """How the norms of examples' gradients are distributed, on a logarithmic axis.

    Args:
        norms: as `clipping.per_example_norms` gives them; zero and non-finite ones are left out.
        clip_norm: None, or a bound to mark, with the share of examples that it clips.
        axes: None for a new figure, or matplotlib axes to draw on.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: no norm is positive and finite.
    """
    values = np.asarray(norms, np.float64)
    values = values[np.isfinite(values) & (values > 0)]
    if not len(values):
        raise ValueError("There is nothing to draw: no norm is positive and finite.")
    axes = axes or _new_axes()
    low, high = values.min(), values.max()
    if low == high:
        low, high = low / 2, high * 2
    axes.hist(values, bins=np.geomspace(low, high, 41), color="tab:blue", alpha=0.7)
    median = np.median(values)
    axes.axvline(median, color="black", linestyle=":", label=f"median {median:.3g}")
    if clip_norm is not None:
        clipped = np.mean(values > clip_norm)
        label = f"C = {clip_norm:.3g} clips {clipped:.0%}"
        axes.axvline(clip_norm, color="tab:red", linestyle="--", label=label)
    axes.set_xscale("log")
    axes.set_xlabel("norm of an example's gradient")
    axes.set_ylabel("examples")
    axes.legend()
    return axes


def frequency_response(low_passes: Mapping[str, filters.LowPass], axes: Any = None) -> Any:
    """The gain of filters for oscillations, in decibels (figure 6 of [1], right).

    Args:
        low_passes: dict from labels to `filters.LowPass`.
        axes: None for a new figure, or matplotlib axes to draw on.

    Returns:
        The matplotlib axes.
    """
    axes = axes or _new_axes()
    for label, low_pass in low_passes.items():
        frequencies, gains = low_pass.frequency_response()
        axes.plot(frequencies, 20 * np.log10(np.maximum(np.abs(gains), 1e-6)), label=label)
    axes.set_ylim(bottom=max(-60, axes.get_ylim()[0]))
    axes.set_xlabel("frequency (cycles per step)")
    axes.set_ylabel("gain (dB)")
    axes.legend()
    return axes


def impulse_response(
    low_passes: Mapping[str, filters.LowPass], steps: int = 40, axes: Any = None
) -> Any:
    """The weights that filters give to the gradients of past steps (figure 6 of [1], left).

    Args:
        low_passes: dict from labels to `filters.LowPass`.
        steps: how many.
        axes: None for a new figure, or matplotlib axes to draw on.

    Returns:
        The matplotlib axes.
    """
    axes = axes or _new_axes()
    for label, low_pass in low_passes.items():
        axes.plot(low_pass.impulse_response(steps), marker=".", label=label)
    axes.set_xlabel("steps ago")
    axes.set_ylabel("weight")
    axes.legend()
    return axes


def autocorrelation(recorded: Mapping[str, npt.ArrayLike], lags: int = 50, axes: Any = None) -> Any:
    """How gradients resemble those of earlier steps, relative to themselves.

    As figure 1 of [1], left.

    Args:
        recorded: dict from labels to gradients (steps, weights). Of raw gradients the picture is as
            private as they are.
        lags: how many steps back.
        axes: None for a new figure, or matplotlib axes to draw on.

    Returns:
        The matplotlib axes.
    """
    axes = axes or _new_axes()
    for label, gradients in recorded.items():
        correlation = filters.autocorrelation(gradients, lags)
        axes.plot(correlation / correlation[0], label=label)
    axes.axhline(0.0, color="black", linewidth=0.5)
    axes.set_xlabel("lag (steps)")
    axes.set_ylabel("auto-correlation")
    axes.legend()
    return axes


def spectrum(
    recorded: Mapping[str, npt.ArrayLike], low_pass: filters.LowPass | None = None, axes: Any = None
) -> Any:
    """How the power of recorded gradients spreads over frequencies (figures 1 and 2 of [1]).

    Args:
        recorded: dict from labels to gradients (steps, weights). Of raw gradients the picture is as
            private as they are.
        low_pass: None, or a `filters.LowPass` whose gain is drawn beside.
        axes: None for a new figure, or matplotlib axes to draw on.

    Returns:
        The matplotlib axes.
    """
    axes = axes or _new_axes()
    for label, gradients in recorded.items():
        axes.semilogy(*filters.power_spectral_density(gradients), label=label)
    axes.set_xlabel("frequency (cycles per step)")
    axes.set_ylabel("power spectral density")
    if low_pass is not None:
        frequencies, gains = low_pass.frequency_response()
        beside = axes.twinx()
        beside.plot(frequencies, np.abs(gains), color="black", linestyle=":", label="filter")
        beside.set_ylabel("gain of the filter")
        beside.set_ylim(0, None)
        axes.plot([], [], color="black", linestyle=":", label="gain of the filter")
    axes.legend()
    return axes


def heavy_ball_rate(
    strong_convexity: float = 0.5,
    smoothness: float = 1.0,
    learning_rates: Sequence[float] = (0.1, 0.5, 1.0),
    axes: Any = None,
) -> Any:
    """How fast the heavy ball converges on a quadratic, against its momentum; a dot at the best.

    By default figure 1 of [2], bottom row.

    Args:
        strong_convexity: μ > 0.
        smoothness: L ≥ μ.
        learning_rates: one curve each.
        axes: None for a new figure, or matplotlib axes to draw on.

    Returns:
        The matplotlib axes.
    """
    axes = axes or _new_axes()
    momenta = np.linspace(0, 0.999, 1000)
    for learning_rate in learning_rates:
        curve = theory.heavy_ball_rate(strong_convexity, smoothness, learning_rate, momenta)
        rates = np.asarray(curve)
        best = np.argmin(rates)
        (line,) = axes.plot(momenta, rates, label=f"α = {learning_rate:.3g}")
        axes.plot(momenta[best], rates[best], "o", color=line.get_color())
    axes.set_xlabel("momentum β")
    axes.set_ylabel("rate ρ")
    axes.legend()
    return axes


def heavy_ball_bound(
    eigenvalues: Sequence[float] = (0.5, 1.0),
    learning_rate: float = 0.5,
    momenta: Sequence[float] = (0.0, 0.3, 0.7),
    noise_std_per_step: float = 1e-4,
    initial_distance: float = 10**0.5,
    steps: int = 250,
    axes: Any = None,
) -> Any:
    """The error bound of the heavy ball on a quadratic, if training is planned to end at that step.

    More steps share one privacy budget, so the noise is ∝ the planned number of steps: the bound
    falls and then rises. The last curve is that of the momentum (1 − √(αμ))/(1 + √(αμ)). One panel
    of figure 1 of [2], which has the learning rates 0.1, 0.5 and 1 and noise of 1e-4 and 1e-2 per
    step.

    Args:
        eigenvalues: of the quadratic.
        learning_rate: α.
        momenta: one curve each, beside the last.
        noise_std_per_step: standard deviation of the noise, per coordinate and planned step.
        initial_distance: from the start to the minimiser.
        steps: how many are drawn.
        axes: None for a new figure, or matplotlib axes to draw on.

    Returns:
        The matplotlib axes.
    """
    axes = axes or _new_axes()
    t = np.arange(1, steps + 1)
    best = float(theory.nesterov_momentum(min(eigenvalues), learning_rate))
    curves = [(beta, f"β = {beta:.3g}", "-") for beta in momenta]
    for beta, label, style in [*curves, (best, f"β = {best:.3g}, from μ and α", "--")]:
        bound = theory.heavy_ball_bound(
            t, eigenvalues, learning_rate, beta, initial_distance, (noise_std_per_step * t) ** 2
        )
        axes.semilogy(t, bound, style, label=label)
    axes.set_xlabel("planned steps")
    axes.set_ylabel("bound on F − F*")
    axes.set_title(f"α = {learning_rate:.3g}, noise {noise_std_per_step:.3g} per step")
    axes.legend()
    return axes


def multistage_noise(
    strong_convexity: float = 1.0,
    smoothness: float = 20.0,
    steps: Sequence[int] = (54, 134, 294, 614),
    c: float = 1.0,
    p: float = 1,
    axes: Any = None,
) -> Any:
    """The best scale of the Laplace noise of each step of the multistage Nesterov method.

    It falls within a stage and jumps up at the next. By default figure 2 of [2]: 2, 3, 4 and 5
    stages.

    Args:
        strong_convexity: μ > 0.
        smoothness: L ≥ μ.
        steps: numbers of steps, one curve each.
        c, p: as for `theory.multistage_stages`.
        axes: None for a new figure, or matplotlib axes to draw on.

    Returns:
        The matplotlib axes.
    """
    axes = axes or _new_axes()
    for count in steps:
        _, weights = theory.multistage_weights(strong_convexity, smoothness, count, c, p)
        scales = 1 / theory.allocate_epsilon(weights, 1.0)
        axes.semilogy(np.arange(1, count + 1), scales, label=f"{count} steps")
    axes.set_xlabel("step")
    axes.set_ylabel("scale b of the noise, in units of S₁/(nε)")
    axes.legend()
    return axes


def scores(
    rows: Sequence[Mapping[str, Any]], higher_is_better: bool = False, axes: Any = None
) -> Any:
    """The scores of optimizers, best on top, with two standard errors to each side.

    Args:
        rows: as in `tuning.Comparison`.
        higher_is_better: whether larger scores are better.
        axes: None for a new figure, or matplotlib axes to draw on.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("There is nothing to draw: no candidate was compared.")
    epsilons = sorted({row["epsilon"] for row in rows})
    middle = epsilons[len(epsilons) // 2]
    names = [row["candidate"] for row in rows if row["epsilon"] == middle][::-1]
    axes = axes or _new_axes(height=1.5 + 0.25 * len(names))
    for epsilon, marker in zip(epsilons, itertools.cycle("osD^v")):
        drawn = [row for row in rows if row["epsilon"] == epsilon and row["candidate"] in names]
        axes.errorbar(
            [row["score"] for row in drawn],
            [names.index(row["candidate"]) for row in drawn],
            xerr=[0.0 if np.isnan(e) else 2 * e for e in (row["standard_error"] for row in drawn)],
            fmt=marker,
            markersize=4,
            label=f"ε = {epsilon:g}",
        )
    best = [row["score"] for row in rows if row["epsilon"] == middle][0]
    axes.axvline(best, color="black", linestyle=":", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel(f"score ({'higher' if higher_is_better else 'lower'} is better)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend()
    return axes


def roc(curves: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]], axes: Any = None) -> Any:
    """How many members attacks find at each rate of false alarms, on logarithmic axes.

    Args:
        curves: dict from labels to (false-positive rates, true-positive rates), rising, as
            `audit.AttackResult.roc` has them.
        axes: None for a new figure, or matplotlib axes to draw on.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: there are no curves, or no rate is above 0.
    """
    rates = np.concatenate(
        [np.zeros(0), *(np.asarray(c, np.float64).ravel() for c in curves.values())]
    )
    if not np.any(rates > 0):
        raise ValueError("There is nothing to draw: no rate is above 0.")
    least = np.min(rates[rates > 0])
    axes = axes or _new_axes()
    for label, (false, true) in curves.items():
        axes.plot(np.maximum(false, least), np.maximum(true, least), drawstyle="steps-post",
                  label=label)  # fmt: skip
    axes.plot([least, 1], [least, 1], color="black", linestyle=":", label="blind guess")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("false-positive rate")
    axes.set_ylabel("true-positive rate")
    axes.legend()
    return axes


def trade_off(risks: Mapping[str, Risk], axes: Any = None) -> Any:
    """The best that any attack can do: true-positive over false-positive rate, on logarithmic axes.

    Args:
        risks: dict from labels to `accounting.Risk`, as `ledger.risk()` gives them.
        axes: None for a new figure, or matplotlib axes to draw on.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: there is none.
    """
    if not risks:
        raise ValueError("There is nothing to draw: no risk was given.")
    axes = axes or _new_axes()
    rates = np.geomspace(1e-4, 1, 401)
    for label, risk in risks.items():
        axes.loglog(rates, risk.true_positive_rate(rates), label=label)
    axes.loglog(rates, rates, color="black", linestyle=":", label="guessing")
    axes.set_xlabel("false-positive rate")
    axes.set_ylabel("true-positive rate, at most")
    axes.grid(alpha=0.3)
    axes.legend()
    return axes


def training_curve(
    validation: PrivateValidation, figures: Sequence[str] | None = None, axes: Any = None
) -> Any:
    """Scores by epoch, with bands of twice the standard deviation of their noise to either side.

    Args:
        validation: the callback, after `fit`.
        figures: None, or the names of those to draw; by default all that are single numbers.
        axes: None for a new figure, or matplotlib axes to draw on.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: nothing was evaluated.
    """
    history = validation.history
    if not history:
        raise ValueError("There is nothing to draw: no evaluation has taken place.")
    if figures is None:
        figures = [name for name, found in history.items() if np.ndim(found[0].value) == 0]
    axes = axes or _new_axes()
    epochs = np.array(validation.epochs) + 1
    for name in figures:
        values, stds = np.transpose(history[name])
        (line,) = axes.plot(epochs, values, marker=".", label=name)
        bounds = values - 2 * stds, values + 2 * stds
        axes.fill_between(epochs, *bounds, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set_xlabel("epoch")
    axes.set_ylabel("score, with noise")
    axes.legend()
    return axes


def _new_axes(height=4):
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'dp-keras-opt[plots]'.") from error
    return plt.subplots(figsize=(6, height), layout="constrained")[1]
