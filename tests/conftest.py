"""What holds for every test: the environment, seeds, and kernels that a processor lacks."""

import gc
import os
import re

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
# Which TensorFlow leaves out on some processors; without it, the CPU has neither convolutions with
# the channels first nor gradients of grouped ones.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # tensors are small, and other workers have the other cores
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")

import hypothesis
import keras
import pytest

from tests.helpers import slow
from tests.helpers.representatives import others

pytest.register_assert_rewrite("tests.helpers")

_NO_KERNEL = re.compile(
    r"only supports? (the )?NHWC|only supports NDHWC|do not yet support dilation rates"
    r"|Gradients for grouped convolutions are not supported"
)


hypothesis.settings.register_profile("thorough", print_blob=True)  # see helpers/draws.py


def pytest_addoption(parser):
    parser.addoption(
        "--thorough",
        action="store_true",
        help="run all cases of each test, and draw more: hours, for every night",
    )
    parser.addoption(
        "--store-slow",
        action="store_true",
        help="write down which tests were slow: for a run of all of them, on a quiet machine",
    )
    parser.addoption(
        "--no-new-test-after",
        type=float,
        metavar="SECONDS",
        help="skip what has not begun by then, with files in another order each time",
    )


def pytest_configure(config):
    if config.getoption("thorough"):
        hypothesis.settings.load_profile("thorough")
    if config.getoption("store_slow") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(slow.Recorder())
    if config.getoption("no_new_test_after") is not None:
        config.pluginmanager.register(slow.Limit(config.getoption("no_new_test_after")))


@pytest.hookimpl(tryfirst=True)  # before `-m` asks for the markers
def pytest_collection_modifyitems(config, items):
    """Heeds the marker `representatives(n)`, and sets `slow` where a test was seen to be so."""
    if not config.getoption("thorough"):
        left_out = set(others(items, "representatives"))
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if item.nodeid in slow.known():
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # of what TensorFlow and the tests have made by now, nothing is ever garbage


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Without oneDNN, what TensorFlow has no kernel for on the CPU cannot be tested."""
    try:
        return (yield)
    except Exception as error:
        errors = getattr(error, "exceptions", [error])  # of several draws
        if os.environ["TF_ENABLE_ONEDNN_OPTS"] == "0" and all(
            _NO_KERNEL.search(str(each)) for each in errors
        ):
            pytest.skip("TensorFlow has no such kernel without oneDNN")
        raise


@pytest.fixture(autouse=True)
def seeded():
    keras.utils.set_random_seed(0)
