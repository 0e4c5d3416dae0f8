"""GaLore: the projection, against NumPy's SVD and a float64 transcription."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import signal

import dp_keras_opt as dp
from dp_keras_opt import filters
from dp_keras_opt.noise.release import Released
from dp_keras_opt.optimizers import DPSGD, DPAdagrad, DPAdam, DPGaLore, DPRMSprop, DPYogi, GaLore
from dp_keras_opt.optimizers.projection import leading_directions

PRIVATE = {"clip_norm": 1.0, "noise_multiplier": 1.0, "batch_size": 10}
SHAPES = [(8, 6), (5, 9), (7,), (2, 3, 2, 5)]
RULES = [DPAdam, DPRMSprop, DPAdagrad, DPYogi, DPSGD]


def gradients(steps, seed=0):
    rng = np.random.default_rng(seed)
    return [[rng.normal(size=shape).astype("float32") for shape in SHAPES] for _ in range(steps)]


def drive(optimizer, steps, bases=None, jit_compile=False, noise_std=0.1):
    """The weights after privatized gradients of several steps; collects the projectors."""
    variables = [keras.Variable(np.ones(shape, "float32")) for shape in SHAPES]
    optimizer.build(variables)

    @tf.function(autograph=False, jit_compile=jit_compile)
    def step(*values):
        optimizer.update([Released(list(values), tf.constant(noise_std))])

    for values in steps:
        step(*map(tf.constant, values))
        if bases is not None:
            kept = optimizer.projection._bases
            bases.append([None if b is None else b.numpy().astype(np.float64) for b in kept])
    return [v.numpy().astype(np.float64) for v in variables]


def as_matrix(tensor):
    """(prod of the others, last axis), the shorter side first."""
    matrix = np.reshape(tensor, (-1, tensor.shape[-1]))
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix


def as_variable(matrix, shape):
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    return np.reshape(matrix.T if rows > columns else matrix, shape)


def transcription(steps, bases, rank, scale, rate, low_pass=None, reset_every=None, correct=None):
    """DP-Adam in the subspaces of the given projectors, in float64."""
    weights = [np.ones(shape) for shape in SHAPES]
    projected = [len(shape) >= 2 and min(as_matrix(np.ones(shape)).shape) > rank
                 for shape in SHAPES]  # fmt: skip
    m, v, history, age = [0.0] * 4, [0.0] * 4, [[], [], [], []], 0
    for t, values in enumerate(steps):
        if reset_every and t % reset_every == 0:
            m, v, history, age = [0.0] * 4, [0.0] * 4, [[], [], [], []], 0
        age += 1
        for i, g in enumerate(values):
            g = g.astype(np.float64)
            if projected[i]:
                g = bases[t][i].T @ as_matrix(g)
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.999 * v[i] + 0.001 * g**2
            first = m[i] / (1 - 0.9**age)
            if low_pass:
                history[i].append(g)
                b, a = low_pass[0], [1.0, *low_pass[1]]
                ones = signal.lfilter(b, a, np.ones(age))
                first = signal.lfilter(b, a, np.array(history[i]), axis=0)[-1] / ones[-1]
            v_hat = v[i] / (1 - 0.999**age)
            root = np.sqrt(v_hat) + 1e-7
            if correct is not None:
                root = np.sqrt(np.maximum(v_hat - correct**2, 1e-4))
            step = rate * first / root
            if projected[i]:
                step = scale * as_variable(bases[t][i] @ step, SHAPES[i])
            weights[i] = weights[i] - step
    return weights


@pytest.mark.parametrize("low_pass", [None, "f5"])
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.filterwarnings("ignore:GaLore's rank")
def test_equals_its_transcription(low_pass, reset):
    steps, bases = gradients(11), []
    optimizer = DPGaLore(
        0.01, rank=4, update_gap=4, scale=0.5, reset=reset, gradient_filter=low_pass, **PRIVATE
    )
    actual = drive(optimizer, steps, bases)

    expected = transcription(
        steps, bases, 4, 0.5, 0.01, low_pass and filters.PRESETS[low_pass], 4 if reset else None
    )
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, atol=2e-5)


def test_bias_correction_in_the_subspace_takes_off_the_same_variance():
    steps, bases = gradients(6), []
    optimizer = DPGaLore(0.01, rank=3, second_moment="bias_corrected", epsilon=0.01, **PRIVATE)
    actual = drive(optimizer, steps, bases, noise_std=0.5)
    expected = transcription(steps, bases, 3, 1.0, 0.01, correct=0.5)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, atol=1e-4)


def test_noise_keeps_its_standard_deviation_in_the_subspace():
    projection = GaLore(rank=20)
    optimizer = DPSGD(projection=projection, **PRIVATE)
    optimizer.build([keras.Variable(np.zeros((100, 400)))])
    noise = np.random.default_rng(0).normal(size=(100, 400)).astype("float32")
    reduced = optimizer.projection.reduce(0, tf.constant(noise)).numpy()
    assert reduced.shape == (20, 400)
    # 8000 draws: 5% is more than six standard errors.
    assert np.std(reduced) == pytest.approx(1.0, rel=0.05)


# The projector.


def test_projectors_are_orthonormal_and_leading_and_change_when_due():
    steps, bases = gradients(7), []
    drive(DPGaLore(rank=3, update_gap=3, **PRIVATE), steps, bases)
    for t, of_step in enumerate(bases):
        assert of_step[2] is None
        for index in (0, 1, 3):
            np.testing.assert_allclose(of_step[index].T @ of_step[index], np.eye(3), atol=1e-5)
            if t:
                same = np.array_equal(of_step[index], bases[t - 1][index])
                assert same == (t % 3 != 0)


def test_finds_the_singular_vectors_where_they_stand_out():
    rng = np.random.default_rng(0)
    u, _ = np.linalg.qr(rng.normal(size=(30, 30)))
    v, _ = np.linalg.qr(rng.normal(size=(50, 50)))
    values = np.r_[[10.0, 8.0, 6.0, 5.0], np.linspace(1, 0.1, 26)]
    matrix = (u * values) @ v[:, :30].T
    start, _ = np.linalg.qr(rng.normal(size=(30, 4)))
    basis = leading_directions(tf.constant(matrix, tf.float32), tf.constant(start, tf.float32))
    np.testing.assert_allclose(basis @ tf.transpose(basis), u[:, :4] @ u[:, :4].T, atol=1e-4)


def test_keeps_nearly_the_energy_of_the_singular_vectors_on_pure_noise():
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(128, 300))
    start, _ = np.linalg.qr(rng.normal(size=(128, 16)))
    basis = leading_directions(
        tf.constant(matrix, tf.float32), tf.constant(start, tf.float32)
    ).numpy()
    best = np.sum(np.linalg.svd(matrix, compute_uv=False)[:16] ** 2)
    assert np.sum((basis.T @ matrix) ** 2) > 0.93 * best
    assert np.sum((start.T @ matrix) ** 2) < 0.6 * best


def test_a_gradient_of_zero_leaves_the_projector_orthonormal():
    start, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 2)))
    basis = leading_directions(tf.zeros((6, 9)), tf.constant(start, tf.float32)).numpy()
    np.testing.assert_allclose(np.abs(basis.T @ start), np.eye(2), atol=1e-5)


@pytest.mark.filterwarnings("ignore:GaLore's rank")
def test_works_under_xla():
    steps = gradients(5)
    plain = drive(DPGaLore(0.01, rank=4, update_gap=2, **PRIVATE), steps)
    compiled = drive(DPGaLore(0.01, rank=4, update_gap=2, **PRIVATE), steps, jit_compile=True)
    for a, b in zip(plain, compiled, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)


# Full rank, memory, other rules.


@pytest.mark.parametrize("rule", RULES)
def test_full_rank_is_the_plain_rule(rule):
    steps = gradients(8)
    plain = drive(rule(0.01, **PRIVATE), steps)
    with pytest.warns(UserWarning, match="plain rule is used"):
        full = drive(rule(0.01, projection=GaLore(rank=100, update_gap=3), **PRIVATE), steps)
    for a, b in zip(plain, full, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_moves_projected_weights_in_the_subspace_alone(rule):
    bases = []
    weights = drive(rule(0.01, projection=GaLore(rank=2), **PRIVATE), gradients(3), bases)
    for index in (0, 1, 3):
        moved = as_matrix(weights[index] - 1.0)
        basis = bases[0][index]
        np.testing.assert_allclose(basis @ (basis.T @ moved), moved, atol=1e-5)
        assert np.abs(moved).max() > 1e-3


def test_momentum_lives_in_the_subspace():
    steps, bases = gradients(5), []
    optimizer = DPSGD(0.1, momentum=0.9, projection=GaLore(rank=2), **PRIVATE)
    weights = drive(optimizer, steps, bases)
    m, w = np.zeros((2, 8)), np.ones((8, 6))
    for g in steps:
        m = 0.9 * m + 0.1 * bases[0][0].T @ as_matrix(g[0].astype(np.float64))
        w = w - as_variable(bases[0][0] @ m, (8, 6))
    np.testing.assert_allclose(weights[0], w, atol=1e-5)


def test_the_optimizer_takes_less_memory_and_averages_are_of_full_size():
    def numbers(optimizer):
        optimizer.build([keras.Variable(np.zeros((64, 100)))])
        return sum(int(np.prod(v.shape)) for v in optimizer.variables) - 2

    assert numbers(DPAdam(**PRIVATE)) == 2 * 6400
    assert numbers(DPGaLore(rank=4, **PRIVATE)) == 2 * 400 + 64 * 4
    averaged = DPGaLore(rank=4, use_ema=True, **PRIVATE)
    assert numbers(averaged) == 6400 + 2 * 400 + 64 * 4


def test_public_second_moments_are_projected():
    steps = gradients(4)
    optimizer = DPAdam(
        0.01,
        second_moment=dp.optimizers.moments.SideInformation(),
        projection=GaLore(rank=3),
        **PRIVATE,
    )
    variables = [keras.Variable(np.ones(shape, "float32")) for shape in SHAPES]
    optimizer.build(variables)
    public = gradients(4, seed=1)
    m = v = 0.0
    w = np.ones((5, 9))
    for t, (g, p) in enumerate(zip(steps, public, strict=True), 1):
        released = [Released([tf.constant(x) for x in part], 0.1) for part in (g, p)]
        optimizer.update(released)
        basis = optimizer.projection._bases[1].numpy().astype(np.float64)
        m = 0.9 * m + 0.1 * basis.T @ g[1]
        v = 0.999 * v + 0.001 * np.square(basis.T @ p[1])
        root = np.sqrt(v / (1 - 0.999**t)) + 1e-7
        w = w - 0.01 * basis @ (m / (1 - 0.9**t) / root)
    np.testing.assert_allclose(variables[1].numpy(), w, atol=1e-4)


# Inside of a model.


def private_model(optimizer):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((12, 12, 2))
    hidden = keras.layers.Conv2D(6, 3, strides=2, activation="relu")(inputs)
    outputs = keras.layers.Dense(5)(keras.layers.Flatten()(hidden))
    model = dp.DPModel(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    model.sampling = dp.accounting.Sampling.poisson(1000, 8)
    return model


def test_trains_saves_and_continues_exactly(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 12, 12, 2)).astype("float32"), rng.integers(0, 5, 8)

    def optimizer():
        return DPGaLore(
            0.01, rank=4, update_gap=3, gradient_filter="f1", seed=0, weight_decay=0.01,
            clip_norm=1.0, noise_multiplier=0.0, batch_size=8,
        )  # fmt: skip

    def train(model, steps):
        for _ in range(steps):
            model.train_on_batch(x, y)
        return model

    straight = train(private_model(optimizer()), 8)
    train(private_model(optimizer()), 4).save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.sampling = straight.sampling
    train(loaded, 4)
    assert type(loaded.optimizer) is DPGaLore
    assert loaded.optimizer.projection.get_config() == straight.optimizer.projection.get_config()
    for a, b in zip(loaded.get_weights(), straight.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    conv = straight.get_weights()[0]
    assert conv.shape == (3, 3, 2, 6)


def test_configurations_come_back():
    for optimizer in (
        DPGaLore(rank=7, update_gap=9, scale=0.3, reset=True, **PRIVATE),
        DPYogi(projection=GaLore(rank=7, update_gap=9, scale=0.3, reset=True), **PRIVATE),
    ):
        serialized = keras.saving.serialize_keras_object(optimizer)
        again = keras.saving.deserialize_keras_object(serialized)
        assert again.projection.get_config() == optimizer.projection.get_config()
        assert again.projection is not optimizer.projection


# Errors.


def test_says_which_weights_are_too_small():
    with pytest.warns(UserWarning, match="rank=6 reaches the shorter side of .*small/kernel"):
        DPGaLore(rank=6, **PRIVATE).build(
            [
                keras.Variable(np.zeros((20, 9)), name="large"),
                _named("small/kernel", (20, 6)),
                keras.Variable(np.zeros(3)),
            ]
        )


def _named(path, shape):
    scope, name = path.split("/")
    with keras.name_scope(scope):
        return keras.Variable(np.zeros(shape), name=name)


@pytest.mark.parametrize(
    "second_moment",
    [
        "scale_then_privatize",
        "independent",
        dp.optimizers.moments.Joint(1.0),
        dp.optimizers.moments.SideInformation(scaled=True),
        dp.optimizers.moments.SideInformation(lambda step: []),
    ],
)
def test_refuses_second_moments_that_are_known_for_each_weight_only(second_moment):
    optimizer = DPGaLore(second_moment=second_moment, **PRIVATE)
    with pytest.raises(ValueError, match="v lives in a subspace"):
        optimizer.build([keras.Variable(np.zeros((300, 300)))])


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: dp.optimizers.DPOptimizer("sgd", projection=p, **PRIVATE),
        lambda p: dp.optimizers.DP2RMSprop(adaptive_clip_norm=1.0, projection=p, **PRIVATE),
        lambda p: dp.optimizers.PDADPMD(steps=3, projection=p, **PRIVATE),
        lambda p: dp.optimizers.AdaDPS(projection=p, **PRIVATE),
    ],
)
def test_refuses_optimizers_that_do_not_work_in_a_subspace(optimizer):
    optimizer = optimizer(GaLore())
    with pytest.raises(ValueError, match="projection"):
        optimizer.build([keras.Variable(np.zeros((300, 300)))])


@pytest.mark.parametrize(
    "arguments", [{"rank": 0}, {"rank": 1.5}, {"update_gap": 0}, {"scale": 0.0}, {"scale": "1"}]
)
def test_refuses_arguments_out_of_range(arguments):
    with pytest.raises(ValueError):
        DPGaLore(**arguments, **PRIVATE)
    with pytest.raises(ValueError):
        DPSGD(projection="galore", **PRIVATE)
