"""Which cases of a test stand for all of them."""

import collections
import itertools


def others(items, marker):
    """The cases that do not stand for their test, of all tests that have this marker of n.

    Args:
        items: what pytest collected.
        marker: its name; its argument is how many cases stand for the test.
    """
    cases = collections.defaultdict(list)
    for item in items:
        mark = item.get_closest_marker(marker)
        if mark:
            cases[(item.nodeid.split("[")[0], mark.args[0])].append(item)
    for (_, count), group in cases.items():
        chosen = representatives([_parameters(item) for item in group], count)
        yield from (item for place, item in enumerate(group) if place not in chosen)


def representatives(cases, count):
    """The places of this many cases, each of which adds most pairs of values to those before it.

    Of several that add as many, it is the first of an even spread over all cases.

    Args:
        cases: a dict of parameter values for each case.
    """
    spread = [len(cases) * number // count for number in range(count)]
    left = {place: _pairs(cases[place]) for place in (*spread, *range(len(cases)))}
    seen, chosen = set(), []
    while left and len(chosen) < count:
        best = max(left, key=lambda place: len(left[place] - seen))
        chosen.append(best)
        seen |= left.pop(best)
    return chosen


def _parameters(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def _pairs(parameters):
    values = [(name, repr(value)) for name, value in parameters.items()]
    return set(itertools.combinations_with_replacement(values, 2))
