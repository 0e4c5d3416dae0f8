"""Which cases of a test stand for all of them."""

import itertools

from tests.helpers.representatives import representatives


def test_every_pair_of_values_is_among_few_of_many_cases():
    names = ("optimizer", "sampling", "clipping")
    cases = [
        dict(zip(names, values, strict=True)) for values in itertools.product(range(4), repeat=3)
    ]
    chosen = [cases[place] for place in representatives(cases, 24)]
    for one, other in itertools.combinations(names, 2):
        assert len({(case[one], case[other]) for case in chosen}) == 16


def test_cases_of_one_parameter_are_spread_evenly():
    assert representatives([{"size": size} for size in range(12)], 4) == [0, 3, 6, 9]


def test_as_many_as_there_are_and_none():
    cases = [{"size": 1}, {"size": 2}]
    assert sorted(representatives(cases, 5)) == [0, 1]
    assert representatives(cases, 0) == []
    assert representatives([{}], 1) == [0]
