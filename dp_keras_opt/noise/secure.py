"""Noise that withstands attacks on floating-point numbers and on the generator.

Ordinary noise is made of 64 bits by a formula: not every number can come out, and which ones can
be *sums* of a value and such noise tells something about the value (Mironov 2012). And the
generator, Philox, is good for simulations, but is not made against an adversary. Here

- each draw is made of four uniform ones in double precision, so that there are too many ways to a
  number to try them all (Holohan and Braghin 2021, "Secure random sampling in differential
  privacy"); it is added in double precision, and only the result is rounded;
- the bits are those of ChaCha20 (RFC 8439, of the package `cryptography`), keyed by the operating
  system.
"""

import math
import secrets
import threading

import numpy as np
import tensorflow as tf

from dp_keras_opt import replicas
from dp_keras_opt.noise import bits
from dp_keras_opt.noise.entropy import NoiseSource

_REKEY = 2**38 - 2**32  # bytes: beyond 256 GB, the block counter of ChaCha20 would begin anew


class SecureNoiseSource(NoiseSource):
    """A `NoiseSource` for `secure_noise=True`.

    Not covered: what is computed before the noise is added. The clipped sums are rounded to
    float32, and their rounding depends on the data (by about 1e-7 of the clip norm an operation).

    Raises:
        ImportError: the package `cryptography` is missing.
    """

    dtype = tf.float64

    def __init__(self):
        try:
            from cryptography.hazmat.primitives import ciphers
        except ImportError as error:
            raise ImportError(
                "secure_noise=True takes its random bits from the package `cryptography`, which is "
                "not installed: pip install 'dp-keras-opt[secure]'."
            ) from error
        super().__init__()
        self._ciphers = ciphers
        self._renew()

    def __reduce__(self):
        return SecureNoiseSource, ()

    def share(self, strategy):
        if replicas.place(strategy)[1] > 1:
            raise ValueError(
                "secure_noise=True is not for several workers: nothing here makes them draw the "
                "same numbers. Train within one process, or without secure_noise."
            )

    def _renew(self):
        self._lock, self._stream = threading.Lock(), None  # the lock may be held, for ever

    def random_bytes(self, count):
        """Bytes that are never given out twice; a fork of the process has a key of its own."""
        self.renew_after_fork()
        with self._lock:
            if self._stream is None or self._left < count:
                key, nonce = secrets.token_bytes(32), bytes(16)
                algorithm = self._ciphers.algorithms.ChaCha20(key, nonce)
                self._stream = self._ciphers.Cipher(algorithm, mode=None).encryptor()
                self._left = _REKEY
            self._left -= count
            return self._stream.update(bytes(count))

    def _words(self, *shape):
        def draw():
            return np.frombuffer(self.random_bytes(8 * math.prod(shape)), np.int64).reshape(shape)

        # Stateful: the graph may neither merge nor leave out nor repeat calls.
        return tf.ensure_shape(tf.numpy_function(draw, [], tf.int64, stateful=True), shape)

    def normal(self, shape):
        """Fresh standard normals, float64: two by Box and Muller's method, added, over √2."""
        return self._sum_of_two(shape, lambda words: tf.sqrt(bits.exponential(words, self.dtype)))

    def normal_and_rest(self, shape):
        return self.normal(shape), bits.rest(self._words(*shape), self.dtype)

    def laplace(self, shape):
        """Fresh Laplace draws of scale 1, float64.

        With an exponential e and a uniform angle v, e·cos v is half the difference of two squared
        normals; two such make a difference of two exponential draws.
        """
        return self._sum_of_two(shape, lambda words: bits.exponential(words, self.dtype))

    def _sum_of_two(self, shape, radius):
        """Σ r·cos v of two radii and angles, where cancelling leaves neither a 0 nor a grid."""
        words = self._words(5, math.prod(shape))
        cosines, _ = bits.circle(words[2:4], self.dtype)
        total = tf.reduce_sum(radius(words[:2]) * cosines, axis=0)
        # What is less than the two numbers' last digit is not in their sum: it is drawn.
        return tf.reshape(total + 2.0**-53 * bits.rest(words[4], self.dtype), shape)
