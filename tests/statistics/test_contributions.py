"""What a unit adds to a sum: never more than 1, whatever its rows hold; sums are exact."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_keras_opt.statistics import contributions
from dp_keras_opt.statistics.contributions import Units, counts, totals, vector_sum

VALUES = st.floats(width=32) | st.sampled_from([np.nan, np.inf, -np.inf, 1e30, 0.0])


def identity(rows):
    return rows


@st.composite
def tables(draw):
    rows, columns = draw(st.integers(2, 12)), draw(st.integers(1, 4))
    values = draw(st.lists(VALUES, min_size=rows * columns, max_size=rows * columns))
    users = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    return np.reshape(np.float64(values), (rows, columns)), np.unique(users, return_inverse=True)[1]


@settings(max_examples=200, deadline=None)
@given(tables(), st.sampled_from(["l1", "l2"]), st.integers(1, 5))
def test_a_unit_moves_a_sum_by_at_most_1(table, norm, size):
    rows, users = table
    without = users != users.max()
    chunks = [rows[i : i + size] for i in range(0, len(rows), size)]
    whole = vector_sum(chunks, Units(users), identity, norm)
    rest = vector_sum([rows[without]], Units(users[without]), identity, norm) if any(without) else 0
    moved = np.linalg.norm(whole - rest, 1 if norm == "l1" else 2)
    assert moved <= 1 + 1e-12


def test_a_sum_is_the_mean_of_clipped_rows_of_each_unit():
    rng = np.random.default_rng(0)
    rows, users = rng.normal(0, 2, (60, 3)), rng.permutation(np.arange(60) % 7)
    expected = 0
    for user in range(7):
        own = rows[users == user]
        lengths = np.linalg.norm(own, axis=1, keepdims=True)
        expected = expected + np.mean(own / np.maximum(lengths, 1), axis=0)
    found = vector_sum([rows[:25], rows[25:]], Units(users), identity, "l2")
    np.testing.assert_allclose(found, expected, atol=60 * 2**-24)


def test_sums_do_not_depend_on_the_order_nor_on_chunks():
    # In floating point these differ by 1e-12 or so, which is more than a tiny contribution.
    rng = np.random.default_rng(1)
    rows = rng.normal(0, 1e-3, (5000, 2))
    once = vector_sum([rows], Units(), identity, "l2")
    for size in (1, 7, 1000):
        mixed = rng.permutation(rows)
        chunks = [mixed[i : i + size] for i in range(0, len(rows), size)]
        np.testing.assert_array_equal(vector_sum(chunks, Units(), identity, "l2"), once)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 5)), min_size=1, max_size=30))
def test_units_share_their_counts(pairs):
    ids, bins = np.int64(pairs).T
    users = np.unique(ids, return_inverse=True)[1]
    found = counts([bins], Units(users), identity, 5)
    expected = np.zeros(5)
    for user in range(users.max() + 1):
        own = bins[users == user]
        for each in own:
            if 0 <= each < 5:
                expected[each] += 1 / len(own)
    np.testing.assert_allclose(found, expected, atol=30 * 2**-24)
    assert found.sum() <= users.max() + 1


def test_totals_of_units():
    found = totals([np.float64([1, 2, np.nan]), np.float64([4])], Units(np.array([0, 1, 1, 0])))
    np.testing.assert_array_equal(found, [5, 2])


@pytest.mark.parametrize("rows", [3, 5])
def test_rows_and_users_must_be_as_many(rows):
    units = Units(np.array([0, 1, 1, 0]))
    with pytest.raises(ValueError, match="names 4 rows, but there are"):
        vector_sum([np.ones((rows, 1))], units, identity, "l2")
        _ = units.number


def test_more_units_than_are_counted_exactly_are_refused(monkeypatch):
    monkeypatch.setattr(contributions, "MOST_UNITS", 3)
    units = Units()
    units.rows(4)
    with pytest.raises(ValueError, match="at most 3 are counted exactly"):
        _ = units.number
