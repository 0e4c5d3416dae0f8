"""How exactly float32 numbers are multiplied, on which the bound of a contribution rests.

GPUs from Ampere on take the factors of a matrix product as TF32 by default: of the 23 bits of a
mantissa 10 remain, so that a factor loses up to 2⁻¹⁰ of itself, and a product up to 2⁻⁹. What an
example contributes is

    w · Σ_t a_t ⊗ b_t,    w ≤ C / ‖Σ_t a_t ⊗ b_t‖,

off by ρ · w · Σ_t ‖a_t‖ ‖b_t‖ at most, where ρ is `rounding`. Three things keep it within C:

- The norm that w is found from is raised by ρ Σ_t ‖a_t‖ ‖b_t‖ (`factors`), and by ρ of itself for
  the product with w (`clip_factor`).
- The norm is computed `in_full`, from factors in two parts that TF32 holds: a squared norm from
  products would otherwise be off by ρ (Σ_t ‖a_t‖ ‖b_t‖)², and the norm by the root of that.
- Nothing may round more: `tensorflow_settings` refuses it.

Half precision needs no more. A norm and a sum are taken of the same recorded numbers, which float32
holds as they are; how these were computed does not matter to the bound.
"""

import tensorflow as tf

#: What a product of two factors in TF32 loses of itself, at most.
_TF32 = 2.0**-9

#: What a product in two parts loses: three terms of 2⁻²⁰ each (see `in_full`).
_IN_PARTS = 2.0**-18

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
        terms: how many products, a number or a scalar tensor. One after another they could lose up
            to half a bit each, but no kernel keeps a single sum for long.
        full: whether of products `in_full`.
    """
    one = 2.0**-21
    if is_coarse():
        one = _IN_PARTS if full else _TF32 + _IN_PARTS
    return one + 2.0**-27 * (tf.cast(terms, tf.float32) if tf.is_tensor(terms) else terms)


def in_full(product, one, other):
    """`product`, bilinear, of two float32 tensors, as exact as float32 nearly is.

    Each factor in two parts, a = a₁ + a₂ with |a₂| < 2⁻¹⁰ |a|, of which TF32 takes a₁ as it is.
    What is lost is a₂b₂, and 2⁻¹⁰ of a₁b₂ and of a₂b₁: less than 3 · 2⁻²⁰ of the product.
    """
    if not is_coarse():
        return product(one, other)
    (a, a_rest), (b, b_rest) = _parts(one), _parts(other)
    return product(a, b) + (product(a, b_rest) + product(a_rest, b))


def _parts(tensor):
    bits = tf.bitcast(tensor, tf.int32)
    kept = tf.bitcast(tf.bitwise.bitwise_and(bits, _KEPT), tf.float32)
    return kept, tensor - kept
