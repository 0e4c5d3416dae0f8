"""Sphinx configuration."""

import doctest

import dp_keras_opt

project = "dp-keras-opt"
release = version = dp_keras_opt.__version__
author = "the dp-keras-opt authors"
copyright = author

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
default_role = "literal"  # docstrings write `name` as Markdown does
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # Keras's own docstrings are Markdown
autodoc_typehints = "none"
napoleon_numpy_docstring = False
napoleon_use_rtype = False

doctest_default_flags = (
    doctest.ELLIPSIS
    | doctest.NORMALIZE_WHITESPACE
    | doctest.IGNORE_EXCEPTION_DETAIL
    | doctest.DONT_ACCEPT_TRUE_FOR_1
)
doctest_global_setup = """
import os
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import keras
import numpy as np
import dp_keras_opt as dp
keras.utils.set_random_seed(0)
keras.config.disable_interactive_logging()
"""

html_theme = "furo"
html_title = f"{project} {version}"


def setup(app):
    # Napoleon escapes the stars of "**kwargs:" but not those of "*args, **kwargs:".
    app.connect("autodoc-process-docstring", _escape_stars, priority=1)


def _escape_stars(app, what, name, obj, options, lines):
    lines[:] = [line.replace("*args, **kwargs:", r"*args, \**kwargs:") for line in lines]
