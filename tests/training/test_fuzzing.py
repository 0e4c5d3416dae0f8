"""Random configurations (tests/helpers/fuzzing.py); tox runs thousands of them, this a few."""

import numpy as np
import pytest
from hypothesis import given

from tests.helpers.draws import draws, is_thorough
from tests.helpers.fuzzing import BATCH, RULES, check, configurations, released


@draws(8)
@given(configurations)
def test_trains_as_accounted_or_is_refused(configuration):
    check(configuration)


PLAIN = {
    "second_moment": "post_processing", "ablation": None, "wrapped": "lion",
    "mechanism": "gaussian", "filter": None, "geometry": None, "projection": False,
    "sampling": "poisson",
    "adjacency": "add_or_remove_one", "clipping": "flat", "normalize": False,
    "schedule": None, "policy": "float32", "model": "dense", "secure": False,
    "physical": None, "public": True, "weighted": False, "scale": 30.0, "seed": 0,
}  # fmt: skip


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_the_bound_is_met_in_every_precision(policy):
    """So that what is never exceeded is not an example that was left out, or a small one."""
    c = PLAIN | {"rule": "DPSGD", "policy": policy, "clip_norm": "constant", "users": False}
    c |= {"execution": "graph"}
    (whole,), (other,) = (released(c, last, 0.0)[2] for last in ("whole", "other"))
    moved = np.concatenate([np.ravel(a - b) for a, b in zip(whole.value, other.value, strict=True)])
    np.testing.assert_allclose(np.linalg.norm(moved), 0.02 / BATCH, rtol=1e-4)


def test_every_rule_trains():
    """So that the tests above do not pass because everything is refused."""
    executions = ("eager", "graph", "xla")
    for place, rule in enumerate(RULES):
        # Likely: rules that do not take a bound that finds itself have one that moves.
        clip_norm = ("moving", "constant", "found")[place % 3]
        own = {"rule": rule, "clip_norm": clip_norm, "likely": True}
        for users in (False, True) if is_thorough() else (place % 2 == 0,):
            for execution in executions if is_thorough() else (executions[place // 3 % 3],):
                drawn = own | {"users": users, "execution": execution}
                assert check(PLAIN | drawn) is None, drawn
