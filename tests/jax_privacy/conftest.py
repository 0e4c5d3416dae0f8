"""Without JAX Privacy the tests of this folder are not collected."""

import importlib.util

if importlib.util.find_spec("jax_privacy") is None:
    collect_ignore_glob = ["test_*.py"]
