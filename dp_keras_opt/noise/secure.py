"""Noise that withstands attacks on floating-point numbers and on the generator.

Ordinary noise is made of 64 bits by a formula: not every number can come out, and which ones can
be *sums* of a value and such noise tells something about the value. And the generator, Philox, is
good for simulations, but is not made against an adversary. Here

- each draw is made of four uniform ones in double precision, so that there are too many ways to a
  number to try them all; it is added in double precision, and only the result is rounded;
- the bits are those of AES-256 in counter mode (NIST SP 800-38A, of the package `cryptography`);
  each block of them has a key of its own from the operating system, so that there is no state to
  be copied, forked or used up.

References: Mironov, "On significance of the least significant bits for differential privacy", CCS
2012, doi:10.1145/2382196.2382264 (the attack); Holohan and Braghin, "Secure random sampling in
differential privacy", ESORICS 2021, arXiv:2107.10138 (the draws).
"""

import math
import secrets

import numpy as np
import tensorflow as tf

from dp_keras_opt import workers
from dp_keras_opt.noise import host
from dp_keras_opt.noise.source import NoiseSource


class SecureNoiseSource(NoiseSource):
    """A `NoiseSource` for `secure_noise=True`.

    Not covered: what is computed before the noise is added. The clipped sums are rounded to
    float32, and their rounding depends on the data (by about 1e-7 of the clip norm an operation).

    Raises:
        ImportError: the package `cryptography` is missing.
    """

    dtype = tf.float64
    can_repeat = False  # a key is used once and forgotten
    on_host = True

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

    def __reduce__(self):
        return SecureNoiseSource, ()

    def share(self, strategy):
        if workers.place(strategy)[1] > 1:
            raise ValueError(
                "secure_noise=True is not for several workers: nothing here makes them draw the "
                "same numbers. Train within one process, or without secure_noise."
            )

    def settle(self, strategy, compiled):
        """Nothing: these draws are made by NumPy everywhere."""

    def words(self, *shape):
        """Fresh random words, a NumPy array of int64, from a key that is used for nothing else."""
        algorithms, modes = self._ciphers.algorithms, self._ciphers.modes
        cipher = self._ciphers.Cipher(algorithms.AES(secrets.token_bytes(32)), modes.CTR(bytes(16)))
        drawn = cipher.encryptor().update(bytes(8 * math.prod(shape)))
        return np.frombuffer(drawn, np.int64).reshape(shape)

    def draw(self, distribution, shape):
        """Fresh draws from a `Distribution`, float64, of the given static shape."""
        number = distribution.number
        return host.tensors(distribution.secure, shape, number, self.dtype, lambda _: self.words)
