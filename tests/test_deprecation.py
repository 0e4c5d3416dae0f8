"""Old names work, and warn with the new one, where the caller stands."""

from typing import NamedTuple

import numpy as np
import pytest

import dp_keras_opt as dp
from dp_keras_opt import deprecation


@deprecation.renamed_arguments(rows="population")
def ask(population="private"):
    return population


class Batch:
    rows = deprecation.renamed_attribute("rows", "num_rows")

    def __init__(self):
        self.num_rows = 3


def test_an_old_argument_is_taken_and_warned_of_in_the_callers_file():
    with pytest.warns(FutureWarning, match=r"ask\(rows=\.\.\.\).*Use population") as caught:
        assert ask(rows="public") == "public"
    assert caught[0].filename == __file__


def test_both_names_of_an_argument_are_refused():
    with pytest.raises(TypeError, match="population twice: rows is its old name"):
        ask(rows="public", population="private")


def test_the_new_name_does_not_warn(recwarn):
    assert ask(population="public") == "public"
    assert not recwarn.list


def test_an_old_attribute_is_read_and_set():
    batch = Batch()
    with pytest.warns(FutureWarning, match=r"Batch\.rows is deprecated.*Batch\.num_rows") as caught:
        assert batch.rows == 3
    assert caught[0].filename == __file__
    with pytest.warns(FutureWarning):
        batch.rows = 4
    assert batch.num_rows == 4


def test_an_old_name_of_a_module():
    find = deprecation.renamed_names("shop", {"Old": Batch})
    with pytest.warns(FutureWarning, match=r"shop\.Old is deprecated.*Batch"):
        assert find("Old") is Batch
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        find("Other")


@deprecation.renamed_fields(rows="population")
class Asked(NamedTuple):
    bound: float = 1.0
    population: str = "private"


def test_an_old_field_of_a_named_tuple():
    with pytest.warns(FutureWarning, match=r"rows=\.\.\.\).*Use population") as caught:
        asked = Asked(2.0, rows="public")
    assert asked == Asked(2.0, "public") and caught[0].filename == __file__
    with pytest.warns(FutureWarning, match=r"Asked\.rows is deprecated"):
        assert asked.rows == "public"
    with pytest.warns(FutureWarning):
        assert asked._replace(rows="private") == Asked(2.0)


def test_the_old_names_of_clipping():
    with pytest.warns(FutureWarning, match=r"Use population"):
        query = dp.clipping.Query(rows="public")
    assert query.population == "public"
    with pytest.warns(FutureWarning, match=r"Batch\.num_rows"):
        assert dp.clipping.Batch(np.ones((3, 2)), np.ones(3)).rows == 3


def test_the_old_names_of_modules():
    with pytest.warns(FutureWarning, match=r"clipping\.checked_plan is .*checked_engines"):
        assert dp.clipping.checked_plan is dp.clipping.self_check.checked_engines
    with pytest.warns(FutureWarning, match=r"tuning\.Plan is deprecated.*RunInfo"):
        assert dp.tuning.Plan is dp.tuning.RunInfo
