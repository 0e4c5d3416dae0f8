"""Low-pass filters: against scipy.signal, and inside of every optimizer against NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import signal

import dp_keras_opt as dp
from dp_keras_opt import filters
from dp_keras_opt.filters import LowPass, OptimalFIR
from dp_keras_opt.noise.release import Released
from dp_keras_opt.optimizers import DPSGD, DPAdagrad, DPAdam, DPRMSprop, DPYogi
from tests.helpers import linear_regression as lr

PRIVATE = {"clip_norm": 1.0, "noise_multiplier": 1.0, "batch_size": 10}
FILTERS = {name: LowPass.preset(name) for name in filters.PRESETS} | {
    "butterworth": LowPass.butterworth(3, 0.2),
    "chebyshev": LowPass.chebyshev(4, 0.3),
    "moving_average": LowPass([0.25] * 4),
}


def drive(optimizer, gradients, noise_std=0.1, start=None):
    """The weights after each privatized gradient (steps, d), d weights in one variable."""
    variable = keras.Variable(np.zeros(gradients.shape[1], "float32") if start is None else start)
    optimizer.build([variable])

    @tf.function(autograph=False)
    def step(gradient):
        optimizer.update([Released([gradient], tf.constant(noise_std))])

    weights = [variable.numpy()]
    for gradient in gradients:
        step(tf.constant(gradient, tf.float32))
        weights.append(variable.numpy())
    return np.array(weights, np.float64)


def filtered(gradient_filter, gradients, noise_std=0.1):
    """The filter's output on gradients (steps, d), read off the steps of DPSGD at rate 1."""
    optimizer = DPSGD(1.0, gradient_filter=gradient_filter, **PRIVATE)
    return -np.diff(drive(optimizer, gradients, noise_std), axis=0)


def oracle(b, a, gradients):
    """The specification's formula, by scipy: lfilter of the gradients over lfilter of ones."""
    denominator = [1.0, *a]
    ones = signal.lfilter(b, denominator, np.ones(len(gradients)))
    return signal.lfilter(b, denominator, gradients, axis=0) / ones[:, None]


# The recursion.


@pytest.mark.parametrize("name", FILTERS)
def test_equals_scipy_with_the_bias_correction(name):
    low_pass = FILTERS[name]
    gradients = np.random.default_rng(0).normal(size=(200, 3)).astype("float32")

    variable = keras.Variable(np.zeros(3, "float32"))
    optimizer = DPSGD(1.0, gradient_filter=low_pass, **PRIVATE)
    optimizer.build([variable])
    step = tf.function(lambda g: optimizer.gradient_filter(optimizer, [g], 0.0), autograph=False)
    outputs = np.array([step(tf.constant(g))[0].numpy() for g in gradients])

    expected = oracle(low_pass.b, low_pass.a, gradients.astype(np.float64))
    np.testing.assert_allclose(outputs, expected, atol=1e-6 * np.abs(expected).max())


coefficient = st.floats(-1, 1, allow_nan=False).map(lambda x: round(x, 3))


@settings(max_examples=25, deadline=None)
@given(st.lists(coefficient, min_size=1, max_size=4), st.lists(st.floats(-0.9, 0.9), max_size=3))
def test_any_valid_filter_equals_scipy(b, poles):
    a = np.poly(poles)[1:] if poles else ()
    try:
        low_pass = LowPass(b, a)
    except ValueError:
        return
    gradients = np.random.default_rng(1).normal(size=(30, 2))
    expected = oracle(low_pass.b, low_pass.a, gradients)
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer = DPSGD(1.0, gradient_filter=low_pass, **PRIVATE)
    optimizer.build([variable])
    actual = [
        optimizer.gradient_filter(optimizer, [tf.constant(g, tf.float32)], 0.0)[0].numpy()
        for g in gradients
    ]
    # Sums of which up to a factor 1000 cancels, in float32.
    np.testing.assert_allclose(actual, expected, atol=1e-3 * max(1, np.abs(expected).max()))


def test_a_constant_gradient_passes_unchanged_from_the_first_step():
    gradients = np.full((50, 2), 3.0)
    for low_pass in FILTERS.values():
        np.testing.assert_allclose(filtered(low_pass, gradients), gradients, rtol=1e-4)


def test_costs_as_many_buffers_as_its_order():
    for name, order in [("none", 0), ("momentum", 1), ("first_order_v1", 1), ("f5", 2), ("f6", 2)]:
        low_pass = LowPass.preset(name)
        optimizer = DPSGD(gradient_filter=low_pass, **PRIVATE)
        optimizer.build([keras.Variable(np.zeros((4, 5)))])
        sizes = [int(np.prod(v.shape)) for v in optimizer.variables]
        assert low_pass.order == order
        assert sizes.count(20) == order


def test_two_optimizers_do_not_share_the_buffers_of_one_filter():
    low_pass = LowPass.preset("momentum")
    first, second = (DPSGD(gradient_filter=low_pass, **PRIVATE) for _ in range(2))
    first.build([keras.Variable(np.zeros(2))])
    second.build([keras.Variable(np.zeros(3))])
    assert first.gradient_filter is not second.gradient_filter
    assert not hasattr(low_pass, "_states")


@pytest.mark.parametrize("compiled", [{}, {"jit_compile": True}, {"run_eagerly": True}])
def test_trains_in_graphs_under_xla_and_eagerly(compiled):
    finals = []
    for options in (compiled, {"run_eagerly": True}):
        optimizer = DPAdam(0.1, gradient_filter="f6", **lr.PRIVATE)
        weights, _ = lr.train(lr.build(optimizer, **({"run_eagerly": False} | options)), 6)
        finals.append(weights[-1])
    np.testing.assert_allclose(*finals, rtol=2e-4, atol=1e-5)


# Analysis.


def test_noise_gains_of_the_specification():
    listed = {"momentum": 0.05263, "first_order_v1": 0.09091, "second_order": 0.09828}
    listed |= {"f1": 0.05066, "f3": 0.1, "f5": 0.04875}
    for name, gain in listed.items():
        assert LowPass.preset(name).noise_gain == pytest.approx(gain, abs=5e-6), name


def test_noise_gain_is_what_filtering_white_noise_leaves():
    noise = np.random.default_rng(0).normal(size=(2000, 400))
    for name in ("momentum", "f6", "butterworth", "chebyshev"):
        settled = oracle(FILTERS[name].b, FILTERS[name].a, noise)[500:]
        # 1500 × 400 correlated draws: the standard error is below 1%.
        assert np.var(settled) == pytest.approx(FILTERS[name].noise_gain, rel=0.05), name


def test_impulse_and_frequency_response():
    momentum = LowPass.preset("momentum")
    np.testing.assert_allclose(momentum.impulse_response(5), 0.1 * 0.9 ** np.arange(5))
    frequencies, gains = momentum.frequency_response([0.0, 0.25, 0.5])
    z = np.exp(2j * np.pi * np.array([0.0, 0.25, 0.5]))
    np.testing.assert_allclose(gains, 0.1 / (1 - 0.9 / z))
    np.testing.assert_allclose(frequencies, [0.0, 0.25, 0.5])
    assert len(momentum.frequency_response(100)[0]) == 100


def test_designs_are_those_of_scipy():
    frequencies, gains = LowPass.butterworth(2, 0.4).frequency_response([0.0, 0.2])
    np.testing.assert_allclose(np.abs(gains), [1.0, 2**-0.5], rtol=1e-9)  # −3 dB at the cut-off
    _, gains = LowPass.chebyshev(3, 0.4, ripple=2.0).frequency_response([0.2])
    np.testing.assert_allclose(np.abs(gains), 10 ** (-2 / 20), rtol=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=6))
def test_exact_weights_maximise_the_snr(tail):
    c = np.array([0.5, *tail])
    best = np.asarray(filters.optimal_weights(c))
    size, energy = len(c), np.sum(c**2)
    assert best.sum() == pytest.approx(1)
    optimum = filters.snr(c, best)
    assert optimum == pytest.approx((c.sum() + np.sqrt(size * energy)) / 2)
    for other in np.random.default_rng(0).dirichlet(np.ones(size), 50):
        assert filters.snr(c, other) <= optimum + 1e-9


def test_weights_of_the_specification():
    c = [0.5, 0.0]
    assert filters.snr(c, filters.optimal_weights(c)) == pytest.approx(0.6036, abs=5e-5)
    assert filters.snr(c, filters.optimal_weights(c, "paper")) == 0.5
    np.testing.assert_allclose(
        filters.optimal_weights([0.5, 0.25, -0.3], "paper"), [2 / 3, 1 / 3, 0.0]
    )


def test_autocorrelation_and_spectrum_of_a_known_process():
    rng = np.random.default_rng(0)
    signal_ar = signal.lfilter([1.0], [1.0, -0.9], rng.normal(size=(20_000, 20)), axis=0)
    correlation = filters.autocorrelation(signal_ar, 4)
    np.testing.assert_allclose(correlation / correlation[0], 0.9 ** np.arange(4), atol=0.02)
    frequencies, density = filters.power_spectral_density(signal_ar)
    assert np.sum(density) * (frequencies[1] - frequencies[0]) == pytest.approx(
        correlation[0], rel=0.05
    )
    z = np.exp(-2j * np.pi * frequencies)
    np.testing.assert_allclose(density[1:-1], 40 / np.abs(1 - 0.9 * z[1:-1]) ** 2, rtol=0.15)


# OptimalFIR.


def fir_oracle(gradients, power, taps, weighting, decay):
    """The estimator and the weights of the specification, in float64."""
    outputs, sums, counts = [], np.zeros(taps), np.zeros(taps)
    for t, g in enumerate(gradients):
        sums, counts = decay * sums, decay * counts
        for lag in range(min(t + 1, taps)):
            past = gradients[t - lag]
            if lag == 0:
                term = max(g @ g - power, 1e-3)
            else:
                term = g @ past - 0.5 * max(past @ past - power, 0)
            sums[lag] += (1 - decay) * term
            counts[lag] += 1 - decay
        means = sums[: t + 1] / counts[: t + 1]
        c = np.clip(means / means[0], -0.5, 0.5)
        c[0] = 0.5
        if weighting == "paper":
            b = np.maximum(c, 0) / np.maximum(c, 0).sum()
        else:
            b = (c + np.sqrt(np.mean(c**2))) / (c.sum() + np.sqrt(len(c) * np.sum(c**2)))
        outputs.append(sum(w * gradients[t - lag] for lag, w in enumerate(b)))
    return np.array(outputs)


@pytest.mark.parametrize("weighting", ["exact", "paper"])
@pytest.mark.parametrize("taps", [2, 4])
def test_optimal_fir_equals_its_transcription(weighting, taps):
    rng = np.random.default_rng(3)
    slow = signal.lfilter([0.2], [1, -0.95], rng.normal(size=(40, 30)), axis=0)
    gradients = (slow + 0.3 * rng.normal(size=slow.shape)).astype("float32").astype(np.float64)

    outputs = filtered(OptimalFIR(taps, weighting, decay=0.9), gradients, noise_std=0.3)

    expected = fir_oracle(gradients, 30 * np.float32(0.3) ** 2, taps, weighting, 0.9)
    np.testing.assert_allclose(outputs, expected, atol=2e-5)


def test_optimal_fir_recovers_the_known_optimum():
    """A slow autoregressive gradient in noise of known size: c_τ = ρ^τ − ½ (its own estimator)."""
    rho, std, size, taps = 0.95, 1.0, 2000, 4
    rng = np.random.default_rng(0)
    clean = signal.lfilter([np.sqrt(1 - rho**2)], [1, -rho], rng.normal(size=(600, size)), axis=0)
    gradients = clean[200:] + std * rng.normal(size=(400, size))
    optimizer = DPSGD(1.0, gradient_filter=OptimalFIR(taps), **PRIVATE)
    variable = keras.Variable(np.zeros(size, "float32"))
    optimizer.build([variable])
    step = tf.function(
        lambda g: optimizer.gradient_filter(optimizer, [g], size * std**2)[0], autograph=False
    )
    for gradient in gradients[:-1]:
        step(tf.constant(gradient, tf.float32))
    output = step(tf.constant(gradients[-1], tf.float32)).numpy()

    weights = np.linalg.lstsq(gradients[-taps:][::-1].T, output, rcond=None)[0]
    optimum = filters.optimal_weights(rho ** np.arange(taps) - np.array([0.5] * taps))
    np.testing.assert_allclose(weights, optimum, atol=0.01)
    assert weights.sum() == pytest.approx(1, abs=1e-3)


def test_optimal_fir_adapts_to_a_gradient_that_changes():
    rng = np.random.default_rng(0)
    constant, noise = np.full((300, 500), 1.0), rng.normal(size=(300, 500))
    outputs = filtered(OptimalFIR(4, decay=0.9), np.concatenate([constant, noise]), noise_std=0.0)
    late = outputs[-50:]
    fresh = np.einsum("ij,ij->i", late, noise[-50:]) / np.einsum(
        "ij,ij->i", noise[-50:], noise[-50:]
    )
    assert np.mean(fresh) > 0.5  # the newest gradient now outweighs the three before it


# In the optimizers.


@pytest.mark.parametrize("rule", [DPAdam, DPRMSprop, DPAdagrad, DPYogi])
def test_adaptive_rules_step_along_the_filtered_over_the_unfiltered(rule):
    gradients = np.random.default_rng(2).normal(size=(20, 4)).astype("float32").astype(np.float64)
    optimizer = rule(0.1, gradient_filter="first_order_v1", epsilon=1e-4, **PRIVATE)
    weights = drive(optimizer, gradients)

    smooth = oracle(*filters.PRESETS["first_order_v1"], gradients)
    v, w = np.zeros(4), np.zeros(4)
    for t, (g, m) in enumerate(zip(gradients, smooth, strict=True), 1):
        square, beta = g**2, 0.999
        if rule is DPAdam:
            v = beta * v + (1 - beta) * square
        elif rule is DPRMSprop:
            v = 0.9 * v + 0.1 * square
        elif rule is DPAdagrad:
            v = v + square
        else:
            v = v + (1 - beta) * np.sign(square - v) * square
        v_hat = v / (1 - beta**t) if rule in (DPAdam, DPYogi) else v
        w = w - 0.1 * m / (np.sqrt(v_hat) + 1e-4)
        np.testing.assert_allclose(weights[t], w, rtol=1e-4, atol=1e-6)


def test_low_pass_dp_adam_bc():
    """LP-DPAdamBC: √max(v̂ − Φ, ε²) from the unfiltered gradient, the filter instead of m."""
    gradients = np.random.default_rng(4).normal(size=(30, 4)).astype("float32").astype(np.float64)
    optimizer = DPAdam(
        0.1, second_moment="bias_corrected", gradient_filter="f5", epsilon=0.01, **PRIVATE
    )
    weights = drive(optimizer, gradients, noise_std=0.4)

    smooth = oracle(*filters.PRESETS["f5"], gradients)
    v, w = np.zeros(4), np.zeros(4)
    for t, (g, m) in enumerate(zip(gradients, smooth, strict=True), 1):
        v = 0.999 * v + 0.001 * g**2
        w = w - 0.1 * m / np.sqrt(np.maximum(v / (1 - 0.999**t) - 0.4**2, 0.01**2))
    np.testing.assert_allclose(weights[-1], w, rtol=1e-3)


def test_the_momentum_filter_is_adam_with_beta_1():
    gradients = np.random.default_rng(5).normal(size=(25, 3))
    plain = drive(DPAdam(0.1, beta_1=0.9, **PRIVATE), gradients)
    smooth = drive(DPAdam(0.1, beta_1=0.0, gradient_filter="momentum", **PRIVATE), gradients)
    np.testing.assert_allclose(plain, smooth, atol=1e-5)


def test_scale_then_privatize_filters_in_the_geometry_of_one():
    optimizer = DPAdam(
        0.05,
        second_moment="scale_then_privatize",
        gradient_filter="first_order_v2",
        epsilon=0.1,
        **lr.PRIVATE,
    )
    weights, noise = lr.train(lr.build(optimizer), 8)

    w, v, released = lr.START, np.zeros(lr.SIZE), []
    for t in range(8):
        root = np.sqrt(v / (1 - 0.999**t) if t else v) + 0.1
        g = lr.privatized(w, noise.flat(t), scale=1 / root) * root
        released.append(g)
        v = 0.999 * v + 0.001 * g**2
        m = oracle(*filters.PRESETS["first_order_v2"], np.array(released))[-1]
        w = w - 0.05 * m / (np.sqrt(v / (1 - 0.999 ** (t + 1))) + 0.1)
    np.testing.assert_allclose(weights[-1], w, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("ablation", [None, "noise_before_preconditioning", "extra_query"])
def test_delayed_preconditioners_filter_plain_gradients_in_both_phases(ablation):
    """Their steps are s ⊙ filter(plain gradients), s the geometry of the phase."""
    seen, geometries, stds = [], [], []

    class Spy(LowPass):
        def __call__(self, optimizer, gradients, noise_power):
            outputs = super().__call__(optimizer, gradients, noise_power)
            seen.append((lr.flat(gradients), lr.flat(outputs), float(noise_power)))
            return outputs

    class Watched(dp.optimizers.DP2RMSprop):
        def update(self, released):
            geometries.append(lr.flat(self._geometry(self._phase[0])))
            stds.append(float(released[0].noise_std))
            super().update(released)

    optimizer = Watched(
        0.1, 0.2, delay=(2, 3), epsilon=0.5, adaptive_clip_norm=0.4, ablation=ablation,
        gradient_filter=Spy(*filters.PRESETS["f3"]), **lr.PRIVATE,
    )  # fmt: skip
    weights, _ = lr.train(lr.build(optimizer), 10, draws=2 if ablation == "extra_query" else 1)

    plain, smooth, powers = (np.array(part) for part in zip(*seen, strict=True))
    geometries = np.array(geometries)
    np.testing.assert_allclose(smooth, oracle(*filters.PRESETS["f3"], plain), rtol=1e-4, atol=1e-5)
    adaptive = np.any(geometries != 1, axis=1)
    assert adaptive.any() and not adaptive.all()
    rates = np.where(adaptive, 0.2, 0.1)[:, None]
    expected = lr.START - np.cumsum(rates * geometries * smooth, axis=0)
    np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-5)
    before = ablation == "noise_before_preconditioning"
    spread = np.ones_like(geometries) if before else 1 / geometries
    expected = np.square(spread).sum(axis=1) * np.square(stds)
    np.testing.assert_allclose(powers, expected, rtol=1e-4)


def test_the_noise_power_counts_every_coordinate():
    powers = []

    class Spy(LowPass):
        def __call__(self, optimizer, gradients, noise_power):
            powers.append(float(noise_power))
            return super().__call__(optimizer, gradients, noise_power)

    optimizer = DPAdam(gradient_filter=Spy([1.0]), **PRIVATE)
    shapes = [(3, 4), (5,)]
    optimizer.build([keras.Variable(np.zeros(shape)) for shape in shapes])
    optimizer.update([Released([tf.zeros(shape) for shape in shapes], tf.constant(0.3))])
    assert powers == [pytest.approx(17 * 0.3**2)]


def test_wrapped_and_public_data_optimizers_filter_too():
    gradients = np.random.default_rng(6).normal(size=(10, 3)).astype("float32")
    wrapped = dp.optimizers.DPOptimizer(keras.optimizers.SGD(1.0), gradient_filter="f1", **PRIVATE)
    expected = -np.cumsum(oracle(*filters.PRESETS["f1"], gradients.astype(np.float64)), axis=0)
    np.testing.assert_allclose(drive(wrapped, gradients)[1:], expected, rtol=1e-4, atol=1e-5)

    mixed = dp.optimizers.PDADPMD(1.0, steps=10, gradient_filter="f1", **PRIVATE)
    variable = keras.Variable(np.zeros(3, "float32"))
    mixed.build([variable])
    inputs = []
    for t, g in enumerate(gradients):
        mixed.update([Released([tf.constant(g)], 0.1), Released([tf.constant(2 * g)], 0.0)])
        alpha = np.cos(np.pi * t / 20)
        inputs.append(alpha * g + (1 - alpha) * 2 * g)
    expected = -oracle(*filters.PRESETS["f1"], np.array(inputs)).sum(axis=0)
    np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-4)


def test_regularisers_go_through_the_filter_and_weight_decay_does_not():
    optimizer = DPSGD(0.1, gradient_filter="f2", weight_decay=0.01, **lr.PRIVATE)
    weights, noise = lr.train(lr.build(optimizer, keras.regularizers.L2(0.1)), 5)
    w, inputs = lr.START, []
    kernel = np.arange(lr.SIZE) < 12
    for t in range(5):
        g = lr.privatized(w, noise.flat(t))
        inputs.append(g + np.where(kernel, 2 * 0.1 * w, 0.0))
        w = w * (1 - 0.1 * 0.01)
        w = w - 0.1 * oracle(*filters.PRESETS["f2"], np.array(inputs))[-1]
    np.testing.assert_allclose(weights[-1], w, rtol=2e-4, atol=1e-5)


# Saving.


@pytest.mark.parametrize("make", [lambda: LowPass.preset("f6"), lambda: OptimalFIR(3, decay=0.8)])
def test_save_and_load_in_mid_filter_continues_exactly(make, tmp_path):
    def model():
        return lr.build(DPAdam(0.1, gradient_filter=make(), **lr.PRIVATE))

    straight, _ = lr.train(model(), 9)
    halfway = model()
    lr.train(halfway, 4)
    halfway.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.sampling = lr.SAMPLING
    loaded.run_eagerly = True
    continued, _ = lr.train(loaded, 5)
    np.testing.assert_array_equal(continued[-1], straight[-1])


def test_configurations_come_back():
    for given_filter in (LowPass([0.2, 0.3], [-0.5]), OptimalFIR(5, "paper", 0.7)):
        optimizer = DPSGD(gradient_filter=given_filter, **PRIVATE)
        serialized = keras.saving.serialize_keras_object(optimizer)
        again = keras.saving.deserialize_keras_object(serialized)
        assert type(again.gradient_filter) is type(given_filter)
        assert again.gradient_filter.get_config() == given_filter.get_config()
    assert DPSGD(**PRIVATE).gradient_filter is None


# Errors.


@pytest.mark.parametrize(
    ("b", "a", "message"),
    [
        ([], [], "at least one"),
        ([0.0], [], "at least one"),
        ([np.nan], [], "finite"),
        ([1.0], [np.inf], "finite"),
        ([[1.0]], [], "list of finite"),
        ([1.0], [-1.0], "pole of modulus 1"),
        ([0.1], [0.9, 1.5], "pole of modulus"),
        ([1.0], [-1.8, 0.85 + 0.2], "pole of modulus"),
        ([1.0, -1.0], [], "zero gain"),
        ([0.0, 1.0], [], "At step 1"),
        ([1.0, -1.0, 1.0], [], "At step 2"),
    ],
)
def test_refuses_filters_that_do_not_work(b, a, message):
    with pytest.raises(ValueError, match=message):
        LowPass(b, a)


def test_refuses_unknown_names_and_arguments():
    with pytest.raises(ValueError, match="no filter 'f7'"):
        DPSGD(gradient_filter="f7", **PRIVATE)
    with pytest.raises(ValueError, match="gradient_filter must be"):
        DPSGD(gradient_filter=3, **PRIVATE)
    for arguments in ({"taps": 1}, {"taps": 2.5}, {"taps": 2, "weighting": "best"}):
        with pytest.raises(ValueError):
            OptimalFIR(**arguments)
    with pytest.raises(ValueError, match="decay"):
        OptimalFIR(2, decay=1.0)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: DPSGD(momentum=0.9, gradient_filter="f1", **PRIVATE),
        lambda: DPRMSprop(momentum=0.9, gradient_filter="f1", **PRIVATE),
        lambda: dp.optimizers.DPOptimizer("adam", gradient_filter="f1", **PRIVATE),
    ],
)
def test_warns_where_filter_and_momentum_both_smooth(optimizer):
    optimizer = optimizer()
    with pytest.warns(UserWarning, match="both smooth"):
        optimizer.build([keras.Variable(np.zeros(3))])


def test_a_filter_that_averages_nothing_goes_with_momentum_unwarned(recwarn):
    def warned(then):
        recwarn.clear()
        sharpness_aware = filters.SharpnessAware(0.1, then)
        optimizer = DPSGD(momentum=0.9, gradient_filter=sharpness_aware, **PRIVATE)
        optimizer.build([keras.Variable(np.zeros(3))])
        return any("both smooth" in str(each.message) for each in recwarn)

    assert not warned(None)
    assert warned("f1")


def test_is_fixed_once_built():
    optimizer = DPSGD(gradient_filter="f1", **PRIVATE)
    optimizer.build([keras.Variable(np.zeros(3))])
    with pytest.raises(ValueError, match="fixed once"):
        optimizer.gradient_filter = "f2"
