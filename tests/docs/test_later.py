"""What came after the five papers: each candidate differs from another in what its name says.

`examples/papers/later.py` itself runs for hours.
"""

import pathlib
import sys

import keras
import numpy as np
import pytest

import dp_keras_opt as dp
from tests.helpers.page_tables import best_of, cells, columns, level_with_the_best, scores

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "papers")]

import later  # noqa: E402

RUN = dp.tuning.RunInfo(steps=8, batch_size=64, clip_norm=0.25)


def made(experiment):
    return {each.name: each.make(RUN, **each.middle()) for each in experiment.candidates}


def differences(one, other):
    one, other = one.get_config(), other.get_config()
    return {name for name in one if one[name] != other[name]} - {"name", "learning_rate"}


def test_rows_are_chosen_by_the_same_rules():
    optimizers = made(later.rows())
    for plain, chosen in (
        ("DPSGD", "DPSGD, chosen rows"),
        ("DPAdam, bias-corrected", "DPAdam, bias-corrected, chosen rows"),
    ):
        assert differences(optimizers[plain], optimizers[chosen]) == {"sparse_embeddings"}
        assert optimizers[chosen].sparse_embeddings.threshold > 0


def test_others_differ_in_what_their_name_says():
    experiment = later.others()
    optimizers, momentum = made(experiment), made(experiment)["DPSGD, momentum"]
    differ = {
        "DPSGD, momentum, sharpness-aware": {"gradient_filter"},
        "DPSGD, momentum, per-example momentum": {"gradient_filter"},
        "DPSGD, momentum, around the mean": {"geometry"},
        "DPSGD, momentum, AdaClip": {"geometry", "clip_norm"},
        "DPSGD, momentum, GeoClip": {"geometry", "clip_norm"},
        "DPSGD, DiSK": {"gradient_filter", "momentum"},
        "DPSGD, FFTKF": {"gradient_filter", "momentum"},
    }
    without = {"DPSGD, DiSK", "DPSGD, FFTKF"}  # momentum, and so at rates of their own
    for name, expected in differ.items():
        assert differences(momentum, optimizers[name]) == expected, name
        assert optimizers[name].learning_rate == momentum.learning_rate or name in without
    disk, masked = (optimizers[name].gradient_filter for name in sorted(without))
    assert disk.gamma is None and masked.gamma is None  # one pass
    assert masked.kappa == disk.kappa and masked.suppression > 0
    plain = dp.tuning.CANDIDATES["DPAdam"]
    plain = plain.make(RUN, **plain.middle())
    assert differences(plain, optimizers["DPAdam, AdaClip"]) == {"geometry", "clip_norm"}
    points = {each.name for each in experiment.candidates if each.passes > 1}
    assert points == {"DPSGD, momentum, per-example momentum"}
    assert all(optimizers[name].gradient_filter.length == 2 for name in points)
    named = {name for pair in experiment.order for name in pair}
    assert named == set(optimizers) and set(later.BASELINES) < named


def test_a_geometry_of_probes_differs_in_that_alone():
    plain, in_geometry = made(later.probed()).values()
    assert differences(plain, in_geometry) == {"geometry"}
    probes, labels = in_geometry.geometry.probes
    assert probes.shape == (256, 28, 28, 1) and set(labels) == set(range(10))


def test_smaller_clip_norms_have_steps_of_the_same_length():
    candidates = later.clipped().candidates
    assert [each.groups for each in candidates] == [1, 1, 8]
    for norm, candidate in zip((0.3, 0.1, 0.1), candidates, strict=True):
        plain = dp.tuning.get(candidate.name.removesuffix(f", C = {norm}"))
        whole, optimizer = (each.make(RUN, **each.middle()) for each in (plain, candidate))
        assert differences(whole, optimizer) == {"clip_norm"} and optimizer.clip_norm == norm
        lengths = [float(each.learning_rate) * each.clip_norm for each in (whole, optimizer)]
        np.testing.assert_allclose(*lengths, rtol=1e-6)


def test_a_searched_clip_norm_is_in_units_of_that_of_the_task():
    for candidate in later.searched().candidates[:2]:
        plain = dp.tuning.get(candidate.name.removesuffix(", C searched"))
        assert candidate.space == {**plain.space, "clip_norm": later.LENGTHS}
        made = candidate.make(RUN, **plain.middle(), clip_norm=0.5)
        assert differences(plain.make(RUN, **plain.middle()), made) == {"clip_norm"}
        assert made.clip_norm == 0.5 * RUN.clip_norm


@pytest.mark.parametrize("kind", ["rows", "others"])
def test_a_comparison_of_them(kind, monkeypatch, tmp_path):
    """On made-up data, two steps, through the command."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 9, (400, 3)).astype("int32"), rng.normal(size=(400, 2))

    def build():
        inputs = keras.Input((3,), dtype="int32")
        rows = keras.layers.Embedding(9, 4)(inputs)
        outputs = keras.layers.Dense(2)(keras.layers.GlobalAveragePooling1D()(rows))
        return keras.Model(inputs, outputs)

    def task():
        part = (x, y.astype("float32"))
        return dp.tuning.Task(build, part, part, "mse", batch_size=100, steps=2, test=part)

    for name in ("ratings", "definitions"):
        monkeypatch.setattr(later.choosing, name, task)
        monkeypatch.setitem(later.choosing.EVERY, name, task)
    arguments = [kind, "--quick", "--tasks", "ratings", "--epsilons", "3"]
    monkeypatch.setattr(sys, "argv", ["later.py", *arguments, "--output", str(tmp_path)])
    later.at_length.main(later.EXPERIMENTS, later.__doc__, "later")
    table = (tmp_path / f"{kind}-quick.md").read_text(encoding="utf-8")
    for candidate in later.EXPERIMENTS[kind]().candidates:
        assert candidate.name in table


# The tables of the pages.

DOCS = EXAMPLES.parent / "docs"
#: Where the runs are, and the page that shows them.
TABLES = [
    (path, path.parent.with_suffix(".md"))
    for folder in ("how_to/sparse_embeddings", "explanation/geometries")
    for path in sorted((DOCS / folder).glob("*-*.csv"))
]


@pytest.mark.parametrize(("path", "page"), TABLES, ids=lambda path: path.stem)
def test_the_tables_are_those_of_the_results(path, page):
    """Means of five and their errors; bold is what cannot be told apart from the best."""
    runs, shown = scores(path), cells(page.read_text(encoding="utf-8"), path.stem)
    assert set(shown) == set(runs) and all(len(v) == 5 for v in runs.values())
    for column in columns(path).values():
        level = level_with_the_best(column, best_of(path))
        for key, (mean, error) in column.items():
            cell = f"{mean:.4f} ± {error:.4f}"
            assert shown[key] == (f"**{cell}**" if key in level else cell), key


@pytest.mark.parametrize(
    "name", ["ratings", "clothes", "text", "tabular", "incomes", "definitions"]
)
def test_none_is_ahead_of_the_best_of_the_five_papers(name):
    """By more than two standard errors, at any ε: see the page on choosing."""
    found = columns(DOCS / "explanation" / "geometries" / f"others-{name}.csv")
    tuned = DOCS / "how_to" / "choosing" / f"tuned-{name}.csv"
    best, of_tuned = best_of(tuned), columns(tuned)
    for epsilon, column in found.items():
        new = best(mean for mean, _ in column.values())
        old, error = best(of_tuned[epsilon].values())
        errors = [its_error for mean, its_error in column.values() if mean == new]
        ahead = (new - old) if best is max else (old - new)
        assert ahead <= 2 * np.hypot(error, *errors), (epsilon, ahead)


def test_there_are_tables():
    assert {path.stem for path, _ in TABLES} == {
        "rows-ratings",
        "rows-definitions",
        "others-ratings",
        "others-clothes",
        "others-text",
        "others-tabular",
        "others-incomes",
        "others-definitions",
        "others-features",
        "clipped-definitions",
        "probed-clothes",
        "searched-features",
        "again-features",
    }
