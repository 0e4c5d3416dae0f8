"""Tasks that are made linear: against loops over examples and steps."""

import pathlib
import sys

import keras
import numpy as np
import pytest

import dp_keras_opt as dp

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "papers")]

import borders  # noqa: E402

STEPS, BATCH, NOISE = 8, 6, 0.05


@pytest.fixture
def run():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(10, 4)) * [0.6, 0.3, 0.2, 0.1]
    rows /= np.maximum(1, np.linalg.norm(rows, axis=1, keepdims=True))
    return borders.Run(np.float32(rows), BATCH, STEPS, NOISE, (0.8, 0.6), unexplained=0.25)


def released(run, w, counts, errors, z, s=1.0, clip_norm=1.0):
    """Example by example, in float64."""
    total = 0.0
    for a, count, error in zip(run.rows.astype(np.float64), counts, errors, strict=True):
        g = s * a * (0.75**0.5 + a @ w + 0.5 * error)
        total = total + count * g * min(1.0, clip_norm / np.linalg.norm(g))
    return (total / BATCH + NOISE * clip_norm * z) / s


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_are_clipped_example_by_example(run, scaled):
    rng = np.random.default_rng(1)
    w = rng.normal(size=(3, 4)).astype(np.float32)
    scales = np.exp(rng.normal(size=(3, 4))).astype(np.float32) if scaled else None
    clips = np.float32([[0.3], [1.0], [3.0]]) if scaled else 1.0
    drawn = next(run.draws(0))
    found = run.gradients(w, *drawn, scales, clips)
    for i in range(3):
        own = (scales[i], clips[i, 0]) if scaled else (1.0, 1.0)
        expected = released(run, w[i], *drawn, *own)
        np.testing.assert_allclose(found[i], expected, rtol=1e-4, atol=1e-5)


def momentum(rate):
    def step(m, v, g, t):
        m = 0.9 * m + g
        return m, v, rate * m

    return step


def bias_corrected(rate):
    def step(m, v, g, t):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        rows = np.linalg.inv(0.8 * np.eye(STEPS) + 0.6 * np.eye(STEPS, k=-1))
        weights = 0.001 * 0.999 ** np.arange(t)[::-1]
        power = NOISE**2 * np.sum(weights * (rows**2).sum(axis=1)[:t]) / (1 - 0.999**t)
        root = np.sqrt(np.maximum(v / (1 - 0.999**t) - power, NOISE**2))
        return m, v, rate * m / (1 - 0.9**t) / root

    return step


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("rule, make", [("momentum", momentum), ("bias-corrected", bias_corrected)])
def test_losses_are_those_of_a_loop(run, rule, make, average):
    rates, _ = run.settings(rule)
    place = len(rates) // 2
    w = m = v = np.zeros(4)
    path, step = [], make(float(rates[place, 0]))
    for t, drawn in enumerate(run.draws(0), 1):
        m, v, taken = step(m, v, released(run, w, *drawn), t)
        w = w - taken
        path.append(w)
    end = np.mean(path[STEPS // 2 :], axis=0) if average else w
    expected = 0.5 * np.mean((0.75**0.5 + run.rows @ end) ** 2)
    np.testing.assert_allclose(run.losses(rule, average)[place], expected, rtol=1e-3)


def test_rows_are_the_clipped_gradients_of_the_task():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 3)).astype("float32"), rng.normal(size=(20, 1)).astype("float32")
    x[:, 2] = 0.0

    def build():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])

    task = dp.tuning.Task(build, (x, y), (x, y), "mse", batch_size=5, steps=10, clip_norm=0.5)
    rows = borders.linearized(task, 20)
    keras.utils.set_random_seed(0)
    kernel = build().get_weights()[0]
    gradients = 2 * (x @ kernel - y) * x
    clipped = gradients * np.minimum(1, 0.5 / np.linalg.norm(gradients, axis=1, keepdims=True))
    order = np.random.default_rng(0).permutation(20)
    np.testing.assert_allclose(rows, 2 * clipped[order][:, :2], rtol=1e-4, atol=1e-6)


def test_who_leads_and_which_pairs_are_in_order():
    found = {"a": (1.0, 0.1), "b": (1.2, 0.1), "c": (2.0, 0.1), "d": (3.0, 0.1)}
    assert borders.leading(found) == ["a", "b"]
    prediction = {"a": 2.0, "b": 1.0, "c": 4.0, "d": 3.0}  # c and d are the wrong way round
    assert borders.agreement(prediction, found) == (4, 5)
    rows = borders.table(
        {(0.5, "task", 3.0): prediction}, {"task": {(n, 3.0): f for n, f in found.items()}}
    )
    assert rows[0]["predicted"] == "b" and rows[0]["leads"]
    assert "leads in 1 of 1 runs, and 4 of 5 pairs" in borders.verdict(rows)
    both = {"DPNesterov, planned noise": 2.0, "DPAdam, bias-corrected": 1.0}
    linear = borders.of_linear_rules({(0.5, "task", 3.0): both})
    assert linear == {(0.5, "task", 3.0): {"DPNesterov, planned noise": 2.0}}


def test_the_runs_are_those_of_the_page():
    found = borders.real("ratings")
    assert {name for name, _ in found} == set(borders.CANDIDATES)
    np.testing.assert_allclose(found["DPSGD, momentum", 3.0][0], 0.9760, atol=1e-4)
    assert borders.real("clothes")["DPSGD, momentum", 3.0][0] < 0  # accuracies
    assert borders.real("ratings-long-and-unknown") == {}
