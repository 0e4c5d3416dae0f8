"""The map of regimes: closed forms against loops over steps, and the scripts run."""

import csv
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import dp_keras_opt as dp
from tests.helpers.page_tables import BY_PLANNED_NOISE, compared

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "papers"
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import borders  # noqa: E402
import quadratics  # noqa: E402
import regimes  # noqa: E402

H, DISTANCE, STEPS = 0.3, 2.0, 12


def plain(beta, nesterov):
    def rule(rate):
        v = 0.0

        def step(gradient):
            nonlocal v
            v = beta * v + gradient
            return rate * (beta * v + gradient if nesterov else v)

        return step

    return rule


def filtered(rate):
    before = released = 0.0

    def step(gradient):
        nonlocal before, released
        released = (gradient + before + 9 * released) / 11
        before = gradient
        return rate * released

    return step


RULES = {
    "momentum": (quadratics.momentum(0.9), plain(0.9, nesterov=False)),
    "nesterov": (quadratics.momentum(0.8, nesterov=True), plain(0.8, nesterov=True)),
    "filtered": (quadratics.low_pass("first_order_v1"), filtered),
}


def trained(rule, rate, start, noise):
    """The distances after each step, with this noise on the gradients."""
    step, e, path = rule(rate), start, []
    for z in noise:
        e = e - step(H * e + z)
        path.append(e)
    return np.array(path)


def inverse(coefficients):
    matrix = np.zeros((STEPS, STEPS))
    for i, c in enumerate(coefficients):
        matrix += np.diag(np.full(STEPS - i, c), -i)
    return np.linalg.inv(matrix)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_closed_forms_are_those_of_loops(name, average):
    """The expected loss from the start and, one by one, from the noise of each step."""
    rule, loop = RULES[name]
    rates, coefficients = np.array([0.05, 0.4]), (0.8, 0.5, 0.3)
    levels = np.linspace(1.5, 0.5, STEPS)
    problem = quadratics.Problem(np.array([H]), np.array([7]), np.array([DISTANCE]), 0.1, 20.0)
    responses = quadratics.impulse_responses(rule, rates, problem.curvatures, STEPS)
    if average:
        responses = quadratics.averaged(responses)
    found = quadratics.linear_losses(problem, responses, coefficients, 1.3, levels)

    def end(path):
        return path[STEPS // 2 :].mean() if average else path[-1]

    for rate, loss in zip(rates, found, strict=True):
        squares = end(trained(loop, rate, DISTANCE, np.zeros(STEPS))) ** 2
        for unit, correlated in zip(np.eye(STEPS), inverse(coefficients).T, strict=True):
            squares += H / 20 * end(trained(loop, rate, 0.0, unit)) ** 2
            private = 1.3 * 0.1 * levels * correlated
            squares += end(trained(loop, rate, 0.0, private)) ** 2
        np.testing.assert_allclose(loss, 0.5 * 7 * H * squares, rtol=1e-10)


def test_draws_have_the_correlation_of_the_mechanism():
    coefficients = (0.8, 0.5, 0.3)
    problem = quadratics.power_law(50, 10.0, False, 0.1, False)
    drawn = np.array([z for _, z in quadratics.draws(problem, STEPS, 3, coefficients)])
    unit = np.array([z for _, z in quadratics.draws(problem, STEPS, 3)])
    expected = np.einsum("ts,sgc->tgc", inverse(coefficients), unit)
    np.testing.assert_allclose(drawn, expected, rtol=1e-4, atol=1e-4)


def scaled_problem(sparse, noise=0.02):
    return quadratics.Problem(
        np.array([0.2, 0.05]), np.array([3, 8]), np.array([1.0, 2.0]), noise, 50.0, sparse
    )


def released(problem, e, sample, z, s=None, clip_norm=None):
    """The gradient of a step in float64; e, sample, z and s are (groups, copies)."""
    h = problem.curvatures[:, None]
    exact = h * e + np.sqrt(h / 50) * sample
    if s is None:
        return exact + problem.noise * z
    if problem.sparse:
        norms = s
    else:
        norms = np.sqrt(np.sum(problem.counts[:, None] * h * (s**2).mean(axis=1, keepdims=True)))
    return np.minimum(1, clip_norm / norms) * exact + problem.noise * clip_norm / s * z


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("share", [None, 0.4])
def test_adam_is_its_formula(share, sparse):
    problem, rate = scaled_problem(sparse), 0.03
    settings = {"rate": np.array([0.5, rate])}
    if share is not None:
        settings["share"] = np.array([0.9, share])
    draws = list(quadratics.draws(problem, STEPS, 0))
    found = [squares[1] for squares in quadratics.adam(problem, settings, iter(draws))]
    e = problem.distances[:, None] * np.ones(quadratics.COPIES)
    m, v = 0 * e, 0 * e
    for t, (sample, z) in enumerate(draws, 1):
        s = None
        if share is not None:
            s = (
                1 / (np.sqrt(v / (1 - 0.999 ** (t - 1))) + 1e-4)
                if t > 1
                else 1e4 * np.ones(e.shape)
            )
        g = released(problem, e, sample, z, s, share and share / problem.noise)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        v_hat = v / (1 - 0.999**t)
        root = np.sqrt(v_hat) + 1e-4
        if share is None:
            root = np.sqrt(np.maximum(v_hat - problem.noise**2, problem.noise**2))
        e = e - rate * m / (1 - 0.9**t) / root
        np.testing.assert_allclose(found[t - 1], e**2, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("sparse", [False, True])
def test_delayed_is_its_formula(sparse):
    problem, rate, adaptive, share, delay = scaled_problem(sparse), 0.5, 0.02, 0.4, 3
    settings = {"rate": [rate], "adaptive_rate": [adaptive], "share": [share], "delay": [delay]}
    draws = list(quadratics.draws(problem, STEPS, 0))
    found = [squares[0] for squares in quadratics.delayed(problem, settings, iter(draws))]
    e = problem.distances[:, None] * np.ones(quadratics.COPIES)
    v, gradients = 0 * e, []
    for t, (sample, z) in enumerate(draws):
        if t % (2 * delay) < delay:
            gradients.append(released(problem, e, sample, z))
            e = e - rate * gradients[-1]
        else:
            if gradients:
                v, gradients = 0.9 * v + 0.1 * np.mean(gradients, axis=0) ** 2, []
            s = 1 / (np.sqrt(v) + 1e-4)
            e = e - adaptive * s * released(problem, e, sample, z, s, share / problem.noise)
        np.testing.assert_allclose(found[t], e**2, rtol=2e-3, atol=1e-5)


def test_levels_cost_what_one_level_costs():
    for fall in regimes.FALLS:
        levels = regimes.falling(100, fall)
        np.testing.assert_allclose(np.sum(levels**-2), 100)
        np.testing.assert_allclose(levels[0] ** 2 / levels[-1] ** 2, fall)


def test_planned_noise_is_that_of_the_library():
    sampling = dp.accounting.Sampling.cyclic_poisson(10_000, 100, 8)
    mechanism = dp.noise.Planned(horizon=100).for_run(
        800, sampling, dp.noise.Workload(momentum=0.9)
    )
    np.testing.assert_allclose(regimes.planned(800), mechanism.coefficients, rtol=1e-6)


def test_the_price_is_where_nothing_is_gained():
    h = quadratics.power_law(1000, 100.0, True, 1.0, False).curvatures
    problem, linear = quadratics.power_law(1000, 100.0, True, 1e-3, False), regimes.Linear(h, 200)
    price = linear.break_even(problem)
    responses = linear._responses["momentum"]
    at = quadratics.linear_losses(problem, responses, regimes.planned(200), price).min()
    np.testing.assert_allclose(at, linear.losses(problem)["momentum"][0], rtol=5e-3)


def test_the_map_is_drawn(tmp_path):
    command = [sys.executable, FOLDER / "regimes.py", "--quick", "--output", tmp_path]
    for _ in range(2):  # the second time, all of it is there
        subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "regimes-quick.png").stat().st_size > 10_000
    assert "correlated" in (tmp_path / "regimes-quick.md").read_text(encoding="utf-8")


# The page.

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "explanation" / "regimes.md").read_text(encoding="utf-8")


SCREENED_RUNS, TUNED_RUNS = (
    sorted((DOCS / "how_to" / "choosing").glob(f"{part}-*.csv")) for part in ("results", "tuned")
)


def stored(name):
    with open(
        DOCS / "explanation" / "regimes" / f"{name}.csv", newline="", encoding="utf-8"
    ) as file:
        return list(csv.DictReader(file))


def test_the_table_of_the_page_is_that_of_the_map():
    rows = regimes.table(stored("regimes"))
    section = PAGE.split("<!-- regimes -->\n\n")[1].split("\n\n")[0]
    header, _, *lines = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()
    )
    assert header == list(rows[0])
    assert lines == [[str(value) for value in row.values()] for row in rows]


def test_what_the_page_says_of_the_map():
    rows = stored("regimes")
    assert len(rows) == len(regimes.all_places()) * len(regimes.STEPS) * len(regimes.METHODS)
    cells = list(regimes.learned(rows).values())
    assert f"of the {len(cells)} places" in PAGE

    def share(method, better):
        return sum((c[method] < 0.9) if better else (c[method] > 1.1) for c in cells) / len(cells)

    assert f"a tenth or more in {share('correlated', True):.0%}" in PAGE
    assert max(cell["correlated"] for cell in cells) <= 1.0001  # it loses nowhere
    filtered = share("filtered", True), share("filtered", False)
    assert (
        f"gains a tenth in {filtered[0]:.0%} of the places, and loses as much in {filtered[1]:.0%}"
        in PAGE
    )


def test_what_the_page_says_of_tasks_made_linear():
    predictions, runs_of = {}, {}
    for row in stored("borders"):
        share, task, epsilon = float(row["unexplained"]), row["task"], float(row["epsilon"])
        predictions.setdefault((share, task, epsilon), {})[row["candidate"]] = float(row["test"])
        runs_of[task] = borders.real(task)
    rows = borders.table(predictions, runs_of)
    assert {row["task"] for row in rows} <= {p.stem.split("-", 1)[1] for p in TUNED_RUNS}
    count = len(rows) // 2
    leads, pairs, linear, right = [], [], [], []
    for share in (0.0, 0.5):
        here = {key: p for key, p in predictions.items() if key[0] == share}
        rows, of_linear = (
            borders.table(part, runs_of) for part in (here, borders.of_linear_rules(here))
        )
        leads.append(sum(row["leads"] for row in rows))
        linear.append(sum(row["leads"] for row in of_linear))
        found = np.array([row["pairs in order"].split(" of ") for row in rows], int).sum(axis=0)
        right.append(found[0])
        pairs.append(found[1])
    page = " ".join(PAGE.split())
    assert linear[0] == linear[1] and f"leads in {linear[0]} of the {count} runs;" in page
    assert f"leads in {leads[0]} of the {count} runs (in {leads[1]}, where half" in page
    assert f"{right[0]} ({right[1]}) of {pairs[0]} pairs" in page
    always = "DPSGD, momentum, planned noise, average"
    best = [always in row["leading"].split("; ") for row in rows]
    assert f"leads in {sum(best)} of the {count} runs." in page


SCREENED = {
    "a filter is level": ("DPSGD, filter", "DPSGD, momentum"),
    "falling noise is level": ("DPSGD, momentum, falling noise", "DPSGD, momentum"),
    "acceleration is level": ("DPNesterov", "DPSGD, momentum"),
    "a delayed preconditioner": ("DP2RMSprop", "DPSGD, momentum"),
}
TUNED = {
    "correlated noise gains": BY_PLANNED_NOISE,
    "scale-then-privatize is ahead": [
        ("DPAdam, scale-then-privatize, planned noise", "DPSGD, momentum, planned noise")
    ],
    "bias-corrected `DPAdam` is ahead": [("DPAdam, bias-corrected", "DPSGD, momentum")],
}


def counted(paths, pairs):
    """How often the first is better, level, worse."""
    signs = [sign for path in paths for sign in compared(path, pairs)]
    return f"{signs.count(1)}, {signs.count(0)}, {signs.count(-1)}"


def test_what_the_page_says_of_real_runs():
    (table,) = (part for part in PAGE.split("\n\n") if part.startswith("| the map says"))
    lines = table.splitlines()[2:]

    def said(words):
        (line,) = (line for line in lines if words in line)
        return line.rstrip("| ").split(":")[-1].split("|")[-1].strip()

    for words, pair in SCREENED.items():
        assert said(words) == counted(SCREENED_RUNS, [pair]), words
    sparse = "ratings", "definitions"
    dense = [path for path in TUNED_RUNS if path.stem.split("-")[1] not in sparse]
    for words, pairs in TUNED.items():
        assert said(words) == counted(dense if "scale" in words else TUNED_RUNS, pairs), words
