"""Accounting knows neither Keras nor anything above it, annotations included."""

import ast
import pathlib

import pytest

from dp_keras_opt import accounting

MODULES = sorted(pathlib.Path(accounting.__file__).parent.glob("*.py"))
BELOW = {"accounting", "noise", "checks", "deprecation", "files", "tables", "types", "version"}


def imported(path):
    """The dotted names that a module imports, under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_arrows_point_down(path):
    for name in imported(path):
        package, _, rest = name.partition(".")
        assert package not in ("keras", "tensorflow"), name
        if package == "dp_keras_opt":
            assert rest.split(".")[0] in BELOW, name
