"""Noise that withstands attacks on floating-point numbers and on the generator.

Ordinary noise is made of 64 bits by a formula: not every number can come out, and which ones can
be *sums* of a value and such noise tells something about the value. And the generator, Philox, is
good for simulations, but is not made against an adversary. Here

- each draw is made of four uniform ones in double precision, so that there are too many ways to a
  number to try them all; it is added in double precision, and only the result is rounded;
- the bits are those of ChaCha20 (RFC 8439, of the package `cryptography`), keyed by the operating
  system.

References: Mironov, "On significance of the least significant bits for differential privacy", CCS
2012, doi:10.1145/2382196.2382264 (the attack); Holohan and Braghin, "Secure random sampling in
differential privacy", ESORICS 2021, arXiv:2107.10138 (the draws).
"""

import math
import secrets
import threading

import numpy as np
import tensorflow as tf

from dp_keras_opt import workers
from dp_keras_opt.noise.source import NoiseSource

_REKEY = 2**38 - 2**32  # bytes: beyond 256 GB, the block counter of ChaCha20 would begin anew


class SecureNoiseSource(NoiseSource):
    """A `NoiseSource` for `secure_noise=True`.

    Not covered: what is computed before the noise is added. The clipped sums are rounded to
    float32, and their rounding depends on the data (by about 1e-7 of the clip norm an operation).

    Raises:
        ImportError: the package `cryptography` is missing.
    """

    dtype = tf.float64
    can_repeat = False  # ChaCha20 goes on and never back

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
        if workers.place(strategy)[1] > 1:
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

    def words(self, *shape):
        def given():
            return np.frombuffer(self.random_bytes(8 * math.prod(shape)), np.int64).reshape(shape)

        # Stateful: the graph may neither merge nor leave out nor repeat calls.
        return tf.ensure_shape(tf.numpy_function(given, [], tf.int64, stateful=True), shape)

    def draw(self, distribution, shape):
        return distribution.secure(self, shape)
