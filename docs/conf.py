"""Sphinx configuration."""

import doctest
import inspect
import re

from docutils import nodes
from sphinx.errors import SphinxError
from sphinx.util.docutils import SphinxDirective
from sphinx.util.inspect import stringify_signature

import dp_keras_opt
from dp_keras_opt.optimizers.catalog import CATALOG

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
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88  # longer ones have a line for each argument
napoleon_numpy_docstring = False
napoleon_use_rtype = False

doctest_default_flags = (
    doctest.ELLIPSIS
    | doctest.NORMALIZE_WHITESPACE
    | doctest.IGNORE_EXCEPTION_DETAIL
    | doctest.DONT_ACCEPT_TRUE_FOR_1
)
# doctest gives out the source of the running example for that of all of them. TensorFlow would
# convert the wrong code, or fail; without any source it takes functions as they are.
doctest.DocTestRunner._DocTestRunner__LINECACHE_FILENAME_RE = re.compile("(?!)")
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


class CataloguedOptimizers(SphinxDirective):
    """An `autoclass` for each optimizer of the catalogue."""

    def run(self):
        listed = [f".. autoclass:: dp_keras_opt.optimizers.{entry.name}" for entry in CATALOG]
        return self.parse_text_to_nodes("\n\n".join(listed))


def setup(app):
    app.add_directive("catalogued-optimizers", CataloguedOptimizers)
    # Napoleon escapes the stars of "**kwargs:" but not those of "*args, **kwargs:".
    app.connect("autodoc-process-docstring", _escape_stars, priority=1)
    app.connect("autodoc-process-signature", _signature_of_init)
    app.connect("doctree-read", _select_examples, priority=900)  # once the front matter is known
    app.connect("build-finished", _demand_examples)


def _escape_stars(app, what, name, obj, options, lines):
    lines[:] = [line.replace("*args, **kwargs:", r"*args, \**kwargs:") for line in lines]


def _signature_of_init(app, what, name, obj, _, signature, returned):
    """Shows the arguments of `__init__` where a base class has a `__new__` that takes anything."""
    if what == "class" and signature and signature.startswith("(*args"):
        found = inspect.signature(obj)
        options = {"show_return_annotation": False, "unqualified_typehints": True}
        return stringify_signature(found, **options), None
    return None


def _select_examples(app, doctree):
    """Keeps the examples of the pages that belong to this run.

    Pages with `extra: hub` in their front matter need packages of that extra. They, and they alone,
    are run under `sphinx-build -t hub`, where a package that is missing is a failure.
    """
    extra = app.env.metadata[app.env.docname].get("extra")
    if app.builder.name == "doctest" and (extra == "hub") != app.tags.has("hub"):
        for node in doctree.findall(nodes.Element):
            if "testnodetype" in node:
                del node["testnodetype"]


def _demand_examples(app, exception):
    if app.builder.name == "doctest" and not exception and not app.builder.total_tries:
        raise SphinxError("No example was run.")
