"""Convolutions whose filters are standardized."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from dp_keras_opt.checks import is_number

_OF_FILTER = (-4, -3, -2)  # the axes of a kernel that one filter has


@keras.saving.register_keras_serializable("dp_keras_opt")
class StandardizedConv2D(keras.layers.Conv2D):
    """A `keras.layers.Conv2D` whose filters have mean 0 and variance 1 whenever it is called.

    Each filter, over its window and input channels, is used as (w − mean(w))/√(var(w) + ε): scale
    and offset of what is trained do not matter. Beside `GroupNormalization`, as `clipping.fix`
    puts it for batch normalization, this trains deep networks with the large batches that private
    training wants. It depends on no data, so that it costs no privacy; the gradients of the trained
    kernel are clipped as those of any layer.

    References:
        Qiao et al., "Micro-batch training with batch-channel normalization and weight
        standardization", arXiv:1903.10520; in private training De et al., "Unlocking high-accuracy
        differentially private image classification through scale", arXiv:2204.13650.

    Args:
        *args, **kwargs: as of `keras.layers.Conv2D`.
        epsilon: ε, added to the variance.

    Raises:
        ValueError: `epsilon` is not positive; a filter has one weight only, whose variance is 0; or
            `enable_lora` is called.
    """

    def __init__(self, *args: Any, epsilon: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not is_number(epsilon) or not epsilon > 0:
            raise ValueError(f"epsilon must be a number > 0; received {epsilon!r}.")
        self.epsilon = float(epsilon)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        if self.kernel.shape.num_elements() == self.filters:
            raise ValueError(
                f"Each filter of '{self.name}' has one weight, of variance 0, so that it cannot be "
                "standardized. Use keras.layers.Conv2D here."
            )

    def convolution_op(self, inputs: Any, kernel: Any) -> Any:
        standardized, _ = self.standardized(kernel)
        return super().convolution_op(inputs, ops.cast(standardized, inputs.dtype))

    def standardized(self, kernel: Any) -> tuple[Any, Any]:
        """(what a kernel is used as; what its filters are divided by), in float32."""
        kernel = ops.cast(kernel, "float32")
        mean, variance = ops.moments(kernel, _OF_FILTER, keepdims=True)
        deviation = ops.sqrt(variance + self.epsilon)
        return (kernel - mean) / deviation, deviation

    def gradient_of_kernel(self, gradient: Any, kernel: Any = None) -> Any:
        """The gradient in the kernel, (..., *shape), from that in what it is used as.

        Args:
            gradient: that in what the kernel is used as, (..., *shape).
            kernel: where it is taken; None for the kernel as it is.
        """
        pair = self.standardized(self.kernel if kernel is None else kernel)
        standardized, deviation = (ops.cast(each, gradient.dtype) for each in pair)
        along = standardized * ops.mean(gradient * standardized, _OF_FILTER, keepdims=True)
        return (gradient - ops.mean(gradient, _OF_FILTER, keepdims=True) - along) / deviation

    def enable_lora(self, *args: Any, **kwargs: Any) -> None:
        """Refused: a small step of the factors would be none of what the kernel is used as."""
        raise ValueError(
            f"'{self.name}' is a StandardizedConv2D, of which there is no LoRA. Train its kernel, "
            "or use keras.layers.Conv2D."
        )

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"epsilon": self.epsilon}
