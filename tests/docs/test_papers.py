"""The experiments on the papers: they simulate the library's own optimizers, and they run."""

import functools
import itertools
import pathlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from tests.helpers.linear_regression import FixedNoise

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "papers"
sys.path.insert(0, str(FOLDER))

import accelerated  # noqa: E402
import adagrad_1d  # noqa: E402
import adp  # noqa: E402
import correlated  # noqa: E402
import doppler  # noqa: E402
import language_model  # noqa: E402
import quadratic  # noqa: E402

SIGMA, STEPS = 0.3, 60


class Draws(FixedNoise):
    """Stands in for a `NoiseSource`: one table for each draw that a step takes."""

    def __init__(self, optimizer, tables):
        self.optimizer, self.tables, self.calls = optimizer, tables, 0


def fit(layer, loss, optimizer, x, y, draws, sampling=None):
    """The weights after `model.fit`, in order.

    Args:
        layer: the only layer of the model, with a kernel only.
        loss: its loss.
        optimizer: a private one.
        x, y: data, (examples, features).
        draws: unit noise on gradient (and square), (1 or 2, steps, weights).
        sampling: of the batches, all of the data at each step; default: one example after another.
    """
    inputs = keras.Input(x.shape[1:])
    model = dp.DPModel(inputs, layer(inputs))
    model.compile(optimizer=optimizer, loss=loss)
    tables = [np.float32(z).reshape(-1, *layer.kernel.shape) for z in draws]
    used = 2 if optimizer.releases[0].statistic == "mean_and_square" else 1
    object.__setattr__(optimizer, "noise_source", Draws(optimizer, tables[:used]))
    rows = tf.data.Dataset.from_tensor_slices((np.float32(x), np.float32(y)))
    rows = rows.batch(len(x)).repeat(len(draws[0])) if sampling else rows.batch(1)
    sampling = sampling or dp.accounting.Sampling.shuffled(len(x), 1, "zero_out")
    model.fit(dp.data.assume_sampling(rows, sampling), verbose=0)
    return model.get_weights()[0].ravel()


def private(source, clip_norm, std):
    """Options of an optimizer whose noise on the plain gradient has this standard deviation."""
    if source == "independent":
        source = dp.optimizers.moments.Independent(adjacency="zero_out")
    return {"second_moment": source, "clip_norm": clip_norm, "noise_multiplier": std / clip_norm,
            "batch_size": 1}  # fmt: skip


@pytest.mark.parametrize(
    ("source", "epsilon"),
    [
        ("post_processing", 1e-7),
        ("independent", 1.0),
        ("bias_corrected", 0.3),
        ("scale_then_privatize", 1e-7),
        ("scale_then_privatize", 0.5),
    ],
)
def test_the_one_dimensional_simulation_is_dp_adagrad(source, epsilon):
    rng, clip = np.random.default_rng(1), 0.4
    x = rng.normal(size=(STEPS, 1)) * (rng.random((STEPS, 1)) < 0.7)
    y = np.float64(rng.random((STEPS, 1)) < 0.6)
    draws = rng.normal(size=(2, STEPS, 1))
    method = adagrad_1d.Method(source, epsilon, floor=source == "bias_corrected")
    scale = SIGMA * (np.sqrt(2) if source == "independent" else 1.0)
    theta = adagrad_1d.train(
        method, x, y, np.full((1, 1), 0.2), np.full((1, 1), clip), *(scale * draws),
        np.full(STEPS, scale**2),
    )  # fmt: skip

    optimizer = dp.optimizers.DPAdagrad(0.2, epsilon=epsilon, **private(source, clip, SIGMA * clip))
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", activation="sigmoid")
    weights = fit(layer, "binary_crossentropy", optimizer, x, y, draws)
    np.testing.assert_allclose(weights, theta[0], rtol=1e-3)


@pytest.mark.parametrize(
    ("source", "epsilon"),
    [
        ("post-processing", 1e-7),
        ("independent moments", 0.5),
        ("bias-corrected", 0.05),
        ("scale-then-privatize", 0.05),
        pytest.param("noiseless", 0.05, marks=pytest.mark.filterwarnings("ignore:.*noiseless")),
    ],
)
def test_the_quadratic_simulation_is_dp_adam(source, epsilon):
    rng, rate, clip, curvature = np.random.default_rng(2), 0.1, 200.0, np.array([1.0, 0.2])
    examples, *draws = rng.normal(size=(3, STEPS, 2))
    std, std_on_square = SIGMA, 0.0
    if source == "independent moments":
        std, std_on_square = np.sqrt(2) * SIGMA, np.sqrt(2) * SIGMA * clip
    theta, _ = quadratic.adam(
        source, zip(examples, *draws, strict=True), np.zeros(2), rate, std, std_on_square,
        epsilon, curvature,
    )  # fmt: skip

    name = source.removesuffix(" moments").replace("-", "_")
    optimizer = dp.optimizers.DPAdam(rate, epsilon=epsilon, **private(name, clip, SIGMA))
    layer = keras.layers.Dense(2, use_bias=False, kernel_initializer="zeros")
    weights = fit(
        layer, lambda a, theta: keras.ops.sum(curvature / 2 * (theta - a) ** 2, -1), optimizer,
        np.ones((STEPS, 1)), examples, draws,
    )  # fmt: skip
    np.testing.assert_allclose(weights, theta, rtol=1e-3)


@pytest.mark.parametrize("method", accelerated.METHODS)
def test_the_accelerated_simulation_is_that_of_the_optimizers(method, monkeypatch):
    monkeypatch.setattr(accelerated, "EPSILON", 2000.0)  # 50 examples are as good as 10⁵ at ε = 1
    rng, steps, c = np.random.default_rng(4), 110, 1.0  # the second stage begins at step 89
    problem = accelerated.Problem(examples=50, seed=0)
    made = accelerated.plan(problem, method, steps, c, problem.examples, authors=False)
    draws = rng.laplace(size=(len(made.scales), accelerated.DIMENSION, 1))
    *_, x = accelerated.iterate(
        made, lambda x: problem.gradient(x, problem.examples, rng),
        np.full((accelerated.DIMENSION, 1), accelerated.START), draws,
    )  # fmt: skip

    mu, smoothness, clip = problem.mu, problem.smoothness, accelerated.CLIP
    options = {
        "clip_norm": clip, "batch_size": problem.examples, "noise": "laplace",
        "noise_multiplier": made.scales[0] * problem.examples / clip,
        "noise_schedule": made.scales / made.scales[0],
    }  # fmt: skip
    rate, momentum = c / smoothness, {"strong_convexity": mu}
    optimizer = {
        "GD": lambda: dp.optimizers.DPSGD(rate, **options),
        "HB": lambda: dp.optimizers.DPHeavyBall(rate, **momentum, **options),
        "NAG": lambda: dp.optimizers.DPNesterov(rate, **momentum, **options),
        "MASG": lambda: dp.optimizers.DPMultistageNesterov(
            **momentum, smoothness=smoothness, c=c, **options
        ),
    }[method.removesuffix("-opt")]()
    sampling = dp.accounting.Sampling.full(problem.examples, "replace_one")
    spent = dp.accounting.epsilon(optimizer, sampling, len(made.scales), delta=0)
    assert spent == pytest.approx(accelerated.EPSILON, rel=1e-3)
    layer = keras.layers.Dense(
        1, use_bias=False, kernel_regularizer=keras.regularizers.L2(accelerated.LAMBDA),
        kernel_initializer=keras.initializers.Constant(accelerated.START),
    )  # fmt: skip
    weights = fit(
        layer, lambda _, margin: keras.ops.softplus(-margin[:, 0]), optimizer, problem.signed,
        np.ones((problem.examples, 1)), [draws], sampling,
    )  # fmt: skip
    np.testing.assert_allclose(weights, x[:, 0], rtol=1e-3, atol=1e-3 * np.abs(x).max())


def test_the_gradients_of_the_accelerated_experiment_are_those_of_its_error():
    rng, problem = np.random.default_rng(6), accelerated.Problem(examples=5000, seed=0)
    x, d = rng.normal(size=(accelerated.DIMENSION, 1)), accelerated.DIMENSION
    ahead, behind = problem.error(x + 0.01 * np.eye(d)), problem.error(x - 0.01 * np.eye(d))
    gradient = problem.gradient(x, problem.examples, rng)[:, 0]
    np.testing.assert_allclose(gradient, (ahead - behind) / 0.02, atol=1e-3)
    subset = problem.gradient(x, problem.examples - 1, rng)[:, 0]
    np.testing.assert_allclose(subset, gradient, atol=1e-3)


def test_the_accelerated_experiment_has_the_constants_of_the_paper():
    regression = accelerated.Problem(accelerated.Size.examples, seed=0)
    assert regression.smoothness == pytest.approx(5.1001, abs=1e-4)
    taken = {
        authors: [
            accelerated.optimal_schedule(
                regression, "NAG", steps, 1.0, regression.examples, authors
            ).length
            for steps in accelerated.Size.steps
        ]
        for authors in (False, True)
    }
    assert taken == {False: [100, 106, 106, 106], True: [100, 136, 136, 136]}


@pytest.mark.parametrize("name", adp.STEP_SIZES)
@pytest.mark.parametrize("batch_size", [60, 20])
def test_the_convex_simulation_is_adp_sgd(name, batch_size):
    rng, rate = np.random.default_rng(5), 8.0
    problem = adp.Items(items=6, records=60, seed=0)
    counts, positives = (
        (np.full((1, 6), 10.0), problem.positives[None])
        if batch_size == problem.records
        else next(problem.samples(batch_size / problem.records, 1, rng))
    )
    draws = rng.normal(size=(STEPS, 1, 6))

    class Rates(adp.StepSizes):
        def __call__(self, step):
            return rate * super().__call__(step)

    optimizer = dp.optimizers.ADPSGD(
        Rates(name, STEPS), STEPS, clip_norm=1.0, batch_size=batch_size, noise_multiplier=SIGMA
    )
    scales = SIGMA * optimizer.noise_schedule.alphas(0, STEPS) / batch_size
    rates = rate * adp.STEP_SIZES[name](np.arange(STEPS), STEPS)
    _, theta = adp.descend(
        problem, np.zeros((1, 6)), rates[:, None], scales[:, None],
        itertools.repeat((counts, positives)), batch_size, draws,
    )  # fmt: skip

    items = np.repeat(np.arange(6), counts[0].astype(int))
    bought = np.concatenate(
        [np.arange(n) < k for n, k in zip(counts[0], positives[0], strict=True)]
    )
    sampling = (
        dp.accounting.Sampling.full(problem.records)
        if batch_size == problem.records
        else dp.accounting.Sampling.poisson(problem.records, batch_size)
    )
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    weights = fit(
        layer, keras.losses.BinaryCrossentropy(from_logits=True), optimizer, np.eye(6)[items],
        bought[:, None], [draws], sampling,
    )  # fmt: skip
    np.testing.assert_allclose(weights, theta[0], rtol=1e-3, atol=1e-4)


def test_the_convex_experiment_measures_gradients_of_its_loss():
    rng, problem = np.random.default_rng(7), adp.Items(items=6, records=60, seed=0)
    theta, step = rng.normal(size=6), 1e-4 * np.eye(6)
    gradient = (problem.loss(theta + step) - problem.loss(theta - step)) / 2e-4
    squares, after = adp.descend(
        problem, theta, np.array([3.0, 1e-9]), np.zeros(2),
        itertools.repeat((problem.each, problem.positives)), problem.records, np.zeros((2, 6)),
    )  # fmt: skip
    assert squares == pytest.approx(np.sum(gradient**2), rel=1e-5)
    np.testing.assert_allclose(after, theta - 3 * gradient, atol=1e-6)


@pytest.mark.parametrize(
    "program", [accelerated, adagrad_1d, quadratic], ids=lambda program: program.__name__
)
def test_the_experiment_runs(program, tmp_path, monkeypatch):
    run_quickly(program, tmp_path, monkeypatch)


@pytest.mark.representatives(0)
def test_the_experiment_on_schedules_runs(tmp_path, monkeypatch):
    """On the digits each method trains once; the second of its seeds is said to be as good."""
    pytest.importorskip("sklearn")
    train, runs = adp.train, {}

    def once(method, name, steps, seed, parts, multiplier):
        if (method, name) not in runs:
            runs[method, name] = train(method, name, steps, seed, parts, multiplier)
        return runs[method, name]

    monkeypatch.setattr(adp, "train", once)
    monkeypatch.setattr(adp, "ROUNDED", 0.5)  # fewer levels of noise to account for
    run_quickly(adp, tmp_path, monkeypatch)
    assert len(runs) == 4


@pytest.mark.representatives(0)
def test_the_language_model_trains_on_a_text_of_ones_own(tmp_path, monkeypatch):
    """Each method trains in one of the two noises, which differ in σ alone."""
    noises, train, runs = itertools.cycle(language_model.NOISES), language_model.train, {}

    def once(setting, *rest):
        method = setting["method"]
        if method not in runs:
            runs[method] = train(setting | {"noise": next(noises)}, *rest)
        return runs[method]

    experiment = functools.partial(language_model.experiment, train=once)
    monkeypatch.setattr(language_model, "experiment", experiment)
    words = np.random.default_rng(3).choice(["it", "was", "a", "dark", "night,", "Paul:"], 9999)
    (tmp_path / "my.txt").write_text(" ".join(words), encoding="utf-8")
    output = tmp_path / "results"
    run_quickly(language_model, output, monkeypatch, "--data", tmp_path / "my.txt")
    table = (output / "language_model.csv").read_text(encoding="utf-8").splitlines()
    assert len(table) == 1 + 2 * 5  # each of two noises with each of five methods
    assert list(runs) == language_model.METHODS


def test_the_header_of_figure_3_is_that_of_the_paper():
    low, banded, independent = correlated.header().values()
    assert low.sigma == pytest.approx(0.134, abs=6e-4)
    assert low.rmse == pytest.approx(banded.rmse, rel=1e-9)
    assert (low.epsilon, banded.epsilon) == pytest.approx((149.1, 10.05), abs=0.06)
    assert independent.epsilon == banded.epsilon


@pytest.mark.parametrize("noise", correlated.NOISES)
def test_all_noises_of_the_correlated_experiment_cost_the_same(noise):
    plan = correlated.QUICK.plan
    spent = plan.epsilon(noise, plan.sigma(noise))
    assert spent == pytest.approx(correlated.EPSILON, rel=1e-3)


def test_the_correlated_experiment_trains_and_reports(tmp_path):
    size, text = correlated.QUICK, "so it is written: " * 400
    parts = correlated.shortened(language_model.sequences(text), size)
    setting = {"noise": "banded", "method": "scale-then-privatize", "rate": 0.01, "clip": 0.5}
    result = correlated.train(setting | {"epsilon": 1e-3, "seed": 0}, parts, size)
    assert len(result["curve"].split()) == 4  # epochs of a single fit
    assert result["privacy"] == pytest.approx(correlated.EPSILON, rel=1e-3)

    run = result | {name: setting[name] for name in ("rate", "clip")}
    results = {pair: [run | {"σ": size.plan.sigma(pair[0])}] for pair in size.pairs}
    correlated.write(results, size, tmp_path)
    table = (tmp_path / "correlated_figure_3.csv").read_text(encoding="utf-8").splitlines()
    assert len(table) == 1 + 3 + 3 + 3  # our header, methods, and the paper's header
    assert (tmp_path / "correlated.png").exists()


@pytest.mark.representatives(0)
def test_doppler_trains_on_images_of_ones_own(tmp_path, monkeypatch):
    rng = np.random.default_rng(4)
    y = rng.integers(0, 3, 300)
    x = np.float32(rng.random((300, 8, 8)) < 0.2 + 0.3 * y[:, None, None])
    parts = {"x_train": x[:250], "y_train": y[:250], "x_test": x[250:], "y_test": y[250:]}
    np.savez(tmp_path / "my.npz", **parts)
    output = tmp_path / "results"
    run_quickly(doppler, output, monkeypatch, "--data", tmp_path / "my.npz")
    table = (output / "doppler.csv").read_text(encoding="utf-8").splitlines()
    assert len(table) == 1 + 3 * 2  # each of three optimizers without and with a filter


def run_quickly(program, output, monkeypatch, *options):
    """Runs an experiment as its command does, without another import of TensorFlow."""
    arguments = [program.__name__, "--quick", "--output", output, *options]
    monkeypatch.setattr(sys, "argv", [str(argument) for argument in arguments])
    program.main()
    assert {file.suffix for file in output.iterdir()} == {".csv", ".md", ".png"}
