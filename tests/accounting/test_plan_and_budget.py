"""What a run is meant to be: its plan, its budget, and the noise that `calibrate` finds for it."""

import dataclasses
import json

import pytest

from dp_keras_opt import accounting
from dp_keras_opt.accounting import Budget, Ledger, Plan, Sampling

DELTA = 1e-5
POISSON = Sampling.poisson(1000, 50)
PLAN = Plan(POISSON, 60, 2.0, DELTA, "pld", num_trainings=3, noise_multiplier=1.25)


@dataclasses.dataclass
class FakeBatches:
    """What `calibrate` asks of batches."""

    sampling: Sampling
    steps_per_epoch: int | None


@pytest.fixture
def make(make_optimizer):
    return lambda batch_size=50: make_optimizer(batch_size=batch_size)


def test_a_plan_survives_json():
    assert Plan.from_config(json.loads(json.dumps(PLAN.get_config()))) == PLAN


def test_a_ledger_keeps_the_plan_of_a_run(gaussians, tmp_path):
    ledger = Ledger(tmp_path / "spent.jsonl")
    ledger.begin(gaussians(1.25), POISSON, plan=PLAN)
    ledger.reserve(5)
    ledger.begin(gaussians(1.0), POISSON)
    ledger.reserve(2)
    ledger.unlock()
    for again in (Ledger.from_json(ledger.to_json()), Ledger.read(tmp_path / "spent.jsonl")):
        assert [segment.plan for segment in again.segments] == [PLAN, None]
    assert '"plan"' not in json.dumps([s.to_config() for s in ledger.segments if s.plan is None])


def test_a_plan_changes_no_epsilon(gaussians, make_ledger):
    ledger = Ledger()
    ledger.begin(gaussians(1.0), POISSON, plan=dataclasses.replace(PLAN, steps=1))
    ledger.reserve(40)
    assert ledger.epsilon(DELTA) == make_ledger(POISSON, 40).epsilon(DELTA)
    assert ledger.epsilon_as_planned(DELTA) == ledger.epsilon(DELTA)


def test_histories_of_one_run_with_two_plans_were_altered(gaussians):
    ledgers = Ledger(), Ledger()
    for ledger, steps in zip(ledgers, (60, 61), strict=True):
        plan = dataclasses.replace(PLAN, steps=steps)
        ledger.begin(gaussians(1.0), POISSON, run="same", plan=plan)
        ledger.reserve(3)
    with pytest.raises(ValueError, match="altered"):
        ledgers[0].merge(ledgers[1])


def test_calibrate_says_what_it_planned(make):
    optimizer = make()
    sigma = accounting.calibrate(optimizer, POISSON, 60, 2.0, DELTA, num_trainings=3)
    assert optimizer.plan == Plan(POISSON, 60, 2.0, DELTA, "auto", 3, sigma)


@pytest.mark.parametrize(
    ("sampled", "steps"),
    [
        (POISSON, 40),  # ceil(1000 / 50) steps an epoch
        (FakeBatches(POISSON, 7), 14),
    ],
)
def test_two_epochs_have_the_steps_of_the_batches(make, sampled, steps):
    by_epochs, by_steps = make(), make()
    accounting.calibrate(by_epochs, sampled, epochs=2, epsilon=2.0, delta=DELTA)
    accounting.calibrate(by_steps, sampled, steps, epsilon=2.0, delta=DELTA)
    assert by_epochs.noise_multiplier == by_steps.noise_multiplier
    assert by_epochs.plan.steps == steps
    assert by_epochs.plan.sampling == POISSON
    spent = accounting.epsilon(by_epochs, POISSON, steps, DELTA)
    assert 2.0 * (1 - 1e-3) < spent <= 2.0


def test_calibrate_sets_a_batch_size_that_is_not_set(make):
    optimizer = make(batch_size=None)
    accounting.calibrate(optimizer, FakeBatches(POISSON, 7), epochs=1, epsilon=2.0, delta=DELTA)
    assert optimizer.batch_size == 50
    with pytest.raises(ValueError, match="divides by batch_size=64"):
        accounting.calibrate(make(batch_size=64), POISSON, 7, epsilon=2.0, delta=DELTA)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "steps or epochs"),
        ({"steps": 3, "epochs": 1}, "steps or epochs"),
        ({"epochs": 0}, "epochs must be an integer >= 1"),
        ({"epochs": 1, "sampling": FakeBatches(POISSON, None)}, "no known length"),
        ({"steps": 3, "sampling": [1, 2]}, "sampling must be a"),
        ({"steps": 3, "epsilon": None}, "epsilon must be a positive"),
        ({"steps": 3, "delta": None}, "delta must be a number"),
    ],
)
def test_what_calibrate_cannot_plan(make, given, message):
    with pytest.raises(ValueError, match=message):
        accounting.calibrate(
            make(), **{"sampling": POISSON, "epsilon": 2.0, "delta": DELTA} | given
        )


def test_the_old_names_warn(make):
    with pytest.warns(FutureWarning, match="num_trainings"):
        old = accounting.calibrate(make(), POISSON, 60, 2.0, DELTA, runs=3)
    assert old == accounting.calibrate(make(), POISSON, 60, 2.0, DELTA, num_trainings=3)
    with pytest.warns(FutureWarning, match="Plan"):
        assert accounting.calibration.Calibration is Plan


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_a_budget_affords_what_it_bounds(gaussians, make_ledger, accountant):
    budget = Budget(4.0, DELTA, accountant)
    ledger = Ledger()
    ledger.begin(gaussians(1.0), POISSON)
    limit = budget.limit(ledger)
    assert make_ledger(POISSON, limit).epsilon(DELTA, accountant) <= 4.0
    assert make_ledger(POISSON, limit + 1).epsilon(DELTA, accountant) > 4.0
    ledger.reserve(limit - 1)
    assert budget.affords(ledger, 1) and not budget.affords(ledger, 2)


def test_a_budget_looks_again_when_others_have_spent(gaussians, monkeypatch):
    budget, ledger, asked = Budget(4.0, DELTA), Ledger(), []
    find = Ledger.affordable_steps
    monkeypatch.setattr(
        Ledger, "affordable_steps", lambda self, *args: asked.append(args) or find(self, *args)
    )
    ledger.begin(gaussians(1.0), POISSON)
    alone = budget.limit(ledger)
    ledger.reserve(3)
    assert budget.limit(ledger) == alone and len(asked) == 1
    other = Ledger()
    other.begin(gaussians(1.0), POISSON)
    other.reserve(10)
    ledger.absorb(other)
    assert budget.limit(ledger) == alone - 10 and len(asked) == 2
    budget.epsilon = 5.0
    assert budget.limit(ledger) > alone and len(asked) == 3


def test_a_budget_needs_numbers_and_a_segment(gaussians):
    assert str(Budget(1.5, 1e-6)) == "ε = 1.5 at δ = 1e-06"
    assert Budget(1.5, 1e-6) == Budget(1.5, 1e-6) != Budget(1.5, 1e-6, "pld")
    for wrong in ((-1.0, DELTA), (1.0, 2.0), (1.0, DELTA, "other")):
        with pytest.raises(ValueError):
            Budget(*wrong)
    ledger = Ledger()
    ledger.begin(gaussians(1.0), POISSON)
    ledger.reserve(2)
    ledger.close()
    with pytest.raises(ValueError, match="no current segment"):
        Budget(1.0, DELTA).limit(ledger)
    with pytest.raises(ValueError, match="no current segment"):
        Budget(1.0, DELTA).affords(ledger, 1)
