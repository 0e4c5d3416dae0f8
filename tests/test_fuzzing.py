"""Random configurations (tests/fuzzing.py); tox runs thousands of them, this a few."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzzing import RULES, check, configurations


# Not shrunk: that takes longer than to look at the configuration.
@settings(
    max_examples=25, deadline=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)  # fmt: skip
@given(configurations)
def test_trains_as_accounted_or_is_refused(configuration):
    check(configuration)


@pytest.mark.parametrize("users", [False, True], ids=["examples", "users"])
def test_every_rule_trains(users):
    """So that the test above does not pass because everything is refused."""
    plain = {
        "second_moment": "post_processing", "ablation": None, "wrapped": "lion",
        "mechanism": "gaussian", "filter": None, "projection": False, "sampling": "poisson",
        "adjacency": "add_or_remove_one", "clipping": "flat", "normalize": False,
        "schedule": None, "policy": "float32", "model": "dense", "secure": False,
        "physical": None, "public": True, "weighted": False, "scale": 30.0, "seed": 0,
        "users": users,
    }  # fmt: skip
    for rule in RULES:
        assert check(plain | {"rule": rule}) is None, rule
