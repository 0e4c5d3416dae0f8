"""Random configurations (tests/helpers/fuzzing.py); tox runs thousands of them, this a few."""

from hypothesis import given

from tests.helpers.draws import draws, is_thorough
from tests.helpers.fuzzing import RULES, check, configurations


@draws(8)
@given(configurations)
def test_trains_as_accounted_or_is_refused(configuration):
    check(configuration)


def test_every_rule_trains():
    """So that the test above does not pass because everything is refused."""
    plain = {
        "second_moment": "post_processing", "ablation": None, "wrapped": "lion",
        "mechanism": "gaussian", "filter": None, "projection": False, "sampling": "poisson",
        "adjacency": "add_or_remove_one", "clipping": "flat", "normalize": False,
        "schedule": None, "policy": "float32", "model": "dense", "secure": False,
        "physical": None, "public": True, "weighted": False, "scale": 30.0, "seed": 0,
    }  # fmt: skip
    executions = ("eager", "graph", "xla")
    for place, rule in enumerate(RULES):
        own = {"rule": rule, "moving": place % 3 == 0}
        for users in (False, True) if is_thorough() else (place % 2 == 0,):
            for execution in executions if is_thorough() else (executions[place // 3 % 3],):
                drawn = own | {"users": users, "execution": execution}
                assert check(plain | drawn) is None, drawn
