"""Subspace iteration, for the leading directions of a matrix, in the graph and under XLA."""

import tensorflow as tf

#: Share of the old basis that is added before it is made orthonormal: where the rank of the matrix
#: is lower than the basis's, the rest of the basis stays as it was.
_TRACE = 1e-6

#: Rounds of `leading_directions`, from the last basis on.
_ROUNDS = 6


def iterate(moved: tf.Tensor, basis: tf.Tensor) -> tf.Tensor:
    """One step of subspace iteration: an orthonormal basis of the span of A·U.

    Args:
        moved: A·U (m, r), for a symmetric A.
        basis: (m, r), what stays where A·U has a lower rank: U, or the basis it was made from.
    """
    moved = tf.math.divide_no_nan(moved, tf.reduce_max(tf.abs(moved)))
    orthonormal, _ = tf.linalg.qr(moved + _TRACE * basis)
    return orthonormal


def leading_directions(matrix: tf.Tensor, basis: tf.Tensor, rounds: int = _ROUNDS) -> tf.Tensor:
    """An orthonormal basis (m, r) of about the r leading left singular vectors of a matrix (m, n).

    Args:
        matrix: (m, n).
        basis: (m, r), orthonormal columns to begin with.
        rounds: of subspace iteration.
    """
    matrix = tf.math.divide_no_nan(matrix, tf.reduce_max(tf.abs(matrix)))
    start = basis
    for _ in range(rounds):
        moved = tf.matmul(matrix, tf.matmul(matrix, basis, transpose_a=True))
        basis = iterate(moved, start)
    return basis
