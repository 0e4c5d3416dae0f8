"""Correlated noise with few buffers, or none, whose matrix C has no band.

A participation shows in all later rows of C x. So several of one example always add up (there is no
√k rule), and sampling does not amplify: these are for batches in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt.checks import is_number, whole_number
from dp_keras_opt.noise import strategies
from dp_keras_opt.noise.correlated import Toeplitz, newest_first, overwrite
from dp_keras_opt.noise.gaussian import NORMAL, NORMAL_AND_REST
from dp_keras_opt.noise.mechanism import Mechanism
from dp_keras_opt.noise.source import NoiseSource
from dp_keras_opt.noise.workload import Workload
from dp_keras_opt.types import Batching


class _Unbanded(Toeplitz):
    """What is found for `separation` and a workload, once the number of steps is known."""

    def __init__(self, steps, separation, momentum, horizon):
        self.steps = None if steps is None else whole_number(steps, "steps")
        self.separation = separation
        if separation is not None:
            self.separation = whole_number(separation, "separation")
        self.workload = Workload(momentum, horizon=horizon)

    def _set_column(self, column):
        """Takes the first column of C, (T,), scaled to norm 1."""
        self._set_coefficients(column / np.linalg.norm(column), self.steps)
        if np.any(np.diff(self.coefficients, append=0.0) > 1e-12):
            raise ValueError(
                f"The coefficients of {type(self).__name__} rise somewhere, so its sensitivity is "
                "not known. Leave its parameters out, to have them found."
            )

    def for_run(
        self, steps: int, sampling: Batching, workload: Workload | None = None
    ) -> Mechanism:
        if not self.is_open:
            return self
        apart = self.separation or sampling.separation
        found = {"steps": steps, "separation": apart if apart and apart < steps else None}
        return self.from_config(self.get_config() | found)

    def check_sampling(self, sampling: Batching) -> None:
        if sampling.is_poisson:
            raise ValueError(
                f"{type(self).__name__} noise is not amplified by sampling: what an example adds "
                "shows in all later steps. Use dp_keras_opt.data.fixed_order_epochs; or "
                "BandedMatrix, which is amplified, with cyclic_poisson."
            )
        super().check_sampling(sampling)

    def get_config(self) -> dict[str, Any]:
        return {"steps": self.steps, "separation": self.separation} | self.workload.constant


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class BufferedToeplitz(_Unbanded):
    """Buffered linear Toeplitz noise (BLT): near the best of all, with two or three buffers.

    C has the coefficients c_0 = 1, c_k = Σ_j ω_j·θ_j^{k−1}, over their norm. The scales ω and
    decays θ minimise the error of the weights over T steps times the sensitivity of a run; Σω ≤ 1,
    so that the coefficients fall and the sensitivity is exact.

    Args:
        steps: T, how many steps a run takes at most; None for those of the first `fit`.
        buffers: how many, each of the size of the model. They are never saved.
        separation: steps between two participations of an example for which the parameters are
            found; None for one participation, or for those of the first `fit` where `steps` is
            None. The privacy that is stated is that of the actual batches.
        momentum: β in [0, 1) of the rule that adds the gradients up; 0 stands for their sums.
        horizon: for how many steps the weights hold on to a gradient; None for ever.
        scales: ω, (buffers,), positive, of sum ≤ 1; or None, to find them.
        decays: θ, (buffers,), in (0, 1); or None, to find them.

    Raises:
        ValueError: an argument is out of range; one of scales and decays is given alone.

    References: Dvijotham, McMahan, Pillutla, Steinke and Thakurta, "Efficient and near-optimal
    noise generation for streaming differential privacy", FOCS 2024, arXiv:2404.16706; McMahan, Xu
    and Zhang, "A hassle-free algorithm for private learning in practice: don't use tree
    aggregation, use BLTs", 2024, arXiv:2408.08868 (several participations).
    """

    def __init__(
        self,
        steps: int | None = None,
        buffers: int = 2,
        *,
        separation: int | None = None,
        momentum: float = 0.0,
        horizon: float | None = None,
        scales: Sequence[float] | None = None,
        decays: Sequence[float] | None = None,
    ) -> None:
        super().__init__(steps, separation, momentum, horizon)
        self.slots = whole_number(buffers, "buffers", 1, "For none at all: noise='gaussian'.")
        self.scales, self.decays = self._checked(scales, decays)
        if self.steps is None:
            return
        if self.scales is None:
            self.scales, self.decays = strategies.buffered_parameters(
                self.steps, self.slots, self.separation, self.workload
            )
        self._set_column(strategies.decaying_coefficients(self.scales, self.decays, self.steps))

    def _checked(self, scales, decays):
        if scales is None and decays is None:
            return None, None
        scales, decays = (tuple(map(float, () if v is None else v)) for v in (scales, decays))
        if not len(scales) == len(decays) == self.slots:
            raise ValueError(f"scales and decays are {self.slots} numbers each, or None both.")
        if not (min(scales) > 0 and sum(scales) <= 1 + 1e-12 and all(0 < d < 1 for d in decays)):
            raise ValueError(
                "scales must be positive with a sum of at most 1, and decays in (0, 1): only then "
                "is the sensitivity known. Leave both out to have them found."
            )
        return scales, decays

    def mixing(self, step: tf.Tensor) -> tuple[Any, Any]:
        return 1 / self.coefficients[0], -self.coefficients[0] * np.array(self.scales)

    def remember(
        self, past: Sequence[tf.Variable], step: tf.Tensor, draw: tf.Tensor, noise: tf.Tensor
    ) -> None:
        for buffer, decay in zip(past, self.decays, strict=True):
            buffer.assign(decay * buffer + noise)

    def get_config(self) -> dict[str, Any]:
        found = {"scales": self.scales, "decays": self.decays}
        lists = {name: values and list(values) for name, values in found.items()}
        return super().get_config() | {"buffers": self.slots} | lists


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class BandedInverseSquareRoot(_Unbanded):
    """The inverse of the square root of the prefix sums, cut off after some diagonals.

    C⁻¹ is what is banded: the noise of a step is made of the last few draws. Nothing is searched
    for.

    Args:
        steps: T, how many steps a run takes at most; None for those of the first `fit`.
        inverse_bands: p ≤ T diagonals of C⁻¹. Costs p − 1 buffers of the size of the model, which
            are never saved.

    Raises:
        ValueError: there are more diagonals than steps, or fewer than 1.

    Reference: Kalinin, McKenna, Upadhyay and Lampert, "Back to square roots: an optimal bound on
    the matrix factorization error for multi-epoch differentially private SGD", ICLR 2026,
    arXiv:2505.12128.
    """

    def __init__(self, steps: int | None = None, inverse_bands: int = 8) -> None:
        super().__init__(steps, None, 0.0, None)
        advice = "Give the number of diagonals, e.g. inverse_bands=8."
        self.inverse_bands = whole_number(inverse_bands, "inverse_bands", 1, advice)
        self.slots = self.inverse_bands - 1
        self._row = strategies.inverse_square_root_coefficients(self.inverse_bands)
        if self.steps is None:
            return
        if self.inverse_bands > self.steps:
            raise ValueError(
                f"inverse_bands={self.inverse_bands} exceeds steps={self.steps}: there is no step "
                f"so long ago. Use at most inverse_bands={self.steps}, or take more steps."
            )
        self._set_column(strategies.inverse_coefficients(self._row, self.steps))

    def mixing(self, step: tf.Tensor) -> tuple[Any, Any]:
        return 1 / self.coefficients[0], newest_first(tf.constant(self._row[1:], tf.float32), step)

    def remember(
        self, past: Sequence[tf.Variable], step: tf.Tensor, draw: tf.Tensor, noise: tf.Tensor
    ) -> None:
        overwrite(past, step % self.slots, draw)

    def for_run(
        self, steps: int, sampling: Batching, workload: Workload | None = None
    ) -> Mechanism:
        return self.from_config(self.get_config() | {"steps": steps}) if self.is_open else self

    def get_config(self) -> dict[str, Any]:
        return {"steps": self.steps, "inverse_bands": self.inverse_bands}


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class LambdaCGD(_Unbanded):
    """Each step takes back a fraction λ of the step before's draw, which is drawn again: DP-λCGD.

    C⁻¹ has the diagonals 1 and −λ, times the norm of C's first column. There is no buffer of the
    size of the model: of a draw 128 bits are kept, the key that it follows from. That key is the
    noise, for whoever gets hold of it: it is fresh for each step, and nothing saves it but the
    secret file of `DPModel.save_run`.

    Args:
        steps: T, how many steps a run takes at most; None for those of the first `fit`.
        fraction: λ in (0, 1); None for that of least error.
        separation: steps between two participations of an example for which λ is found; None for
            one participation, or for those of the first `fit` where `steps` is None.
        momentum: β in [0, 1) of the rule that adds the gradients up; 0 stands for their sums.
        horizon: for how many steps the weights hold on to a gradient; None for ever.
        buffered: whether the draw is kept, in one buffer of the size of the model, in place of its
            key. Faster; and what `secure_noise` needs, whose bits cannot be drawn again.

    Raises:
        ValueError: an argument is out of range.

    Reference: Kalinin, McKenna, Pagh and Lampert, "DP-λCGD: efficient noise correlation for
    differentially private model training", ICML 2026, arXiv:2601.22334.
    """

    def __init__(
        self,
        steps: int | None = None,
        fraction: float | None = None,
        *,
        separation: int | None = None,
        momentum: float = 0.0,
        horizon: float | None = None,
        buffered: bool = False,
    ) -> None:
        super().__init__(steps, separation, momentum, horizon)
        if fraction is not None and not (is_number(fraction) and 0 < fraction < 1):
            raise ValueError(f"fraction must be in (0, 1), e.g. 0.9; received {fraction!r}.")
        self.fraction, self.buffered = fraction, bool(buffered)
        self.slots = int(self.buffered)
        if self.steps is None:
            return
        if self.fraction is None:
            self.fraction = strategies.best_fraction(self.steps, self.separation, self.workload)
        self._set_column(self.fraction ** np.arange(self.steps, dtype=np.float64))

    def buffers(self, size: int, source: NoiseSource) -> list[tf.TensorSpec]:
        if self.buffered:
            return super().buffers(size, source)
        if not source.can_repeat:
            raise ValueError(
                "LambdaCGD draws the last step's noise again, and the bits of secure_noise=True "
                "come only once. Pass LambdaCGD(..., buffered=True)."
            )
        return [tf.TensorSpec((2,), tf.int64)]  # a key

    def recall(
        self, source: NoiseSource, past: Sequence[tf.Variable], size: int
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        if self.buffered:
            return super().recall(source, past, size)
        (key,) = past
        last = source.draw_again(NORMAL, (size,), key.read_value())
        fresh = source.words(2)
        key.assign(fresh)
        return *source.draw_again(NORMAL_AND_REST, (size,), fresh), [last]

    def mixing(self, step: tf.Tensor) -> tuple[Any, Any]:
        assert self.fraction is not None  # it has its steps; for the type checker
        taken_back = tf.where(step > 0, self.fraction, 0.0)  # before the first step there is none
        return 1 / self.coefficients[0], [-taken_back]

    def remember(
        self, past: Sequence[tf.Variable], step: tf.Tensor, draw: tf.Tensor, noise: tf.Tensor
    ) -> None:
        if self.buffered:
            overwrite(past, 0, draw)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"fraction": self.fraction, "buffered": self.buffered}
