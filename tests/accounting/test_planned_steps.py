"""What a ledger says where results may have stopped the training: the guarantee of the plan."""

import json
import math
import pathlib
import re

import dp_accounting
import numpy as np
import pytest
from scipy import optimize, stats

from dp_keras_opt.accounting import Ledger, RenyiFilter, Sampling
from dp_keras_opt.accounting.privacy_filters import FilterBudget
from dp_keras_opt.accounting.privacy_statement import not_covered
from dp_keras_opt.noise import BandedMatrix, Laplace, Release

DELTA = 1e-5
POISSON = Sampling.poisson(1000, 50)
SHUFFLED = Sampling.shuffled(1000, 50)
DATA = pathlib.Path(__file__).parent / "data"


def _epsilon(steps, delta=DELTA):
    """ε of Poisson steps at σ = 1, by dp_accounting itself."""
    event = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.0))
    accountant = dp_accounting.rdp.RdpAccountant()
    return accountant.compose(dp_accounting.SelfComposedDpEvent(event, steps)).get_epsilon(delta)


def _fit(ledger, releases, planned, ran, ended=False, sampling=POISSON, **kwargs):
    """As a `fit` that planned so many steps and ran so many; `ended` if nothing stopped it."""
    ledger.begin(releases, sampling, **kwargs)
    ledger.plan(planned)
    ledger.reserve(ran)
    ledger.settle(ran, ran)
    if ended:
        ledger.fulfil(ledger.current.run)
    return ledger


def _said(ledger, accountant="rdp", delta=DELTA):
    """(ε of the guarantee, ε if the stop had been fixed or None) as the statement has them."""
    text = " ".join(ledger.statement(delta, accountant).split())
    promised = re.search(r"with epsilon = ([\d.]+) at", text).group(1)
    fixed = re.search(r"fixed beforehand: epsilon = ([\d.]+) at", text)
    return float(promised), fixed and float(fixed.group(1))


def _up(epsilon):
    return pytest.approx(math.ceil(epsilon * 1000) / 1000)


def test_without_a_plan_nothing_is_said(make_ledger):
    ledger = make_ledger(POISSON, 40)
    assert _said(ledger) == (_up(_epsilon(40)), None)
    assert ledger.epsilon_as_planned(DELTA, "rdp") == ledger.epsilon(DELTA, "rdp")
    assert Ledger().epsilon_as_planned(DELTA, "rdp") == 0.0


def test_a_stop_has_the_guarantee_of_the_plan(gaussians):
    ledger = _fit(Ledger(), gaussians(1.0), planned=100, ran=40)
    assert _said(ledger) == (_up(_epsilon(100)), _up(_epsilon(40)))
    assert ledger.epsilon(DELTA, "rdp") == pytest.approx(_epsilon(40))
    assert ledger.epsilon_as_planned(DELTA, "rdp") == pytest.approx(_epsilon(100))
    assert "40 steps of 100 planned" in " ".join(ledger.statement(DELTA).split())


def test_what_ended_by_itself_is_exact(gaussians):
    ledger = _fit(Ledger(), gaussians(1.0), planned=100, ran=40, ended=True)
    assert _said(ledger) == (_up(_epsilon(40)), None)


@pytest.mark.parametrize(
    ("second", "guarantee"),
    [((60, 60), 100), ((60, 10), 100), ((100, 100), 140), ((100, 10), 140), ((10, 10), 100)],
)
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("as_one", [False, True])
def test_of_several_fits_the_dearest_time_counts(gaussians, second, guarantee, ended, as_one):
    planned, ran = second
    ledger = _fit(Ledger(), gaussians(1.0), planned=100, ran=40)
    if as_one:  # the same segment goes on
        ledger.plan(planned)
        ledger.reserve(ran)
        ledger.settle(ran, ran)
        if ended:
            ledger.fulfil(ledger.current.run)
    else:
        _fit(ledger, gaussians(1.0), planned, ran, ended)
    if ended:
        guarantee = max(100, 40 + ran)
    for each in (ledger, Ledger.from_json(ledger.to_json())):
        assert each.epsilon_as_planned(DELTA, "rdp") == pytest.approx(_epsilon(guarantee))


def test_steps_without_a_plan_after_a_stop(gaussians):
    ledger = _fit(Ledger(), gaussians(1.0), planned=100, ran=40)
    ledger.begin(gaussians(1.0), POISSON)
    ledger.reserve(90)
    assert ledger.epsilon_as_planned(DELTA, "rdp") == pytest.approx(_epsilon(130))


def test_histories_of_which_none_came_first_count_with_their_plans(gaussians):
    first = _fit(Ledger(), gaussians(1.0), planned=100, ran=40)
    second = _fit(Ledger(), gaussians(1.0), planned=60, ran=20)
    for one, other in ((first, second), (second, first)):
        both = Ledger.from_json(one.to_json())
        both.merge(other)
        assert both.epsilon_as_planned(DELTA, "rdp") == pytest.approx(_epsilon(160))
        _fit(both, gaussians(1.0), planned=5, ran=5, ended=True)  # 40 + 20 + 5
        assert both.epsilon_as_planned(DELTA, "rdp") == pytest.approx(_epsilon(160))
        _fit(both, gaussians(1.0), planned=200, ran=1)
        assert both.epsilon_as_planned(DELTA, "rdp") == pytest.approx(_epsilon(65 + 200))


def test_a_run_that_went_on_elsewhere_was_not_over(gaussians):
    first = _fit(Ledger(), gaussians(1.0), planned=100, ran=20)
    second = Ledger.from_json(first.to_json())
    _fit(second, gaussians(1.0), planned=10, ran=10, ended=True)
    assert second.epsilon_as_planned(DELTA, "rdp") == pytest.approx(_epsilon(100))
    first.reserve(30)
    second.merge(first)
    assert second.epsilon_as_planned(DELTA, "rdp") == pytest.approx(_epsilon(110))


def test_merging_takes_the_later_record_of_a_run(gaussians):
    ledger = _fit(Ledger(), gaussians(1.0), planned=100, ran=20)
    checkpoint = Ledger.from_json(ledger.to_json())
    ledger.reserve(30)
    ledger.settle(30, 30)
    ledger.fulfil(ledger.current.run)  # the data ended
    for one, other in ((ledger, checkpoint), (checkpoint, ledger)):
        one.merge(other)
        assert one.epsilon_as_planned(DELTA, "rdp") == pytest.approx(_epsilon(50))


def test_of_records_with_as_many_steps_the_one_that_knows_the_end_counts(gaussians):
    ledger = _fit(Ledger(), gaussians(1.0), planned=math.inf, ran=50)
    checkpoint = Ledger.from_json(ledger.to_json())
    ledger.fulfil(ledger.current.run)
    for one, other in ((ledger, checkpoint), (checkpoint, ledger)):
        one.absorb(other)
        assert one.segments[0].planned == 50
    ledger = _fit(Ledger(), gaussians(1.0), planned=100, ran=50)
    content = json.loads(ledger.to_json())
    content["segments"][0]["planned"] = 300
    ledger.merge(Ledger.from_json(json.dumps(content)))  # neither does: the larger plan
    assert ledger.epsilon_as_planned(DELTA, "rdp") == pytest.approx(_epsilon(300))


def test_absorbing_goes_on_with_the_current_segment(gaussians, make_ledger):
    ledger, other = make_ledger(POISSON, 50), make_ledger(POISSON, 20)
    run = ledger.current.run
    ledger.absorb(other)
    ledger.absorb(Ledger.from_json(ledger.to_json()))
    ledger.reserve(5)
    assert ledger.steps == 75 and ledger.current.run == run
    longer = Ledger.from_json(ledger.to_json().replace('"steps": 55', '"steps": 60'))
    ledger.absorb(longer)  # somebody went on with it
    assert ledger.steps == 80 and ledger.current is None


def test_a_plan_needs_a_segment():
    with pytest.raises(ValueError, match="call begin"):
        Ledger().plan(5)


def test_a_plan_of_unknown_length(gaussians):
    ledger = _fit(Ledger(), gaussians(1.0), planned=math.inf, ran=40)
    for each in (ledger, Ledger.from_json(ledger.to_json())):
        text = " ".join(each.statement(DELTA).split())
        assert _said(each) == (_up(_epsilon(40)), None)
        assert "holds only if the stop was fixed beforehand" in text
    json.loads(ledger.to_json(), parse_constant=pytest.fail)  # JSON has no infinity
    ledger.fulfil(ledger.current.run)
    assert "fixed beforehand" not in " ".join(ledger.statement(DELTA).split())


def test_a_plan_ends_with_the_schedule(gaussians):
    schedule = [1.0, 2.0] * 25
    ledger = _fit(Ledger(), gaussians(1.0), math.inf, 40, schedule=schedule)
    whole = Ledger()
    whole.begin(gaussians(1.0), POISSON, schedule=schedule)
    whole.reserve(50)
    assert ledger.epsilon_as_planned(DELTA, "rdp") == pytest.approx(whole.epsilon(DELTA, "rdp"))
    assert _said(ledger) == (_up(whole.epsilon(DELTA, "rdp")), _up(ledger.epsilon(DELTA, "rdp")))


def test_a_plan_of_correlated_noise():
    sampling = Sampling.fixed_order(100, 10)
    releases = (Release(0, "mean", 2.0, BandedMatrix(30, 2)),)
    ledger = _fit(Ledger(), releases, 1000, 10, sampling=sampling)
    whole = Ledger()
    whole.begin(releases, sampling)
    whole.reserve(30)
    assert ledger.epsilon_as_planned(DELTA, "rdp") == pytest.approx(whole.epsilon(DELTA, "rdp"))
    run = ledger.current.run  # resumed under another name: what was planned goes along
    ledger.resume(run, 10)
    ledger.plan(5)
    ledger.reserve(5)
    ledger.settle(5, 5)
    ledger.fulfil(ledger.current.run)
    assert ledger.epsilon_as_planned(DELTA, "rdp") == pytest.approx(whole.epsilon(DELTA, "rdp"))


def test_a_plan_within_a_period_costs_no_more(gaussians):
    """Of shuffled epochs each that was begun counts in full."""
    ledger = _fit(Ledger(), gaussians(1.0), 20, 5, sampling=SHUFFLED)
    assert _said(ledger)[1] is None
    ledger = _fit(Ledger(), gaussians(1.0), 21, 5, sampling=SHUFFLED)
    assert _said(ledger)[1] is not None


def test_other_accountants(gaussians):
    ledger = _fit(Ledger(), gaussians(1.0), planned=100, ran=40)
    event = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.0))

    def pld(steps):
        accountant = dp_accounting.pld.PLDAccountant()
        accountant.compose(dp_accounting.SelfComposedDpEvent(event, steps))
        return accountant.get_epsilon(DELTA)

    assert _said(ledger, "pld") == (_up(pld(100)), _up(pld(40)))
    pure = _fit(Ledger(), (Release(0, "mean", 10.0, Laplace()),), 100, 40)
    ratio = pure.epsilon_as_planned(0.0, "pure") / pure.epsilon(0.0, "pure")
    assert ratio == pytest.approx(100 / 40)


# The file.


def test_the_file_knows_the_plan_before_a_step_runs(tmp_path, gaussians):
    path = tmp_path / "spent.jsonl"
    ledger = Ledger(path)
    ledger.begin(gaussians(1.0), POISSON)
    ledger.plan(500)
    ledger.reserve(300)  # and here the process is killed: 3 steps ahead are reserved, too
    read = Ledger.read(path)
    assert (read.steps, read.segments[0].planned) == (303, 500)
    assert read.epsilon_as_planned(DELTA, "rdp") == pytest.approx(_epsilon(500))
    ledger.settle(300, 250)
    ledger.sync()
    assert Ledger.read(path).epsilon_as_planned(DELTA, "rdp") == pytest.approx(_epsilon(500))
    ledger.fulfil(ledger.current.run)
    assert Ledger.read(path).epsilon_as_planned(DELTA, "rdp") == pytest.approx(_epsilon(250))
    ledger.plan(math.inf)
    assert math.isinf(Ledger.read(path).segments[0].planned)
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    ledger.unlock()


def test_what_came_after_a_stop_is_in_the_file(tmp_path, gaussians):
    path = tmp_path / "spent.jsonl"
    ledger = _fit(Ledger(path), gaussians(1.0), planned=100, ran=40)
    _fit(ledger, gaussians(1.0), planned=50, ran=50, ended=True)
    ledger.unlock()
    for each in (Ledger.read(path), Ledger(path)):
        assert each.epsilon_as_planned(DELTA, "rdp") == pytest.approx(_epsilon(100))


@pytest.mark.parametrize("name", ["ledger_1.json", "ledger_1.jsonl"])
def test_ledgers_of_before_load(name, tmp_path):
    """Written by the version that knew no plans; its figures at δ = 1e-5."""
    path = tmp_path / name
    path.write_bytes((DATA / name).read_bytes())
    ledgers = [Ledger.from_json(path.read_text())] if path.suffix == ".json" else []
    if path.suffix == ".jsonl":
        ledgers = [Ledger.read(path), Ledger(path)]
    for ledger in ledgers:
        assert [segment.steps for segment in ledger.segments] == [250, 20]
        # Older releases of dp_accounting try other orders.
        assert ledger.epsilon(1e-5, "rdp") == pytest.approx(6.058619733995208, rel=1e-3)
        assert ledger.epsilon_as_planned(1e-5) == ledger.epsilon(1e-5)
        assert "Stopped early" not in ledger.statement(1e-5)


def test_a_file_of_before_goes_on(tmp_path, gaussians):
    path = tmp_path / "ledger_1.jsonl"
    path.write_bytes((DATA / path.name).read_bytes())
    ledger = _fit(Ledger(path), gaussians(1.0), planned=100, ran=40)
    ledger.unlock()
    again = Ledger.read(path)
    assert again.steps == 270 + 40
    assert again.epsilon_as_planned(DELTA, "rdp") > again.epsilon(DELTA, "rdp")


def test_looking_whether_to_go_on_is_not_covered_by_the_steps_that_ran():
    """Of fits of 10 steps up to 1,000, by who stops where it says most: δ is 12 times the stated.

    Exactly, for Gaussian noise on all of the data: over the privacy loss after t steps, which is
    normal with mean and half the variance tμ²/2, the best rule for stopping by backward induction.
    """
    mu, each, last, width = 0.05, 10, 1000, 0.004

    def delta_of(epsilon, steps):
        m = mu * steps**0.5
        cdf = stats.norm.cdf
        return cdf(-epsilon / m + m / 2) - math.exp(epsilon) * cdf(-epsilon / m - m / 2)

    def stop(steps):
        stated = optimize.brentq(lambda e: delta_of(e, steps) - DELTA, 0, 200)
        return np.maximum(0, 1 - np.exp(stated - losses))

    losses = np.arange(-4, 12, width)
    middle, deviation = mu**2 * each / 2, mu * each**0.5
    moves = width * np.arange(
        -math.ceil(6 * deviation / width), math.ceil(6 * deviation / width) + 1
    )
    chances = stats.norm.pdf((moves - middle) / deviation)
    chances /= chances.sum()
    value = stop(last)
    for steps in range(last - each, -1, -each):
        value = np.convolve(value, chances[::-1], mode="same")
        if steps:
            value = np.maximum(stop(steps), value)
    assert value[np.argmin(abs(losses))] == pytest.approx(12 * DELTA, rel=0.05)


@pytest.mark.parametrize("held", [False, True], ids=["as it ran", "by a privacy filter"])
def test_the_statement_says_that_a_further_fit_is_not_covered(gaussians, held):
    budget = FilterBudget(RenyiFilter(8.0), 20.0, DELTA) if held else None
    ledger = _fit(Ledger(), gaussians(1.0), 5, 5, ended=True, filter=budget)
    text = " ".join(ledger.statement(DELTA).split())
    said = "added to a training after looking at its results" in text
    assert said is not held
    assert ("whatever was chosen after looking" in text) is held


def test_what_is_not_covered_where_nothing_is_claimed():
    """As in a card without a δ: all of no claims are held by a filter, and none of them."""
    text = " ".join(" ".join(not_covered([])).split())
    assert "added to a training after looking at its results" in text
