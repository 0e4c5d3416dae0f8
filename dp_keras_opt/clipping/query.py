"""What an optimizer asks of the data, fixed before the data is touched."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from dp_keras_opt import deprecation
from dp_keras_opt.types import ClippingStyle, Norm


class Point(NamedTuple):
    """A place beside the weights, and what the gradient there counts in a sum of several.

    Attributes:
        coefficient: c, a number or a scalar tensor.
        offset: d, one tensor per trainable variable; None for the weights as they are.
    """

    coefficient: Any = 1.0
    offset: Sequence[Any] | None = None


class Tables(NamedTuple):
    """Tables, such as those of embeddings, of which a sum has only the rows that are looked up.

    Attributes:
        trained: by the index of each among the trainable variables: None, or a boolean array (V,)
            of which rows are trained; what an example adds to others is dropped before the clip.
        contribution_norm: C₁, the bound on what an example counts, in L2 over the rows of all
            tables together; None where rows are not counted.
    """

    trained: Mapping[int, Any]
    contribution_norm: float | None = None


#: Where the gradient is taken unless a query says otherwise.
AT_WEIGHTS = Point()


@deprecation.renamed_fields(rows="population")
class Query(NamedTuple):
    """One clipped sum over the batch: geometry, bound and which of its rows.

    Attributes:
        scale: the diagonal geometry s > 0, one tensor per trainable variable; None for 1. Each
            example contributes s ⊙ gradient, clipped.
        clip_norm: the bound C on each example's contribution, a number or a scalar tensor. Where
            it `counts`, a tensor with the bound C_l of each group that is clipped together.
        norm: the norm that is bounded, "l2" or "l1".
        style: "flat", one norm over all variables together; "per_layer", one for the variables of
            each layer, with equal bounds C_l; or a dict from names of layers to the proportions of
            their bounds. The bounds are such that the whole is bounded by C: √ΣC_l² = C in L2,
            ΣC_l = C in L1.
        normalize: False for clip(v) = v·min(1, C/‖v‖); True for "automatic clipping",
            v·C/(‖v‖ + γ) (the AUTO-S of the reference). Both bound the norm by C.
        gamma: the γ of automatic clipping.
        square: whether the square of each example's clipped contribution is summed instead,
            coordinate by coordinate.
        population: "private", the rows that the privacy guarantee covers; "public", the others:
            their mean, neither clipped nor noised.
        directions: only of public rows; None, or for each trainable variable k directions
            `(k, *shape)`. The answer is then M·v for each direction v, M the public rows' mean of
            p pᵀ over their gradients p of all variables together.
        counts: whether the answer has, behind the sum, how many of the examples have a norm of at
            most C_l, less half their number, for each l. One whose gradient is zero is in no count.
        points: None for the gradient at the weights w; or a list of `Point`, and what stands for an
            example's gradient above is Σ_k c_k ∇loss(w + d_k). Each takes a forward and a backward
            pass. Losses and outputs of a step are those at the first point.
        geometry: in the place of `scale`, a geometry M that is a matrix (`clipping.geometry`): each
            example contributes M·gradient, clipped.
        centre: a, one tensor per trainable variable; None for 0. What stands for an example's
            gradient g is g − a. One of weight 0 contributes nothing, and not clip(−a): it stands
            for one that is not there.
        tables: None, or `Tables` that are answered by row: in the place of each stand
            `tf.IndexedSlices`. Where rows are counted, there is one vector more behind all sums,
            with the count of each row of each table in turn: Σ_i min(1, C₁/√k_i) over the examples
            i that touch it, k_i the number of rows that example i touches.

    Reference: Bu, Wang, Zha and Karypis, "Automatic clipping: differentially private deep learning
    made easier and stronger", NeurIPS 2023, arXiv:2206.07136 (`normalize`).
    """

    scale: Sequence[Any] | None = None
    clip_norm: float | tf.Tensor = 1.0
    norm: Norm = "l2"
    style: ClippingStyle = "flat"
    normalize: bool = False
    gamma: float = 0.01
    square: bool = False
    population: Literal["private", "public"] = "private"
    directions: Any = None
    counts: bool = False
    points: Sequence[Point] | None = None
    geometry: Any = None
    centre: Sequence[Any] | None = None
    tables: Tables | None = None

    @property
    def sensitivity(self) -> float | tf.Tensor:
        """By how much one row, added or removed, moves the sum: C, or C² for squares.

        ‖v²‖ ≤ ‖v‖² in both norms. One row replaced moves the sum by at most twice that. Beside it,
        each count moves by at most ½, and the counts of rows together by at most C₁.
        """
        clip_norm = tf.norm(self.clip_norm) if self.counts else self.clip_norm
        return clip_norm**2 if self.square else clip_norm


#: The plain sum of gradients; what the self-check compares with `tape.gradient`.
UNCLIPPED = Query(clip_norm=math.inf)
