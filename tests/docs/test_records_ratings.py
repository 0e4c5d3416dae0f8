"""The record of ratings: what is read, what a person computes alone, and that the runs go on."""

import sys

import numpy as np
import pytest

from tests.helpers.examples import RECORDS, imported, page_of_records, rows_of
from tests.helpers.page_tables import mean_and_error


@pytest.fixture
def ratings(monkeypatch):
    return imported("ratings", monkeypatch)


def made_up(module, persons=60, films=40, count=3_000):
    """Ratings that biases explain."""
    rng = np.random.default_rng(0)
    user, item = rng.integers(1, persons + 1, count), rng.integers(1, films + 1, count)
    biases = rng.normal(size=persons + 1)[user] / 2 + rng.normal(size=films + 1)[item] / 2
    return module.Ratings(np.int32(user), np.int32(item), np.float32(3.5 + biases))


def test_films_that_most_rated_are_kept(ratings, tmp_path):
    pytest.importorskip("pandas")
    rows = [(7, 30, 5.0), (7, 10, 4.0), (9, 30, 0.5), (9, 20, 3.0), (8, 20, 2.0), (8, 30, 1.0)]
    table = "\n".join(["userId,movieId,rating", *(",".join(map(str, row)) for row in rows)])
    (tmp_path / "movielens.csv").write_text(table)
    users, items, stars = ratings.movielens_latest(2, tmp_path / "movielens.csv")
    assert list(users) == [1, 2, 2, 3, 3]  # film 10 is left out
    assert list(items) == [1, 1, 2, 2, 1]
    assert list(stars) == [5, 0.5, 3, 2, 1]


def test_the_bias_of_a_person_is_from_their_own_ratings(ratings):
    train = ratings.Ratings(np.int32([1, 1, 2]), np.int32([1, 2, 1]), np.float32([5, 4, 1]))
    found = ratings.own_bias(train, train.stars - 3.5, 3, shrink=1.0)
    np.testing.assert_allclose(found, [0, 2 / 3, -2.5 / 2, 0])
    others = ratings.own_bias(train.part([0, 1]), train.stars[:2] - 3.5, 3, shrink=1.0)
    assert others[1] == found[1]


def test_what_is_not_private_fits_better_and_better(ratings):
    every = made_up(ratings)
    train, test = ratings.split(every, 0)
    assert len(train.stars) == 4 * len(test.stars)
    user, item = ratings.ridge(train, (60, 40))
    biases = ratings.errors(3.5 + user[test.user] + item[test.item], test.stars)
    constant = ratings.errors(np.full(len(test.stars), 3.5), test.stars)
    assert biases["score"] < 0.1 * constant["score"]
    assert constant["rmse"] == pytest.approx(constant["score"] ** 0.5)
    factors = ratings.factorized(train, (60, 40), rank=2, sweeps=2)
    assert [each.shape for each in factors] == [(61,), (41,), (61, 2), (41, 2)]


def test_a_quick_run_goes_on_and_writes_its_files(ratings, tmp_path, monkeypatch):
    every = made_up(ratings, 943, 60, 50_000)
    arrays = every.user, every.item, every.stars
    monkeypatch.setattr(ratings, "movielens_100k", lambda path: arrays)
    monkeypatch.setattr(ratings, "movielens_latest", lambda films, path: arrays)
    monkeypatch.setattr(ratings, "REFERENCES", ratings.REFERENCES[:4])  # no factorization
    short = {
        name: ratings.dataclasses.replace(family, steps=8)
        for name, family in ratings.FAMILIES.items()
    }
    monkeypatch.setattr(ratings, "FAMILIES", short)
    monkeypatch.setattr(sys, "argv", ["ratings.py", "--quick", "--output", str(tmp_path)])
    ratings.main()
    output = tmp_path / "quick"
    for level, methods in (("ratings", 4), ("users", 2)):
        rows = rows_of(output / f"results-{level}.csv")
        assert len(rows) == 2 * methods and len({row["method"] for row in rows}) == methods
        assert all(2.9 < float(row["spent"]) <= 3 for row in rows)
        text = (output / f"{level}.md").read_text(encoding="utf-8")
        assert f"{level}: mean absolute error" in text and "| the mean rating |" in text
    assert (output / "records_ratings.png").stat().st_size > 1000
    first = (output / "results-users.csv").read_bytes()
    ratings.main()  # nothing is left to run
    assert (output / "results-users.csv").read_bytes() == first


def test_the_tables_of_the_page_are_those_of_the_results(ratings):
    tables = {
        "ratings": ratings.page("ratings", rows_of(RECORDS / "ratings-results.csv")),
        "users": ratings.page("users", rows_of(RECORDS / "users-results.csv")),
        "ratings references": ratings.references_table(rows_of(RECORDS / "ratings-references.csv")),
        "ratings published": ratings.records.published_table("ratings"),
    }
    for name, table in tables.items():
        assert f"<!-- {name} -->\n\n{table}" in page_of_records(), name


def test_a_second_run_came_to_the_same():
    away, of_difference = {}, {}
    for level in ("ratings", "users"):
        first, again = (
            means(rows_of(RECORDS / f"{level}-{name}.csv")) for name in ("results", "again")
        )
        assert set(first) == set(again)
        for key in set(first) - {key for key in first if key[1] == 0.5}:
            (mean, error), (other, other_error) = first[key], again[key]
            away[key] = abs(mean - other) / error
            of_difference[key] = abs(mean - other) / np.hypot(error, other_error)
    assert away.pop(("dp-keras-opt, biases", 4.3)) < 1
    assert len(away) == 23 and sum(each < 1 for each in away.values()) == 22
    assert max(of_difference.values()) < 0.75
    assert "Of the\n23 other means all but one" in page_of_records()


def means(rows):
    """(method, ε) -> mean and standard error."""
    scores = {}
    for row in rows:
        key = row["method"], float(row["epsilon"])
        scores.setdefault(key, []).append(float(row["score"]))
    return {key: mean_and_error(values) for key, values in scores.items()}
