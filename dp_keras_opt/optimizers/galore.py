"""DP-GaLore: DP-Adam in low-dimensional subspaces of the weight matrices."""

from typing import Any

import keras

from dp_keras_opt.optimizers.adam import DPAdam
from dp_keras_opt.optimizers.projection import GaLore
from dp_keras_opt.types import LearningRate


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class DPGaLore(DPAdam):
    """`DPAdam` with `projection=GaLore(rank, update_gap, scale, reset)`.

    With a rank that no weight matrix exceeds it is DPAdam itself. `DPAdam`, `DPAdagrad`, `DPYogi`,
    `DPRMSprop` and `DPSGD` take the projection as well.

    Args:
        learning_rate: a float, a Keras schedule or a callable. Defaults to 0.001.
        rank, update_gap, scale, reset: see `GaLore`.
        **kwargs: the arguments of `DPAdam`.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rank: int = 128,
        update_gap: int = 200,
        scale: float = 1.0,
        reset: bool = False,
        **kwargs: Any,
    ) -> None:
        projection = GaLore(rank, update_gap, scale, reset)
        super().__init__(learning_rate=learning_rate, projection=projection, **kwargs)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["projection"]
        return config | self.projection.get_config()  # type: ignore[union-attr]
