"""Noise against attacks on floating-point numbers and on the generator."""

import os
import secrets
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from cryptography.hazmat.primitives import ciphers
from scipy import stats

import dp_keras_opt as dp
from dp_keras_opt import noise
from dp_keras_opt.noise import host, secure
from dp_keras_opt.noise.gaussian import NORMAL
from dp_keras_opt.noise.laplace import LAPLACE
from dp_keras_opt.noise.release import _noisy
from dp_keras_opt.noise.secure import SecureNoiseSource
from dp_keras_opt.optimizers import DPSGD, DPAdam


def compiled(width=4, optimizer=None, **kwargs):
    inputs = keras.Input((width,))
    model = dp.DPModel(inputs, keras.layers.Dense(1, use_bias=False)(inputs))
    if optimizer is None:
        optimizer = DPSGD(
            0.1, clip_norm=0.5, batch_size=8, noise_multiplier=2.0, secure_noise=True, **kwargs
        )
    model.compile(optimizer, "mse")
    return model


@pytest.mark.parametrize(
    ("distribution", "norm"),
    [(NORMAL, stats.norm), (LAPLACE, stats.laplace)],
    ids=["normal", "laplace"],
)
def test_distributions(distribution, norm):
    """A false alarm in one of 10,000 runs, for the fit as for each moment (5 standard errors)."""
    source = SecureNoiseSource()
    draws = source.draw(distribution, (200_000,)).numpy()
    assert draws.dtype == np.float64
    assert stats.kstest(draws, norm.cdf).pvalue > 1e-4
    for moment in (1, 2, 3, 4):
        error = np.sqrt(norm.moment(2 * moment) / len(draws))
        assert abs(np.mean(draws**moment) - norm.moment(moment)) < 5 * error
    halves = draws[:100_000], draws[100_000:]
    assert abs(np.corrcoef(*halves)[0, 1]) < 5 / np.sqrt(100_000)


def test_the_bits_are_those_of_aes_in_counter_mode(monkeypatch):
    monkeypatch.setattr(secure.secrets, "token_bytes", lambda count: bytes(range(count)))
    words = SecureNoiseSource().words(3, 5)
    assert words.shape == (3, 5) and words.dtype == np.int64
    block = ciphers.Cipher(ciphers.algorithms.AES(bytes(range(32))), ciphers.modes.ECB())
    counters = b"".join(number.to_bytes(16, "big") for number in range(8))
    assert words.tobytes() == block.encryptor().update(counters)[:120]


def test_every_call_has_a_key_of_its_own(monkeypatch):
    keys, drawn = [], secrets.token_bytes
    monkeypatch.setattr(secure.secrets, "token_bytes", lambda n: keys.append(drawn(n)) or keys[-1])
    source = SecureNoiseSource()
    keys.clear()
    monkeypatch.setattr(host, "_BLOCK", 2**10)
    source.draw(NORMAL, (2**12,))
    assert len(set(keys)) == len(keys) >= 4 and {len(key) for key in keys} == {32}


def test_a_fork_has_bits_of_its_own():
    source = SecureNoiseSource()
    source.words(1)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, source.words(2).tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 16) != source.words(2).tobytes()


def test_no_call_is_merged_left_out_or_repeated():
    source = SecureNoiseSource()

    @tf.function
    def draws():
        return tf.stack([source.draw(NORMAL, (3,)) for _ in range(4)])

    seen = np.concatenate([draws().numpy().ravel() for _ in range(3)])
    assert len(set(seen)) == 36


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_the_noise_that_is_released_has_the_scale_that_is_accounted(mechanism, steps_per_execution):
    """4 × 3000 draws: 5 standard errors of the std are 3.3%, or 7.3% of Laplace noise."""
    model = compiled(3000, noise=mechanism)
    model.compile(model.optimizer, "mse", steps_per_execution=steps_per_execution)
    released = []
    model.observe_releases(
        lambda queries, parts: tf.py_function(
            lambda v: released.append(v.numpy()), [parts[0].value[0]], []
        )
    )
    data = np.zeros((8, 3000), "float32"), np.zeros((8, 1), "float32")
    data = tf.data.Dataset.from_tensors(data).repeat(4)
    model.fit(dp.data.assume_sampling(data, dp.accounting.Sampling.full(8)), verbose=0)
    drawn = np.array(released)
    assert drawn.shape == (4, 3000, 1) and drawn.dtype == np.float32
    expected = 2.0 * 0.5 / 8 * (np.sqrt(2) if mechanism == "laplace" else 1)
    tolerance = 0.075 if mechanism == "laplace" else 0.034
    assert abs(drawn.std() / expected - 1) < tolerance
    for factor in (2 / 3, 1.5):
        assert abs(drawn.std() / (factor * expected) - 1) > tolerance
    assert len(np.unique(drawn)) > 0.99 * drawn.size


def test_it_is_added_before_rounding():
    """Of a value and noise, float32 holds the rounded sum, not a sum of rounded numbers."""
    values, draws = [tf.constant([1 / 3], tf.float32)], [tf.constant([1e-9 / 3], tf.float64)]
    (noisy,) = _noisy(values, 3e8, draws, 7.0)
    expected = (np.float64(np.float32(1 / 3)) + 3e8 * (1e-9 / 3)) / 7.0
    assert noisy.numpy()[0] == np.float32(expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda **kw: DPAdam(second_moment="scale_then_privatize", epsilon=1e-3, **kw),
        lambda **kw: DPAdam(
            second_moment=dp.optimizers.moments.Independent(8, "add_or_remove_one"), **kw
        ),
        lambda **kw: DPSGD(0.1, noise=noise.BandedMatrix(12, 1), **kw),
        lambda **kw: dp.optimizers.DPOptimizer(keras.optimizers.Lion(0.01), **kw),
    ],
)
def test_trains_with_every_kind_of_release(make, tmp_path):
    optimizer = make(clip_norm=0.5, batch_size=8, noise_multiplier=2.0, secure_noise=True)
    model = compiled(4, optimizer)
    data = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    data = dp.data.assume_sampling(
        tf.data.Dataset.from_tensors(data).repeat(3), dp.accounting.Sampling.full(8)
    )
    model.fit(data, verbose=0)
    assert np.isfinite(model.get_weights()[0]).all() and model.ledger.steps == 3
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.secure_noise and not loaded.jit_compile
    loaded.fit(data, verbose=0)


def test_correlated_noise_is_mixed_in_double_precision():
    mechanism, source = noise.BandedMatrix(6, 3), SecureNoiseSource()
    source.memory.allocate(0, mechanism.buffers(5, source))
    draws = [mechanism.unit_noise([(5,)], source)[0] for _ in range(4)]
    assert all(draw.dtype == tf.float64 for draw in draws)


def test_refuses_what_would_undo_it():
    with pytest.raises(ValueError, match="contradict"):
        compiled(seed=1)
    model = compiled()
    with pytest.raises(ValueError, match="XLA"):
        model.compile(model.optimizer, "mse", jit_compile=True)
    with pytest.raises(ValueError, match="fixed when the optimizer is made"):
        model.optimizer.secure_noise = False
    with pytest.raises(ValueError, match="True or False"):
        DPSGD(0.1, clip_norm=1.0, batch_size=8, secure_noise=1)


def test_says_what_to_install():
    script = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from dp_keras_opt.noise.secure import SecureNoiseSource\n"
        "SecureNoiseSource()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert "pip install 'dp-keras-opt[secure]'" in done.stderr
