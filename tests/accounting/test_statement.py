import math
import re

import pytest

from dp_keras_opt import accounting
from dp_keras_opt.accounting import Ledger, Sampling
from dp_keras_opt.accounting.groups import group_epsilon, group_privacy
from dp_keras_opt.accounting.privacy_statement import rounded_up
from dp_keras_opt.noise import schedules
from tests.helpers.events import HAS_MIXTURES

DELTA = 1e-6
POISSON = Sampling.poisson(80_000, 64, unit="rating")


def flat(text):
    return " ".join(text.split())


def test_says_what_is_guaranteed_and_what_is_not(make_optimizer):
    optimizer = make_optimizer(0.5, clip_norm=2.0)
    text = accounting.statement(optimizer, POISSON, 1250, DELTA)
    assert text == Ledger.of(optimizer, POISSON, 1250).statement(DELTA)
    for part in (
        "for one rating",
        "one rating added or removed (add_or_remove_one)",
        "1250 steps, Gaussian noise on the mean with noise multiplier sigma = 0.5",
        "clip norm C = 2,",
        "expected batch size B = 64, n = 80000 ratings",
        "Poisson sampling: each rating",
        "delta = 1e-06",
        "Accounting: privacy loss distributions (PLD), dp-accounting 0.",
        "the smallest of the bounds by PLD and RDP",
        "metrics and losses shown during training",
        "early stopping",
        "hyper-parameter tuning",
        "Normalization.adapt",
        "non-finite gradients",
        "floating-point",
    ):
        assert part in flat(text)
    assert "HEURISTIC" not in text and "Groups" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_epsilon_is_rounded_up(make_optimizer):
    for steps in range(1, 120, 15):
        epsilon = accounting.epsilon(make_optimizer(1.0), POISSON, steps, DELTA)
        text = accounting.statement(make_optimizer(1.0), POISSON, steps, DELTA)
        shown = float(re.search(r"epsilon = (\d+\.\d{3})", flat(text)).group(1))
        assert epsilon <= shown < epsilon + 0.001 + 1e-12


def test_heuristic_is_said_loudly(make_optimizer):
    sampling = Sampling.shuffled_accounted_as_poisson(80_000, 64)
    text = flat(accounting.statement(make_optimizer(0.5), sampling, 10, DELTA))
    assert text.count("HEURISTIC") == 3  # the guarantee, what it means, and the sampling


def test_no_noise_is_said_plainly(make_optimizer):
    optimizer = make_optimizer(1.0, ratios=(1.0, 0.0))
    text = flat(accounting.statement(optimizer, POISSON, 10, DELTA, group_size=2))
    assert "NO DIFFERENTIAL PRIVACY: epsilon is infinite" in text
    assert "Steps 0 to 9 released the mean of query 1 without noise" in text
    assert "no guarantee follows" in text


def test_parts_and_schedules(gaussians, make_ledger):
    ledger = make_ledger(POISSON, 3, schedule=schedules.Fixed([1.0, 2.0, 4.0, 9.0]))
    ledger.begin(gaussians(2.0), POISSON)
    ledger.reserve(5)
    text = flat(ledger.statement(DELTA, "pld"))
    assert "Training, part 1 of 2: 3 steps" in text
    assert "sigma = 1 times schedule factors from 1 to 4" in text
    assert "Training, part 2 of 2: 5 steps" in text
    assert "privacy loss distributions (PLD)" in text


def test_nothing_ran(gaussians):
    ledger = Ledger()
    ledger.begin(gaussians(1.0), POISSON)
    assert "nothing was released" in ledger.statement(DELTA)


def test_group_privacy():
    # Definition: k changes of one unit each, deltas growing by e^epsilon.
    epsilon, delta = group_privacy(0.7, 1e-6, 4)
    assert epsilon == pytest.approx(2.8)
    assert delta == pytest.approx(1e-6 * sum(math.exp(0.7 * i) for i in range(4)))
    assert group_privacy(0.0, 1e-6, 5) == (0.0, pytest.approx(5e-6))
    assert group_privacy(50.0, 1e-6, 40) == (2000.0, 1.0)
    assert group_privacy(math.inf, 1e-6, 2) == (math.inf, 1.0)


def test_group_statement(make_optimizer):
    ledger = Ledger.of(make_optimizer(2.0), POISSON, 100)
    for sampling, ending in (
        (POISSON, ", where all of them take part or none does." if HAS_MIXTURES else "."),
        (Sampling.cyclic_poisson(80_000, 64, 2, unit="rating"), "."),
    ):
        ledger = Ledger.of(make_optimizer(2.0), sampling, 100)
        text = flat(ledger.statement(DELTA, group_size=3))
        found = re.search(r"any 3 ratings together, epsilon = (\S+) at delta = 1e-06(.*?\.) ", text)
        epsilon, _ = group_epsilon(ledger.segments, 3, DELTA)
        assert epsilon <= float(found.group(1)) <= epsilon + 0.001
        assert found.group(2) == ending
    loud = flat(accounting.statement(make_optimizer(0.3), sampling, 9999, DELTA, group_size=300))
    assert "for any 300 ratings together no guarantee follows" in loud


def test_the_group_is_told_the_guarantee_of_the_plan(make_ledger):
    stopped = make_ledger(Sampling.shuffled(1000, 10), 300, 9.0)
    stopped.plan(700)
    text = flat(stopped.statement(DELTA, group_size=2))
    planned = make_ledger(Sampling.shuffled(1000, 10), 1000, 9.0)
    expected = rounded_up(group_epsilon(planned.segments, 2, DELTA).epsilon)
    assert f"for any 2 examples together, epsilon = {expected} at delta" in text


@pytest.mark.parametrize("group_size", [0, 1.5, True, "2"])
def test_refuses_group_size(make_optimizer, group_size):
    with pytest.raises(ValueError, match="group_size must be an integer >= 1"):
        accounting.statement(make_optimizer(1.0), POISSON, 1, DELTA, group_size=group_size)
