"""DP-KFC: a Kronecker-factored geometry from what a model does with synthetic inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from dp_keras_opt.checks import is_number, whole_number
from dp_keras_opt.clipping.batch import Batch
from dp_keras_opt.clipping.book_keeping import per_example_gradients
from dp_keras_opt.clipping.factors import OuterProducts
from dp_keras_opt.clipping.geometry import Kronecker
from dp_keras_opt.clipping.query import Query
from dp_keras_opt.clipping.self_check import checked_engines
from dp_keras_opt.optimizers.geometries import Geometry

if TYPE_CHECKING:
    from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class KroneckerFactored(Geometry):
    """Each kernel's gradient G is clipped as A^(−½)·G·D^(−½), for synthetic inputs' A and D.

    A = E[a aᵀ] over the inputs a of the kernel and D = E[δ δᵀ] over the gradients δ in what it
    gives, on `probes` that are not private: each over its mean eigenvalue, plus `damping`, to the
    power −½. Neither changes the size of a layer beside others, so that a clip norm remains what it
    was. The identity have biases, embeddings, kernels that are not multiplied as a matrix of all
    axes but the last times the last (of grouped and standardized convolutions; of queries, keys
    and values in attention), kernels of layers without a rule, sides above `largest`, and sides
    whose probes were all 0.

    `fit` asks the probes before its first step; `refresh`, from a callback, asks them again as the
    weights change, which are released anyway.

    Args:
        probes: (x, y), arrays as for `fit`: noise such as `pink_noise` with labels by chance, or
            public examples. Not saved with the optimizer; what was found from them is.
        damping: γ > 0, relative to the mean eigenvalue.
        take_back: whether the noisy mean is multiplied by A^½ and D^½ again. As published it is
            not: the step is that of a preconditioned gradient.
        largest: the most rows of a matrix.

    Guarantee: none about the probes. Declare only what is public.

    Raises:
        ValueError: an argument is out of range; or a model is trained that no probes were asked of.

    Reference: Molina Van den Bosch, Taiello, Sund Aillet, Protani, Gonzalez Ballester and Serio,
    "DP-KFC: data-free preconditioning for privacy-preserving deep learning", ICML 2026,
    arXiv:2605.13418.
    """

    uses_public = True

    def __init__(
        self,
        probes: tuple[Any, Any] | None = None,
        damping: float = 0.1,
        take_back: bool = False,
        largest: int = 2048,
    ) -> None:
        if not (is_number(damping) and 0 < damping < math.inf):
            raise ValueError(f"damping must be positive and finite, received {damping!r}.")
        self.probes, self.damping, self.take_back = probes, float(damping), bool(take_back)
        self.largest = whole_number(largest, "largest")

    def build(self, optimizer: PrivateOptimizer, variables: Sequence[keras.Variable]) -> None:
        def matrix(size, name):
            if size > self.largest:
                return None
            identity = keras.initializers.Identity()
            return optimizer.add_variable((size, size), identity, dtype="float32", name=name)

        self._kernels: list[bool] | None = None  # until `begin`, before the first step
        self._sides = []  # for each variable and side, a root and its inverse
        for variable in variables:
            *rows, columns = variable.shape or (1,)
            sizes = (math.prod(rows), columns) if len(variable.shape) > 1 else ()
            self._sides.append(
                [
                    (matrix(size, "geometry_side"), matrix(size, "geometry_inverse"))
                    for size in sizes
                ]
                or [(None, None)] * 2
            )
        self._is_known = optimizer.add_variable((), dtype="float32", name="geometry_known")
        self._is_kernel = optimizer.add_variable(
            (len(variables),), dtype="float32", name="geometry_is_kernel"
        )

    def begin(self, optimizer: PrivateOptimizer, model: keras.Model) -> None:
        if not float(tf.convert_to_tensor(self._is_known)):
            self.refresh(optimizer, model)
        self._kernels = [bool(each) for each in np.asarray(tf.convert_to_tensor(self._is_kernel))]

    def refresh(self, optimizer: PrivateOptimizer, model: keras.Model) -> None:
        """Asks the probes what the geometry is at the weights as they are."""
        if self.probes is None:
            raise ValueError(
                "KroneckerFactored has no probes: they are not saved with it. Pass (x, y), noise "
                "or public examples, as KroneckerFactored(probes=...)."
            )
        optimizer.ensure_built(model.trainable_variables)
        x, y = keras.tree.map_structure(tf.convert_to_tensor, self.probes)
        batch = Batch(x, y)
        engines = checked_engines(model, batch)
        _, _, gradients = per_example_gradients(model, batch, None, engines)
        kernels = [isinstance(each, OuterProducts) and each.is_matrix for each in gradients]
        for factor, sides in itertools.compress(zip(gradients, self._sides, strict=True), kernels):
            for (root, inverse), tensor in zip(sides, (factor.inputs, factor.deltas), strict=True):
                if root is not None:
                    for variable, power in ((root, -0.5), (inverse, 0.5)):
                        optimizer.assign(variable, _damped_power(tensor, self.damping, power))
        optimizer.assign(self._is_kernel, tf.constant(kernels, tf.float32))
        optimizer.assign(self._is_known, 1.0)

    def seen(self, optimizer: PrivateOptimizer, query: Query) -> Query:
        if self._kernels is None:  # nobody steps yet, but looks at the query
            if not tf.executing_eagerly():
                raise ValueError(
                    "KroneckerFactored has asked no probes yet, and a step begins. Build the model "
                    "first: call it on a batch."
                )
            return query

        def side(place, which):
            # What is no kernel has the identity: as a matrix it would cost a gradient for each row.
            matrices = [
                sides[place][which] if is_kernel else None
                for sides, is_kernel in zip(self._sides, self._kernels, strict=True)
            ]
            return [None if m is None else tf.convert_to_tensor(m) for m in matrices]

        nothing = [None] * len(self._sides)
        back = (side(0, 1), side(1, 1)) if self.take_back else (nothing, nothing)
        geometry = Kronecker(side(0, 0), side(1, 0), Kronecker(*back))
        return query._replace(geometry=geometry)

    def get_config(self) -> dict[str, Any]:
        return {"damping": self.damping, "take_back": self.take_back, "largest": self.largest}


def pink_noise(
    count: int, shape: Sequence[int], exponent: float = 1.0, seed: int | None = None
) -> npt.NDArray[np.float32]:
    """Synthetic pictures whose power falls with the spatial frequency f, as 1/f^(2·exponent).

    Args:
        count: how many.
        shape: (height, width, channels) of one.
        exponent: of the amplitude; 0 is white noise, 1 is near what photographs have.
        seed: None, or one to draw the same again.

    Returns:
        A float32 array of them, of mean 0 and variance 1.
    """
    height, width, channels = shape
    white = np.random.default_rng(seed).normal(size=(count, channels, height, width))
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :])
    frequency[0, 0] = np.inf  # no mean
    spectrum = np.fft.rfft2(white) * frequency**-exponent
    pictures = np.moveaxis(np.fft.irfft2(spectrum, s=(height, width)), 1, -1)
    return np.float32(pictures / pictures.std())


def _damped_power(vectors, damping, power):
    """(E[v vᵀ]/λ̄ + γ)^power over vectors (..., size), λ̄ the mean eigenvalue; 1 where all are 0."""
    flat = tf.cast(tf.reshape(vectors, (-1, vectors.shape[-1])), tf.float64)
    flat = tf.math.divide_no_nan(flat, tf.reduce_max(tf.abs(flat)))
    second = tf.matmul(flat, flat, transpose_a=True)
    mean = tf.linalg.trace(second) / flat.shape[-1]
    values, directions = tf.linalg.eigh(tf.math.divide_no_nan(second, mean))
    scaled = tf.maximum(values, 0.0) + damping
    matrix = tf.matmul(directions * scaled**power, directions, transpose_b=True)
    identity = tf.eye(flat.shape[-1], dtype=tf.float64)
    return tf.cast(tf.where(mean > 0, matrix, identity), tf.float32)
