"""The planner: against scans of all settings, against published errors, and inside `fit`."""

import functools
import re

import keras
import numpy as np
import pytest

import dp_keras_opt as dp
from dp_keras_opt import noise
from dp_keras_opt.accounting import Sampling, calibrate, plan_noise
from dp_keras_opt.noise import BandedMatrix, BufferedToeplitz, LambdaCGD, Workload, options
from dp_keras_opt.optimizers import DPSGD, DPAdam, DPNesterov, DPOptimizer
from tests.helpers.events import needs_truncation
from tests.helpers.factorizations import inverse, workload

N, B = 600, 20  # 30 steps an epoch
X = np.random.default_rng(0).normal(size=(N, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def sgd(**kwargs):
    return DPSGD(0.1, clip_norm=1.0, **kwargs)


# At equal ε.


@pytest.mark.parametrize(
    ("epsilon", "errors"),
    [(1.0, {1: 20.5, 8: 15.2, 16: 15.5}), (8.0, {16: 4.7, 32: 4.3, 64: 4.2})],
)
def test_the_errors_at_equal_epsilon(epsilon, errors):
    """σ·RMSE for 60,000 examples, batches of 250 and 960 steps, with as many groups as bands."""
    kinds = [Sampling.cyclic_poisson(60_000, 250, g) for g in errors if g > 1]
    kinds += [Sampling.poisson(60_000, 250)] * (1 in errors)
    plan = plan_noise(sgd(), kinds[0], 960, epsilon, 1e-6, samplings=kinds)
    found = {choice.sampling.groups: choice.error for choice in plan.choices}
    for groups, expected in errors.items():
        assert found[groups] == pytest.approx(expected, abs=0.06)
    assert plan.best.sampling.groups == min(errors, key=errors.get)
    assert plan.best.buffers == plan.best.sampling.groups - 1


@pytest.mark.parametrize(
    ("epsilon", "rule", "adjacency"),
    [
        (0.5, {}, "zero_out"),
        (3.0, {"momentum": 0.9}, "zero_out"),
        (20.0, {"momentum": 0.5, "nesterov": True}, "add_or_remove_one"),
    ],
)
def test_within_two_percent_of_a_scan(epsilon, rule, adjacency):
    """Every number of groups and, of each, of bands; every mechanism on epochs in one order."""
    steps, optimizer = 90, sgd(**rule)
    workload = Workload(rule.get("momentum", 0.0), rule.get("nesterov", False))
    plan = plan_noise(optimizer, Sampling.poisson(N, B, adjacency), steps, epsilon, 1e-4, "rdp")

    def error(sampling, mechanisms):
        """Of the best of them; σ is that of one participation, for mechanisms of norm 1."""
        sigma = calibrate(sgd(**rule, noise=mechanisms[0]), sampling, steps, epsilon, 1e-4, "rdp")
        moved = mechanisms[0].sensitivity(steps, sampling.separation)
        if sampling.is_poisson:
            return min(sigma * workload.rmse(each, steps) for each in mechanisms)
        return min(sigma / moved * workload.rmse(each, steps, 30) for each in mechanisms)

    scanned = []
    for groups in (2, 3, 5, 8, 12, 16, 23, 30):
        bands = [BandedMatrix(steps, b, beta) for b in {groups, groups // 2 or 1}
                 for beta in {0.0, workload.momentum}]  # fmt: skip
        scanned.append(error(Sampling.cyclic_poisson(N, B, groups, adjacency), bands))
    if adjacency != "add_or_remove_one":
        fixed = [
            *[BandedMatrix(steps, b, workload.momentum) for b in (1, 5, 10, 20, 30)],
            *[BufferedToeplitz(steps, k, separation=30, momentum=workload.momentum)
              for k in (1, 2, 3, 4)],
            LambdaCGD(steps, separation=30, momentum=workload.momentum),
            *[noise.BandedInverseSquareRoot(steps, p) for p in (2, 8, 30, 64)],
        ]  # fmt: skip
        scanned.append(error(Sampling.fixed_order(N, B, adjacency), fixed))
    assert plan.best.error <= 1.02 * min(scanned)
    assert plan.best.error >= 0.9 * min(scanned)


def test_the_shorter_the_horizon_the_fewer_bands():
    """And within 2% of a scan of groups and bands, made for that horizon or for none."""
    wanted, steps, found = Sampling.poisson(6_000, 100), 120, []

    @functools.cache
    def sigma(groups):  # of any mechanism of at most so many bands
        optimizer = sgd(noise=BandedMatrix(steps, groups))
        sampling = Sampling.cyclic_poisson(6_000, 100, groups)
        return calibrate(optimizer, sampling, steps, 3.0, 1e-5, "rdp")

    for horizon in (None, 30, 8, 2):
        plan = plan_noise(
            sgd(), wanted, steps, 3.0, 1e-5, "rdp", horizon=horizon
        )  # fmt: skip
        found.append(plan.best.sampling.groups)
        mechanism = plan.best.mechanism
        assert isinstance(mechanism, noise.Gaussian) or mechanism.workload.horizon == horizon
        workload = Workload(horizon=horizon)
        scanned = []
        for groups in (2, 3, 4, 6, 8, 12, 15, 20, 30, 40, 60):
            noises = [BandedMatrix(steps, b, horizon=h) for b in {groups, groups // 2}
                      for h in (None, horizon)]  # fmt: skip
            scanned.append(sigma(groups) * min(workload.rmse(each, steps) for each in noises))
        assert plan.best.error <= 1.02 * min(scanned)
    assert found == sorted(found, reverse=True) and found[0] == 8
    assert found[-1] == 1  # independent noise: of a gradient nothing is left two steps later


def test_noise_planned_in_fit_has_the_horizon_that_was_asked_for():
    noise_ = noise.Planned(horizon=4)
    again = noise.Planned.from_config(noise_.get_config())
    assert again == noise_ and again.horizon == 4
    found = noise_.for_run(60, Sampling.cyclic_poisson(N, B, 10), Workload(0.9))
    assert found.workload == Workload(0.9, horizon=4)
    with pytest.raises(ValueError, match="horizon must be None or a number of steps"):
        noise.Planned(horizon=0.5)


def test_levels_are_part_of_the_plan():
    """σ is what `calibrate` finds with them, and the error that of A·diag(α)·C⁻¹, dense."""
    levels = np.repeat(np.linspace(2.0, 0.5, 10), 6)
    optimizer = sgd(momentum=0.5, noise_schedule=levels)
    kinds = [Sampling.poisson(N, B), Sampling.cyclic_poisson(N, B, 6)]
    plan = plan_noise(optimizer, kinds[0], 60, 3.0, 1e-4, "rdp", samplings=kinds)
    of_weights = workload(60, 0.5)
    for choice in plan.choices:
        again = sgd(momentum=0.5, noise_schedule=levels, noise=choice.mechanism)
        sigma = calibrate(again, choice.sampling, 60, 3.0, 1e-4, "rdp")
        assert choice.noise_multiplier == sigma
        rows = of_weights @ np.diag(levels)
        if choice.mechanism.is_correlated:
            rows = rows @ inverse(choice.mechanism, 60)
        expected = sigma * np.sqrt(np.mean(np.sum(rows**2, axis=1)))
        assert choice.error == pytest.approx(expected)


def test_sigma_is_that_of_calibrate():
    optimizer = sgd(momentum=0.9)
    before = optimizer.get_config()
    plan = plan_noise(
        optimizer,
        Sampling.poisson(N, B, "zero_out"),
        epochs=2,
        epsilon=3.0,
        delta=1e-4,
        accountant="rdp",
    )
    assert optimizer.get_config() == before and optimizer.plan is None
    for choice in plan.choices:
        again = sgd(momentum=0.9, noise=choice.mechanism)
        assert choice.steps == 2 * choice.sampling.steps_per_epoch
        sigma = calibrate(again, choice.sampling, choice.steps, 3.0, 1e-4, "rdp")
        assert choice.noise_multiplier == sigma
    errors = [choice.error for choice in plan.choices]
    assert errors == sorted(errors) and len({choice.sampling for choice in plan.choices}) == len(
        errors
    )


@pytest.mark.parametrize("size", [20, 19, 350])
@pytest.mark.parametrize(
    ("draw", "kwargs"),
    [("balls_in_bins", {}), ("fixed_order_epochs", {"drop_remainder": False}),
     ("fixed_order_epochs", {"drop_remainder": True})],
)  # fmt: skip
def test_the_error_is_that_of_the_mean_gradient_where_batches_are_not_full(draw, kwargs, size):
    """Batches of 19 of 600 have 18.75 units in the mean, those of 350 have 300."""
    batches = getattr(dp.data, draw)((X, Y), size, adjacency="zero_out", **kwargs)
    in_a_batch = np.mean([np.sum(info.mask) for _, _, info in batches])
    steps = 2 * batches.steps_per_epoch
    wanted = batches.sampling
    (choice,) = plan_noise(sgd(), wanted, steps, 3.0, 1e-4, samplings=[wanted]).choices
    of_sums = choice.noise_multiplier * Workload().spread(choice.mechanism, steps)
    assert choice.error / size == pytest.approx(of_sums / in_a_batch)


@pytest.mark.parametrize(
    ("steps", "groups"), [(157, (2, 3, 8, 16, 23)), (200, (2, 4, 8, 20, 25)), (6, (2, 3, 6))]
)
def test_steps_are_whole_rounds(steps, groups):
    """Groups that divide the steps are preferred; else the steps are more than asked for."""
    plan = plan_noise(
        sgd(), Sampling.poisson(N, B, "zero_out"), steps, epsilon=5.0, delta=1e-4, accountant="rdp"
    )
    of_kind = {(c.sampling.kind, c.sampling.groups): c.steps for c in plan.choices}
    assert of_kind.pop(("poisson", 1)) == steps
    assert of_kind.pop(("fixed_order", 1)) == -(-steps // 30) * 30
    assert {count for _, count in of_kind} == set(groups)
    for (_, count), length in of_kind.items():
        assert length == -(-steps // count) * count
    choice = next(c for c in plan.choices if c.sampling.groups > 1)
    batches = dp.data.cyclic_poisson((X, Y), B, choice.sampling.groups, choice.steps,
                                     adjacency="zero_out")  # fmt: skip
    model = fit(sgd(noise=choice.mechanism), batches, epochs=1, budget=5.0)
    assert model.optimizer.noise_multiplier == pytest.approx(choice.noise_multiplier, rel=1e-9)


# Limits.


def test_memory_is_limited_in_bytes():
    wanted = Sampling.poisson(N, B, "zero_out")
    for limit, most in ((0, 0), (399, 0), (400, 1), (2_399, 5)):
        plan = plan_noise(
            sgd(), wanted, 60, 5.0, 1e-4, "rdp", num_weights=100, memory_limit=limit
        )  # fmt: skip
        assert max(choice.buffers for choice in plan.choices) <= most
        if most == 5:  # what fits is used, also between powers of two
            assert any(getattr(c.mechanism, "bands", 0) == 6 for c in plan.choices)
        assert most or any(isinstance(choice.mechanism, LambdaCGD) for choice in plan.choices)
        assert " MB" in str(plan)


def test_the_table_says_how_much_worse_the_others_are():
    kinds = [Sampling.poisson(N, B), Sampling.cyclic_poisson(N, B, 4)]
    plan = plan_noise(sgd(), kinds[0], 60, 5.0, 1e-4, "rdp", samplings=kinds)
    first, second = str(plan).splitlines()[1:]
    assert "BandedMatrix, 4 bands" in first and "best" in first and "3 × model" in first
    worse = plan.choices[1].error / plan.best.error - 1
    assert "Gaussian" in second and f"+{worse:.1%}" in second and "0 × model" in second


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"steps": 9, "epochs": 1}, "steps or epochs"),
        ({}, "steps or epochs"),
        ({"steps": 0}, "steps"),
        (
            {"steps": 9, "epsilon": 1e-12, "delta": 1e-15, "sampling": Sampling.full(N)},
            "cannot be met",
        ),
        ({"steps": 9, "memory_limit": 100}, "num_weights"),
        ({"steps": 9, "num_weights": 10, "memory_limit": -1}, "number of bytes"),
    ],
)
def test_refuses_what_cannot_be_planned(arguments, words):
    arguments = {"epsilon": 2.0, "delta": 1e-4, "sampling": Sampling.poisson(N, B)} | arguments
    with pytest.raises(ValueError, match=words):
        plan_noise(sgd(), **arguments)


def test_says_what_is_nearest_to_the_impossible():
    with pytest.raises(ValueError, match=r"Use at most bands=4, or take more steps"):
        BandedMatrix(4, 8)
    with pytest.raises(ValueError, match=r"Use at most inverse_bands=4, or take more steps"):
        noise.BandedInverseSquareRoot(4, 8)
    sampling = Sampling.without_replacement(N, B)
    with pytest.raises(ValueError, match=r"even noise_multiplier=\S+ has epsilon=(\S+)") as refused:
        plan_noise(sgd(), sampling, 9, 1e-12, 1e-15, "rdp", samplings=[sampling])
    nearest = float(re.search(r"has epsilon=(\S+)", str(refused.value))[1])
    assert plan_noise(sgd(), sampling, 9, 1.1 * nearest, 1e-15, "rdp", samplings=[sampling])
    with pytest.warns(UserWarning, match="no copy of the 1000 weights, which takes 4000"):
        plan = plan_noise(
            sgd(), Sampling.poisson(N, B), 9, 2.0, 1e-4, num_weights=1000, memory_limit=3999
        )
    assert {choice.buffers for choice in plan.choices} == {0}


# Of given batches.


SAMPLINGS = {
    "poisson": Sampling.poisson(N, B),
    "truncated": Sampling.truncated_poisson(N, B, 40),
    "balls": Sampling.balls_in_bins(N, B),
    "subsets": Sampling.without_replacement(N, B),
    "shuffled": Sampling.shuffled(N, B),
    "full": Sampling.full(N),
    "one order": Sampling.fixed_order(N, B),
    "in turns": Sampling.cyclic_poisson(N, B, 6),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=needs_truncation if kind == "truncated" else ())
        for kind in SAMPLINGS
    ],
)
@pytest.mark.parametrize("steps", [1, 7, 60])
def test_every_option_is_priced(kind, steps):
    sampling = SAMPLINGS[kind]
    found = options(sampling, steps, Workload())
    assert [option.error for option in found] == sorted(option.error for option in found)
    for option in {found[0].mechanism: found[0], found[-1].mechanism: found[-1]}.values():
        optimizer = sgd(
            noise=option.mechanism, batch_size=sampling.batch_size, noise_multiplier=9.0
        )
        assert np.isfinite(dp.accounting.epsilon(optimizer, sampling, steps, 1e-4))
    correlated = kind in ("one order", "in turns") and steps > 1
    assert found[0].mechanism.is_correlated == correlated


def test_more_epochs_than_one_count():
    """With one participation a bound on it, the parameters are those of three."""
    found = options(Sampling.fixed_order(N, B), 90, Workload())
    (blt, *_) = [o for o in found if isinstance(o.mechanism, BufferedToeplitz)]
    assert blt.mechanism.separation == 30
    assert blt.error == pytest.approx(Workload().rmse(blt.mechanism, 90, 30))
    (plain,) = [o for o in found if isinstance(o.mechanism, noise.Gaussian)]
    assert plain.error == pytest.approx(Workload().rmse(None, 90) * 3**0.5)


# In training.


def fit(optimizer, batches, epochs=2, budget=4.0, **kwargs):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    model.compile(optimizer, "mse", **kwargs)
    callback = dp.callbacks.PrivacyBudget(budget, 1e-4, "rdp")
    model.fit(batches, epochs=epochs, verbose=0, callbacks=[callback])
    assert budget - 0.01 < model.ledger.epsilon(1e-4, "rdp") <= budget
    return model


@pytest.mark.parametrize(
    ("draw", "kind"),
    [
        (lambda: dp.data.cyclic_poisson((X, Y), B, groups=6), BandedMatrix),
        (lambda: dp.data.fixed_order_epochs((X, Y), B), (BufferedToeplitz, BandedMatrix)),
        (lambda: dp.data.poisson_batches((X, Y), B), noise.Gaussian),
        (lambda: dp.data.balls_in_bins((X, Y), B), noise.Gaussian),
    ],
)
def test_planned_noise_is_settled_by_fit(draw, kind, tmp_path):
    batches = draw()
    model = fit(sgd(noise="planned", momentum=0.9), batches)
    chosen = model.optimizer.noise
    best = options(batches.sampling, 60, Workload(0.9))[0].mechanism
    assert isinstance(chosen, kind) and chosen == best and not chosen.is_open
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.noise == chosen
    assert loaded.ledger.epsilon(1e-4) == pytest.approx(model.ledger.epsilon(1e-4))


def test_planned_noise_of_arrays_and_of_little_memory():
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    model.compile(sgd(noise="planned"), "mse")
    budget = dp.callbacks.PrivacyBudget(4.0, 1e-4, "rdp")
    model.fit(X, Y, batch_size=B, verbose=0, callbacks=[budget])
    assert isinstance(model.optimizer.noise, noise.Gaussian)
    model = fit(
        sgd(noise=noise.Planned(max_buffers=2)), dp.data.cyclic_poisson((X, Y), B, groups=6)
    )
    assert model.optimizer.noise == BandedMatrix(60, 3)


def test_an_interrupted_plan_goes_on_with_the_noise_that_it_found(tmp_path):
    """A script that is run again finds the same mechanism, and the multiplier of its plan."""
    multipliers = []
    for epochs in (1, 2):
        inputs = keras.Input((3,))
        model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
        model.compile(sgd(noise="planned"), "mse")
        model.ledger = dp.accounting.Ledger(tmp_path / "ledger.jsonl")
        budget = dp.callbacks.PrivacyBudget(4.0, 1e-4, "rdp")
        stop = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs, model=model, epochs=epochs: setattr(
                model, "stop_training", epoch + 1 == epochs
            )
        )
        batches = dp.data.cyclic_poisson((X, Y), B, groups=6)
        model.fit(batches, epochs=3, verbose=0, callbacks=[budget, stop])
        model.ledger.unlock()
        multipliers.append(model.optimizer.noise_multiplier)
        assert isinstance(model.optimizer.noise, BandedMatrix)
    assert multipliers[0] == multipliers[1]


def test_unsettled_noise_is_refused():
    optimizer = sgd(noise="planned", batch_size=B, noise_multiplier=1.0)
    assert optimizer.noise == noise.Planned() and noise.get("planned").is_open
    with pytest.raises(ValueError, match="does not know yet"):
        optimizer.build([keras.Variable([1.0])])
    for use in (
        lambda m: m.event(1.0),
        lambda m: m.std(0),
        lambda m: m.unit_noise([(2,)], None),
    ):
        with pytest.raises(ValueError, match="not chosen yet"):
            use(optimizer.noise)


# The workload of a rule.


class Own(keras.optimizers.schedules.LearningRateSchedule):
    """A user's schedule, not registered with Keras."""

    def __call__(self, step):
        return 1.0


def test_the_workload_of_each_rule():
    private = {"clip_norm": 1.0}
    rate = keras.optimizers.schedules.CosineDecay(0.1, 10)
    rates = tuple(float(rate(step)) for step in range(10))
    for optimizer, expected in (
        (DPSGD(0.1, **private), Workload()),
        (DPSGD(0.1, momentum=0.5, nesterov=True, **private), Workload(0.5, True)),
        (DPSGD(rate, momentum=0.5, **private), Workload(0.5, False, rates)),
        (DPSGD(Own(), **private), Workload(0.0, False, (1.0,) * 10)),
        (DPSGD(0.5, weight_decay=0.125, **private), Workload(horizon=16.0)),
        (DPSGD(rate, weight_decay=0.1, **private), Workload(learning_rates=rates)),
        (DPAdam(0.1, beta_1=0.8, **private), Workload(0.8)),
        (DPAdam(0.1, gradient_filter="f1", **private), Workload()),
        (DPNesterov(0.1, momentum=0.7, **private), Workload(0.7)),
        (
            DPOptimizer(keras.optimizers.Lion(rate, beta_1=0.6), **private),
            Workload(0.6, False, rates),
        ),
        (dp.optimizers.DPAdagrad(0.1, **private), Workload()),
    ):
        assert optimizer.workload(10) == expected
