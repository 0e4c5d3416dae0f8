"""The only place that imports TensorFlow Privacy, whose package needs a switch under Keras 3.

Without it the tests of this folder are not collected.
"""

import importlib
import importlib.util
import sys

import pytest

if importlib.util.find_spec("tensorflow_privacy") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def tf_privacy():
    """TensorFlow Privacy's own analysis of DP-SGD."""
    sys.skip_tf_privacy_import = True  # its Keras 2 layers fail to import under Keras 3
    return importlib.import_module("tensorflow_privacy.privacy.analysis.compute_dp_sgd_privacy_lib")
