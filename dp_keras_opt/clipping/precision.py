"""How exactly float32 numbers are multiplied, on which the bound of a contribution rests.

GPUs from Ampere on take the factors of a matrix product as TF32 by default: of the 23 bits of a
mantissa 10 remain, so that a factor loses up to 2⁻¹⁰ of itself, and a product up to 2⁻⁹. What an
example contributes is

    w · Σ_t a_t ⊗ b_t,    w ≤ C / ‖Σ_t a_t ⊗ b_t‖,

off by ρ · w · Σ_t ‖a_t‖ ‖b_t‖ at most, where ρ is `rounding`. Four things keep it within C:

- The norm that w is found from is raised by ρ Σ_t ‖a_t‖ ‖b_t‖ (`factors`), and by ρ of itself for
  the product with w (`clip_factor`).
- The norm is computed `in_full`, from factors in two parts that TF32 holds: a squared norm from
  products would otherwise be off by ρ (Σ_t ‖a_t‖ ‖b_t‖)², and the norm by the root of that.
- A kernel may add products one after another, each time half a bit off in the same direction: what
  somebody who knows the order can bring about. So `in_parts` takes a long sum as several, and ρ
  counts all of a part.
- Nothing may round more: `tensorflow_settings` refuses it.

Half precision needs no more. A norm and a sum are taken of the same recorded numbers, which float32
holds as they are; how these were computed does not matter to the bound.
"""

import tensorflow as tf

#: What a product of two factors in TF32 loses of itself, at most.
_TF32 = 2.0**-9

#: What a product of two parts each loses: three terms of 2⁻²⁰ each (see `in_full`).
_IN_TWO = 2.0**-18

#: Products that are added at once are in parts of so many, or in `_PARTS`, if these are longer.
_PART, _PARTS = 256, 32

#: The bits of a float32 number that TF32 has, too.
_KEPT = ~0x1FFF


def is_coarse():
    """Whether products of matrices take their factors as TF32: GPUs may, if it is not disabled."""
    return bool(
        tf.config.experimental.tensor_float_32_execution_enabled()
        and tf.config.list_physical_devices("GPU")
    )


def rounding(terms=1, full=False):
    """Bound on the error of a float32 sum of products, relative to the sum of their magnitudes.

    Args:
        terms: how many products, a number or a scalar tensor: each may lose half a bit.
        full: whether of products `in_full`.
    """
    one = 2.0**-21
    if is_coarse():
        one = _IN_TWO if full else _TF32 + _IN_TWO
    return one + 2.0**-24 * (tf.cast(terms, tf.float32) if tf.is_tensor(terms) else terms)


def in_parts(product, one, other, axis):
    """`product`, which sums over an axis of two tensors, `in_full`, as a sum of shorter ones.

    Args:
        product: bilinear.
        one, other: tensors of float32.
        axis: of each, the one that is summed over; of a static size.
    """
    size = one.shape[axis[0]]
    length = _length(size)
    if length == size:
        return in_full(product, one, other)
    ends = range(length, size, length)
    lengths = [length] * len(ends) + [size - length * len(ends)]
    parts = zip(tf.split(one, lengths, axis[0]), tf.split(other, lengths, axis[1]), strict=True)
    # XLA would have the sum of a part begin at that of the last one; not beyond another operation.
    return sum(tf.maximum(in_full(product, *part), tf.float32.min) for part in parts)


def in_a_row(size):
    """How many roundings, one after another, a sum of so many products has `in_parts`."""
    length = _length(size)
    return length + -(-size // length)


def _length(size):
    return min(size, max(_PART, -(-size // _PARTS)))


def in_full(product, one, other):
    """`product`, bilinear, of two float32 tensors, as exact as float32 nearly is; of float64 as is.

    Each factor in two parts, a = a₁ + a₂ with |a₂| < 2⁻¹⁰ |a|, of which TF32 takes a₁ as it is.
    What is lost is a₂b₂, and 2⁻¹⁰ of a₁b₂ and of a₂b₁: less than 3 · 2⁻²⁰ of the product.
    """
    if not is_coarse() or one.dtype == tf.float64:
        return product(one, other)
    (a, a_rest), (b, b_rest) = _parts(one), _parts(other)
    return product(a, b) + (product(a, b_rest) + product(a_rest, b))


def _parts(tensor):
    bits = tf.bitcast(tensor, tf.int32)
    kept = tf.bitcast(tf.bitwise.bitwise_and(bits, _KEPT), tf.float32)
    return kept, tensor - kept
