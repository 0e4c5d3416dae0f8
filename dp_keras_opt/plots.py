"""Pictures, with matplotlib (the extra `plots`)."""

import numpy as np


def norm_histogram(norms, clip_norm=None, axes=None):
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
    norms = np.asarray(norms, np.float64)
    norms = norms[np.isfinite(norms) & (norms > 0)]
    if not len(norms):
        raise ValueError("There is nothing to draw: no norm is positive and finite.")
    axes = axes or _new_axes()
    low, high = norms.min(), norms.max()
    if low == high:
        low, high = low / 2, high * 2
    axes.hist(norms, bins=np.geomspace(low, high, 41), color="tab:blue", alpha=0.7)
    median = np.median(norms)
    axes.axvline(median, color="black", linestyle=":", label=f"median {median:.3g}")
    if clip_norm is not None:
        clipped = np.mean(norms > clip_norm)
        label = f"C = {clip_norm:.3g} clips {clipped:.0%}"
        axes.axvline(clip_norm, color="tab:red", linestyle="--", label=label)
    axes.set_xscale("log")
    axes.set_xlabel("norm of an example's gradient")
    axes.set_ylabel("examples")
    axes.legend()
    return axes


def _new_axes():
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'dp-keras-opt[plots]'.") from error
    return plt.subplots(figsize=(6, 4), layout="constrained")[1]
