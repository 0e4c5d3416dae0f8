"""The noise that reaches the weights: its distribution, its independence, and who may see it.

The optimizer is SGD with learning rate 1 and every example has weight 0, so the update of a step
*is* its noise, which must be N(0, (σ·C/B)²) per coordinate. The noise is unseeded, as in use.
"""

import contextlib
import copy
import io
import pathlib
import pickle
import subprocess
import sys
import warnings
import zipfile

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.clipping import Query
from dp_keras_opt.noise import schedules
from dp_keras_opt.noise.gaussian import NORMAL
from dp_keras_opt.noise.source import NoiseSource
from tests.helpers.normals import assert_exactly, assert_noise

SIGMA, CLIP, BATCH = 1.5, 0.4, 8
STD = SIGMA * CLIP / BATCH  # N(0, (σC)²) on the sum, which is then divided by the expected B
DIM = 20
SAMPLING = dp.accounting.Sampling.poisson(100, BATCH)


def build(units=DIM, optimizer=None, **compiled):
    """A model with two kernels and two biases of equal shapes."""
    inputs = keras.Input((DIM,))
    outputs = keras.layers.Dense(units)(keras.layers.Dense(units, activation="tanh")(inputs))
    model = dp.DPModel(inputs, outputs)
    compiled = {"jit_compile": False} | compiled
    model.compile(optimizer=optimizer or sgd(), loss="mse", **compiled)
    model.sampling = dp.accounting.Sampling.poisson(100, model.optimizer.batch_size)
    return model


def sgd(**changes):
    arguments = {"clip_norm": CLIP, "noise_multiplier": SIGMA, "batch_size": BATCH} | changes
    return dp.optimizers.DPSGD(1.0, **arguments)


def flat(model):
    return np.concatenate([v.numpy().ravel() for v in model.trainable_variables]).astype(np.float64)


def rows(count):
    generator = np.random.default_rng(count)
    return generator.normal(size=(count, DIM)).astype("float32"), np.ones((count, DIM), "float32")


def noise_of_step(model, count=5):
    """The update of one step on `count` examples of weight 0."""
    before = flat(model)
    model.train_on_batch(*rows(count), sample_weight=np.zeros(count, "float32"))
    return before - flat(model)


class Updates(keras.callbacks.Callback):
    """Records the update of every execution of the train function."""

    def on_train_begin(self, logs=None):
        self.weights, self.updates = flat(self.model), []

    def on_train_batch_end(self, batch, logs=None):
        self.updates.append(self.weights - flat(self.model))
        self.weights = flat(self.model)


@contextlib.contextmanager
def precision(policy):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


# --- the test itself can fail


def test_the_test_accepts_normals_and_refuses_what_is_wrong_with_them():
    rng = np.random.default_rng(0)
    good = STD * rng.normal(size=4000)
    assert_exactly(good, STD)
    repeated = good.copy()
    repeated[3000:3420] = repeated[:420]
    wrong = {
        "mean": good + 0.3 * STD,
        "laplace": rng.laplace(scale=STD / np.sqrt(2), size=4000),
        "two draws": good + STD * rng.normal(size=4000),
        "repeated": repeated,
        "opposite": np.concatenate([good[:2000], -good[:2000]]),
    }
    for draws in wrong.values():
        with pytest.raises(AssertionError):
            assert_noise(draws, STD)


# --- a whole step injects one draw of std σ·C/B, however the step is run

MODES = {
    "graph": {},
    "xla": {"jit_compile": True},
    "eager": {"run_eagerly": True},
    "chunks": {"physical_batch_size": 2},
    "chunks xla": {"physical_batch_size": 8, "jit_compile": True},
    "bfloat16": {"policy": "mixed_bfloat16"},
    "float16": {"policy": "mixed_float16", "physical_batch_size": 4},
}


@pytest.mark.representatives(4)
@pytest.mark.parametrize("mode", MODES)
def test_train_on_batch_adds_one_draw_whatever_the_batch_size(mode):
    compiled = dict(MODES[mode])
    with precision(compiled.pop("policy", "float32")):
        model = build(**compiled)
        steps = [noise_of_step(model, count) for count in (1, 13)]
    for step in steps:  # each step on its own: a batch of 13 has no other noise than one of 1
        assert_exactly(step, STD)
    assert_noise(np.concatenate(steps), STD)
    assert model.optimizer.iterations.numpy() == model.ledger.steps == 2


def poisson(count, batch_size, steps, **options):
    x, y = rows(count)
    with pytest.warns(UserWarning, match="seed"):
        return dp.data.poisson_batches(
            (x, y, np.zeros(count, "float32")), batch_size, steps, seed=6, **options
        )


@pytest.mark.representatives(2)
@pytest.mark.parametrize("mode", ["graph", "eager", "steps_per_execution xla", "float16"])
def test_fit_on_poisson_batches_adds_one_draw_to_each_step(mode):
    """Empty draws, padding, and draws of several physical blocks among them."""
    steps, block = 6, 2
    twin = poisson(20, 2, steps, physical_batch_size=block)
    for _ in range(3):  # whichever iteration Keras takes: it abandons some
        sizes = [int(r.mask.numpy().sum()) for _, _, r in twin]
        assert min(sizes) == 0 and max(sizes) > block and any(size % block for size in sizes)
    compiled = {"jit_compile": "xla" in mode, "run_eagerly": mode == "eager"}
    together = 3 if "steps_per_execution" in mode else 1
    recorded = Updates()
    with precision("mixed_float16" if mode == "float16" else "float32"):
        model = build(optimizer=sgd(batch_size=2), steps_per_execution=together, **compiled)
        data = poisson(20, 2, steps, physical_batch_size=block)
        model.fit(data, epochs=1, verbose=0, callbacks=[recorded])
    std = SIGMA * CLIP / 2 * np.sqrt(together)
    assert len(recorded.updates) == steps // together
    for update in recorded.updates:
        assert_noise(update, std)
    assert_exactly(np.concatenate(recorded.updates), std)
    assert model.optimizer.iterations.numpy() == model.ledger.steps == steps


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_a_batch_without_rows_takes_a_step_of_noise(jit_compile):
    assert_exactly(noise_of_step(build(jit_compile=jit_compile), 0), STD)


@pytest.mark.parametrize("normalize", [False, True], ids=["clip", "normalize"])
def test_noise_does_not_depend_on_the_gradients(normalize):
    """Two models with equal weights and data differ by two draws: the variance is doubled."""
    models = [build(optimizer=sgd(normalize=normalize)) for _ in range(2)]
    models[1].set_weights(models[0].get_weights())
    for model in models:
        model.train_on_batch(*rows(11))
    assert_exactly(flat(models[0]) - flat(models[1]), STD * np.sqrt(2))


@pytest.mark.parametrize("count, chunk", [(0, None), (1, 2), (13, None), (13, 2)])
def test_the_divisor_is_the_expected_batch_size(count, chunk):
    """Example i pushes only bias i, by C: whatever `count`, that is C/B of the update."""
    inputs = keras.Input((1,))
    model = dp.DPModel(inputs, keras.layers.Dense(13)(inputs))
    model.compile(optimizer=sgd(noise_multiplier=0.0), loss="mse", physical_batch_size=chunk)
    model.sampling = SAMPLING
    model.set_weights([np.zeros((1, 13)), np.zeros(13)])
    before = model.layers[-1].bias.numpy()
    target = 1000 * np.eye(13, dtype="float32")[:count]
    model.train_on_batch(np.zeros((count, 1), "float32"), target)
    expected = np.where(np.arange(13) < count, CLIP / BATCH, 0)
    np.testing.assert_allclose(model.layers[-1].bias.numpy() - before, expected, rtol=1e-5)


@pytest.mark.parametrize("clip_norm", [CLIP, np.inf])
def test_multiplier_zero_adds_exactly_nothing(clip_norm):
    model = build(optimizer=sgd(noise_multiplier=0.0, clip_norm=clip_norm))
    for count in (0, 3):
        assert (noise_of_step(model, count) == 0).all()
    model.train_on_batch(*rows(3))
    assert np.isfinite(flat(model)).all()


# --- independence


def test_optimizers_and_fits_never_share_noise():
    """Under equal global seeds, too."""
    draws = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        model = build()
        for _ in range(2):
            recorded = Updates()
            model.fit(poisson(20, BATCH, 2), verbose=0, callbacks=[recorded])
            assert len(recorded.updates) == 2
            draws += recorded.updates
    assert_noise(np.concatenate(draws), STD)


def test_recompiling_and_tracing_anew_repeat_no_noise():
    model = build()
    draws = [noise_of_step(model)]
    for compiled in ({}, {"jit_compile": True}, {"run_eagerly": True}):
        model.compile(optimizer=model.optimizer, loss="mse", **compiled)
        model.sampling = SAMPLING
        draws.append(noise_of_step(model))
    assert_noise(np.concatenate(draws), STD)


def copies(optimizer):
    yield copy.deepcopy(optimizer)
    yield pickle.loads(pickle.dumps(optimizer))
    yield type(optimizer).from_config(optimizer.get_config())
    yield keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))


def test_copies_of_an_optimizer_have_noise_of_their_own():
    original = sgd()
    sources = [o.noise_source for o in (original, *copies(original))]
    assert_noise(np.concatenate([s.draw(NORMAL, (2000,)).numpy() for s in sources]), 1.0)


# --- schedules

ALPHAS = [1.0, 4.0, 0.25, 2.0]


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
def test_schedule_scales_each_step_and_ends(jit_compile):
    model = build(optimizer=sgd(noise_schedule=ALPHAS), jit_compile=jit_compile)
    for alpha in ALPHAS:
        assert_exactly(noise_of_step(model), STD * alpha)
    before = flat(model)
    with pytest.raises(ValueError, match="schedule"):
        noise_of_step(model)
    with pytest.raises(ValueError, match="schedule"):
        model.fit(*rows(16), batch_size=BATCH, verbose=0)
    np.testing.assert_array_equal(flat(model), before)
    assert model.ledger.steps == len(ALPHAS)


def test_schedule_under_steps_per_execution_and_around_another_optimizer():
    optimizer = dp.optimizers.DPOptimizer(
        keras.optimizers.SGD(1.0), clip_norm=CLIP, noise_multiplier=SIGMA, batch_size=2,
        noise_schedule=ALPHAS,
    )  # fmt: skip
    model, recorded = build(optimizer=optimizer, steps_per_execution=2), Updates()
    model.fit(poisson(20, 2, 4), verbose=0, callbacks=[recorded])
    for update, pair in zip(recorded.updates, (ALPHAS[:2], ALPHAS[2:]), strict=True):
        assert_exactly(update, SIGMA * CLIP / 2 * np.sqrt(np.sum(np.square(pair))))


def test_schedule_goes_on_after_a_restart(tmp_path):
    model = build(optimizer=sgd(noise_schedule=ALPHAS))
    for _ in range(2):
        noise_of_step(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.sampling = SAMPLING
    for alpha in ALPHAS[2:]:
        assert_exactly(noise_of_step(loaded), STD * alpha)
    with pytest.raises(ValueError, match="schedule"):
        noise_of_step(loaded)


def test_schedule_is_the_same_for_graph_and_accountant():
    schedule = schedules.Fixed(ALPHAS)
    np.testing.assert_array_equal(schedule.alphas(1, 3), ALPHAS[1:])
    np.testing.assert_array_equal([float(schedule.alpha(t)) for t in range(4)], ALPHAS)
    np.testing.assert_array_equal(schedules.Constant().alphas(7, 3), np.ones(3))
    assert schedules.Constant().alpha(7) == 1.0
    with pytest.raises(ValueError, match="ends after 4 steps"):
        schedule.alphas(2, 3)


def test_schedule_is_fixed_in_advance():
    """Also where the caller goes on to write to the array that it was made of."""
    values = np.ones(3, np.float32)
    schedule = schedules.Fixed(values)
    values[:] = 0
    np.testing.assert_array_equal(schedule.alphas(0, 3), np.ones(3))


def test_bad_schedules_are_refused():
    for values in [[], [[1.0]], [1.0, 0.0], [-1.0], [np.nan], [np.inf], [1e-60]]:
        with pytest.raises(ValueError, match="schedule"):
            schedules.Fixed(values)


def test_schedules_resolve_and_serialise():
    assert isinstance(schedules.get(None), schedules.Constant)
    for schedule in (schedules.Constant(), schedules.Fixed(ALPHAS)):
        assert schedules.get(schedule) is schedule
        again = schedules.get(keras.saving.serialize_keras_object(schedule))
        assert type(again) is type(schedule)
        np.testing.assert_array_equal(again.alphas(0, 4), schedule.alphas(0, 4))
    for values in (ALPHAS, tuple(ALPHAS), np.array(ALPHAS)):
        np.testing.assert_array_equal(schedules.get(values).alphas(0, 4), ALPHAS)
    for wrong in ("constant", 1.0, True, sum):
        with pytest.raises(ValueError, match="noise_schedule"):
            schedules.get(wrong)


# --- mechanisms and the barrier


def release(releases, queries, sums, alpha=1.0, source=None):
    return dp.noise.release(
        releases, queries, sums, batch_size=BATCH, alpha=alpha,
        source=source or NoiseSource(),
    )  # fmt: skip


def test_release_adds_noise_of_the_std_that_it_reports():
    queries = (Query(clip_norm=CLIP), Query(clip_norm=3.0))
    sums = [[np.arange(q + 2000.0), np.full((3, 700), 7.0)] for q in (0, 1)]
    gaussian = dp.noise.Gaussian()
    parts = [(0, SIGMA, CLIP), (1, 0.5, 3.0), (0, 2.0, CLIP)]  # query 0 answered twice
    releases = tuple(dp.noise.Release(q, "mean", sigma, gaussian) for q, sigma, _ in parts)
    tensors = [[tf.constant(s, tf.float32) for s in part] for part in sums]
    answers = release(releases, queries, tensors, alpha=0.5)
    scaled = []
    for answer, (query, sigma, clip_norm) in zip(answers, parts, strict=True):
        std = sigma * 0.5 * clip_norm / BATCH
        np.testing.assert_allclose(float(answer.noise_std), std, rtol=1e-6)
        parts = zip(answer.value, sums[query], strict=True)
        draws = [(a.numpy().astype(np.float64) - s / BATCH).ravel() for a, s in parts]
        assert_exactly(np.concatenate(draws), std)
        scaled += [draw / std for draw in draws]
    assert_noise(np.concatenate(scaled), 1.0)


@pytest.mark.parametrize("clip_norm", [CLIP, np.inf])
def test_release_without_noise_is_the_sum_over_the_batch_size(clip_norm):
    part = dp.noise.Release(0, "mean", 0.0, dp.noise.Gaussian())
    (answer,) = release((part,), (Query(clip_norm=clip_norm),), [[tf.constant([1.0, -2.0])]])
    np.testing.assert_array_equal(answer.value[0], np.float32([1, -2]) / BATCH)
    assert answer.noise_std == 0


class OtherNorm(dp.noise.Gaussian):
    """A mechanism whose event holds for sums that are clipped in another norm."""

    norm = "l1"


def test_release_refuses_a_sum_that_is_clipped_in_another_norm():
    """Clipped to C in L2, its L1 sensitivity is up to √d times the C that the event assumes."""
    part = dp.noise.Release(0, "mean", 1.0, OtherNorm())
    with pytest.raises(ValueError, match="norm"):
        release((part,), (Query(norm="l2"),), [[tf.zeros(3)]])


def test_gaussian_draws_what_its_event_says():
    import dp_accounting

    gaussian = dp.noise.Gaussian()
    event = gaussian.event(SIGMA)
    assert isinstance(event, dp_accounting.GaussianDpEvent) and event.noise_multiplier == SIGMA
    assert gaussian.norm == "l2" and gaussian.std(5) == 1.0
    draws = gaussian.unit_noise([(3, 500), (), (1500,)], NoiseSource())
    assert [d.shape.as_list() for d in draws] == [[3, 500], [], [1500]]
    assert all(d.dtype == tf.float32 for d in draws)
    assert_exactly(np.concatenate([d.numpy().ravel() for d in draws]), 1.0)


def test_mechanisms_resolve_and_serialise():
    gaussian = dp.noise.get("Gaussian")
    assert gaussian == dp.noise.get("gaussian") == dp.noise.Gaussian.from_config({})
    assert dp.noise.get(gaussian) is gaussian
    assert dp.noise.get(keras.saving.serialize_keras_object(gaussian)) == gaussian
    assert hash(gaussian) == hash(dp.noise.Gaussian()) and gaussian != "gaussian"
    optimizer = keras.saving.serialize_keras_object(sgd())
    for wrong in ("gauss", None, 1.0, dp.noise.Gaussian, optimizer):
        with pytest.raises(ValueError, match="noise"):
            dp.noise.get(wrong)


# --- the source: never saved, never repeated


def state(source):
    return source._generator.state.numpy()


def test_seed_reproduces_with_a_warning():
    with pytest.warns(UserWarning, match="no privacy guarantee"):
        sources = [NoiseSource(seed) for seed in (5, 5, 6)]
    first, same, other = (np.stack([s.draw(NORMAL, (900,)).numpy() for _ in "ab"]) for s in sources)
    np.testing.assert_array_equal(first, same)
    assert_noise(np.concatenate([first, other]), 1.0)


def test_without_a_seed_all_192_bits_are_fresh_and_no_warning_is_given():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        states = []
        for _ in range(20):
            keras.utils.set_random_seed(1)
            states.append(state(NoiseSource()))
    states = np.array(states)
    assert states.dtype == np.int64 and states.shape == (20, 3)
    assert all(len(set(column)) == 20 for column in states.T)
    assert (np.bitwise_or.reduce(states) == -1).all()  # each bit was 1 once, and 0 once
    assert (np.bitwise_and.reduce(states) == 0).all()


def test_no_file_holds_the_state_of_the_noise(tmp_path):
    model = build()
    noise_of_step(model)
    secret = state(model.optimizer.noise_source)
    model.save(tmp_path / "model.keras")
    arrays = []

    def collect(name, item):
        if isinstance(item, h5py.Dataset):
            arrays.append(np.asarray(item))

    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        text = archive.read("config.json").decode()
        with h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as weights:
            weights.visititems(collect)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    reader = tf.train.load_checkpoint(checkpoint.write(str(tmp_path / "ckpt")))
    arrays += [np.asarray(reader.get_tensor(n)) for n in reader.get_variable_to_shape_map()
               if n != "_CHECKPOINTABLE_OBJECT_GRAPH"]  # fmt: skip
    assert len(arrays) > 8
    for array in arrays:  # privacy_ledger, a text as bytes, cannot hold these numbers either
        assert not np.isin(secret, array).any()
        assert array.dtype != np.int64 or array.size == 1
    assert not any(str(number) in text for number in secret)
    assert not any(v.shape == (3,) for v in model.optimizer.variables)


def test_a_restored_run_goes_on_with_fresh_noise(tmp_path):
    model = build()
    draws = [noise_of_step(model)]
    model.save(tmp_path / "model.keras")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    saved = checkpoint.write(str(tmp_path / "ckpt"))
    draws.append(noise_of_step(model))
    checkpoint.restore(saved)  # the same step again, in this process
    draws.append(noise_of_step(model))
    for _ in range(2):  # two runs that go on from the same file
        resumed = keras.models.load_model(tmp_path / "model.keras")
        assert resumed.optimizer.iterations.numpy() == 1
        resumed.sampling = SAMPLING
        draws.append(noise_of_step(resumed))
    assert_noise(np.concatenate(draws), STD)


def test_another_process_with_equal_seeds_draws_other_noise():
    code = (
        "import keras, numpy as np; keras.utils.set_random_seed(1)\n"
        "from dp_keras_opt.noise.gaussian import NORMAL\n"
        "from dp_keras_opt.noise.source import NoiseSource\n"
        "print('DRAWS', *NoiseSource().draw(NORMAL, (1000,)).numpy())"
    )
    root = pathlib.Path(dp.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    line = next(line for line in result.stdout.splitlines() if line.startswith("DRAWS"))
    keras.utils.set_random_seed(1)
    here = NoiseSource().draw(NORMAL, (1000,)).numpy()
    assert_noise(np.concatenate([here, np.array(line.split()[1:], float)]), 1.0)


# The geometry of an answer.


class _OnesNoise(dp.noise.Gaussian):
    """Each unit draw is 1."""

    def unit_noise(self, shapes, source, stream=0):
        return [tf.ones(shape) for shape in shapes]


@pytest.mark.parametrize("multiplier", [0.0, 2.0])
def test_an_answer_knows_the_geometry_that_it_was_asked_in(multiplier):
    """(Σ s·g + σ·C·z)/B in the geometry s; over s in the coordinates of the gradient."""
    scale, total = [np.array([0.5, 4.0])], [np.array([3.0, 8.0])]
    query = Query([tf.constant(s, tf.float32) for s in scale], clip_norm=0.5)
    part = dp.noise.Release(0, "mean", multiplier, _OnesNoise())
    (answer,) = dp.noise.release(
        (part,), (query,), [[tf.constant(t, tf.float32) for t in total]],
        batch_size=4, alpha=1.5, source=None,
    )  # fmt: skip
    noise = multiplier * 1.5 * 0.5 / 4
    np.testing.assert_allclose(answer.value[0], total[0] / 4 + noise)
    np.testing.assert_allclose(answer.noise_std, noise)
    plain = answer.unscaled()
    np.testing.assert_allclose(plain.value[0], (total[0] / 4 + noise) / scale[0])
    np.testing.assert_allclose(plain.noise_std[0], noise / scale[0])
    assert plain.scale is None and plain.unscaled() is plain


def test_squares_are_in_the_geometry_of_the_square():
    """Of each example: Σ (s·g)², which is over s² in the coordinates of the gradient."""
    scale = tf.constant([0.5, 4.0])
    query = Query([scale], clip_norm=1.0, square=True)
    part = dp.noise.Release(0, "mean", 0.0, dp.noise.Gaussian())
    (answer,) = dp.noise.release(
        (part,), (query,), [[tf.constant([1.0, 16.0])]], batch_size=1, alpha=1.0, source=None
    )
    np.testing.assert_allclose(answer.unscaled().value[0], [4.0, 1.0])
    both = dp.noise.Released([tf.ones(2)], 1.0, [tf.ones(2)], [scale]).unscaled()
    np.testing.assert_allclose(both.square[0], [4.0, 1 / 16])
    np.testing.assert_allclose(both.value[0], [2.0, 0.25])


# Mechanisms by name.


@pytest.mark.parametrize("name", ["correlated", "gauss", "jointmoments", "bandedmatrix"])
def test_only_real_names_of_noise_are_taken(name):
    """Those of classes that take arguments, or that none can be made of, are no names."""
    names = r"\['gaussian', 'laplace', 'planned'\]"
    with pytest.raises(ValueError, match=f"use one of {names}, or .*Banded"):
        dp.optimizers.DPSGD(0.1, clip_norm=1.0, batch_size=8, noise_multiplier=1.0, noise=name)


def test_noise_by_name_by_object_and_by_configuration():
    mechanism = dp.noise.BandedMatrix(8, bands=2)
    assert dp.noise.get(mechanism) is mechanism
    assert dp.noise.get(keras.saving.serialize_keras_object(mechanism)) == mechanism
    assert dp.noise.get("Laplace") == dp.noise.Laplace()
    for wrong in (None, 1.0, dp.noise.Gaussian):
        with pytest.raises(ValueError, match="is not known; use"):
            dp.noise.get(wrong)
