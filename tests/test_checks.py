"""The checks that many arguments share."""

import numpy as np
import pytest

from dp_keras_opt.checks import is_number, whole_number


@pytest.mark.parametrize("value", [1, 10, np.int64(7), np.uint8(3)])
def test_integers_in_range_are_ints(value):
    checked = whole_number(value, "steps", maximum=10)
    assert checked == value and type(checked) is int


@pytest.mark.parametrize("value", [0, -1, 11, True, 2.0, np.nan, "4", None, np.float32(3), [1]])
def test_anything_else_is_refused_by_name(value):
    with pytest.raises(ValueError) as error:
        whole_number(value, "steps", 1, "Give their number.", maximum=10)
    assert str(error.value) == (
        f"steps must be an integer from 1 to 10; received {value!r}. Give their number."
    )


def test_without_a_maximum_or_a_fix():
    assert whole_number(10**9, "steps") == 10**9 and whole_number(0, "steps", 0) == 0
    with pytest.raises(ValueError, match=r"^steps must be an integer >= 2; received 1\.$"):
        whole_number(1, "steps", 2)


@pytest.mark.parametrize("value", [1, 0.5, -2.0, np.float32(3), np.int64(4), np.inf, np.nan])
def test_real_numbers_are_numbers(value):
    assert is_number(value)


@pytest.mark.parametrize("value", [True, np.bool_(True), "1", None, 1j, [1.0]])
def test_nothing_else_is(value):
    assert not is_number(value)
