"""ADP-SGD: noise that follows a known sequence of step sizes."""

from typing import Any

import keras

from dp_keras_opt.accounting.batch_sizes import BatchSizeLike
from dp_keras_opt.checks import whole_number
from dp_keras_opt.noise import schedules
from dp_keras_opt.optimizers.projection import GaLore
from dp_keras_opt.optimizers.settings import FilterLike, NoiseLike, refuse_noise_schedule
from dp_keras_opt.optimizers.sgd import DPSGD
from dp_keras_opt.types import ClipNorm, ClippingStyle


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class ADPSGD(DPSGD):
    """DP-SGD whose noise at step t is in proportion to η_t^(−1/2), η_t its step size.

    θ ← θ − η_t·(clipped mean + noise of std α_t·σC/B), with `schedules.inverse_root_step_size`. At
    equal ε, full batches and a given sequence of step sizes, the error bound is smaller than that
    of constant noise by `theory.adp_improvement(step sizes)`. So it is with samples, as long as σ
    is well above 1; near 1, constant noise can be several times better. The learning rate may
    be changed later on, like that of any optimizer; the noise stays as it was fixed.

    Args:
        learning_rate: a Keras `LearningRateSchedule` that stays above 0, or a float (then the noise
            is constant).
        steps: T, how many steps the schedule is made for; training past it is refused. None for
            those of the first `fit`.
        momentum: in [0, 1]. Defaults to 0.0.
        nesterov: whether to apply Nesterov momentum. Defaults to False.
        {{private_arguments}}
        {{keras_arguments}}

    Raises:
        ValueError: the learning rate reaches 0 or below within T steps, or is a callable, which
            could change; or `noise_schedule` is given.

    Reference: Wu, Wang, Cristali, Gu and Willett, "Adaptive differentially private empirical risk
    minimization", 2021, arXiv:2110.07435, Algorithm 1, without the extra η_t of its equations (3)
    and (11).
    """

    _derived_settings = frozenset({"noise_schedule"})

    # Noise and steps are those of the plain one's analysis.
    takes_geometry = False
    takes_sparse_embeddings = False

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule,
        steps: int | None = None,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        clip_norm: ClipNorm,
        batch_size: BatchSizeLike | None = None,
        noise_multiplier: float | None = None,
        noise: NoiseLike = "gaussian",
        clipping: ClippingStyle = "flat",
        normalize: bool = False,
        gradient_filter: FilterLike = None,
        projection: GaLore | None = None,
        secure_noise: bool = False,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_noise_schedule(type(self).__name__, kwargs)
        if callable(learning_rate) and not isinstance(
            learning_rate, keras.optimizers.schedules.LearningRateSchedule
        ):
            raise ValueError(
                "ADPSGD needs a learning rate that is known in advance: a number or a Keras "
                "LearningRateSchedule."
            )
        if steps is not None:
            steps = whole_number(steps, "steps")
        super().__init__(
            learning_rate=learning_rate,
            momentum=momentum,
            nesterov=nesterov,
            noise_schedule=schedules.inverse_root_step_size(learning_rate, steps, noise),
            clip_norm=clip_norm,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            noise=noise,
            clipping=clipping,
            normalize=normalize,
            gradient_filter=gradient_filter,
            projection=projection,
            secure_noise=secure_noise,
            seed=seed,
            **kwargs,
        )

    @property
    def steps(self) -> int | None:
        """How many steps the noise schedule is made for; None before that is settled."""
        return self.noise_schedule.length

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        return config | {"steps": self.steps}
