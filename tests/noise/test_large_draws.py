"""Noise of large variables is drawn in blocks: each is fresh, and all are what they should be."""

import numpy as np
import pytest
import tensorflow as tf

from dp_keras_opt.noise import distribution, host
from dp_keras_opt.noise.gaussian import NORMAL
from dp_keras_opt.noise.secure import SecureNoiseSource
from dp_keras_opt.noise.source import NoiseSource
from tests.noise.test_near_zero import HostSource

BLOCK = 2**12


@pytest.mark.parametrize("compiled", [None, False, True], ids=["eager", "graph", "xla"])
@pytest.mark.parametrize("make", [NoiseSource, HostSource, SecureNoiseSource])
def test_no_block_is_drawn_twice(make, compiled, monkeypatch):
    if make is SecureNoiseSource:
        pytest.importorskip("cryptography")
    if make is not NoiseSource and compiled:
        pytest.skip("what NumPy draws is not compiled")
    monkeypatch.setattr(host, "_BLOCK", BLOCK)
    monkeypatch.setattr(distribution, "_AT_ONCE", BLOCK)
    source, shapes = make(), [(3, 5), (7, BLOCK, 1), (2 * BLOCK + 1,), (BLOCK,)]

    def draw():
        return distribution.drawn(source, NORMAL, shapes)

    if compiled is not None:
        draw = tf.function(draw, jit_compile=compiled)
    drawn = [value for _ in range(2) for value in draw()]
    assert [value.shape for value in drawn] == 2 * shapes
    numbers = np.concatenate([np.ravel(value) for value in drawn]).astype("float64")
    # Float32 normals: two of 80,000 are the same now and then, and not a block of them.
    assert len(np.unique(numbers)) > 0.99 * len(numbers)
    blocks = numbers[: BLOCK * (len(numbers) // BLOCK)].reshape(-1, BLOCK)
    correlations = np.corrcoef(blocks) - np.eye(len(blocks))
    assert np.abs(correlations).max() < 6.5 / BLOCK**0.5  # false alarm below 1e-7
    # Std 1 within 5.5 standard errors: false alarm below 1e-7, and far from ⅔ and 1.5.
    assert abs(numbers.std() - 1) < 5.5 / (2 * len(numbers)) ** 0.5
    assert abs(numbers.mean()) < 5.5 / len(numbers) ** 0.5


def test_blocks_of_the_usual_size():
    (drawn,) = distribution.drawn(NoiseSource(), NORMAL, [(3, 2**20 - 7)])
    numbers = drawn.numpy().astype("float64")
    assert abs(numbers.std() - 1) < 5.5 / (2 * numbers.size) ** 0.5
    assert len(np.unique(numbers[:, :1000])) > 2990
