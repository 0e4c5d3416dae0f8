"""The structure of the package: rooms stand above one another, and imports point down only."""

import ast
import importlib.metadata
import pathlib

import dp_keras_opt

ROOT = pathlib.Path(dp_keras_opt.__file__).parent

#: From the ground up: each room imports from those before it, in annotations too.
ROOMS = (
    "types", "version", "deprecation", "checks", "files", "references", "tables", "identifiers",
    "_keras", "workers",
    "checksums", "provenance", "theory", "layers", "clipping", "noise", "accounting", "data",
    "optimizers", "training", "model", "counterpart", "replicas", "filters", "geometries",
    "statistics",
    "private_validation", "plots", "callbacks",
    "serving", "audit", "tuning", "", "cli", "__main__",
)  # fmt: skip


def _imports():
    """(importing file, imported module) of all imports of the package's own modules."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [name.name for name in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                package = node.module == "dp_keras_opt"
                modules = [f"{node.module}.{name.name}" if package else node.module
                           for name in node.names]  # fmt: skip
            else:
                continue
            for module in modules:
                if module.split(".")[0] == "dp_keras_opt":
                    yield path.relative_to(ROOT), module


def _room(parts):
    name = parts[0] if parts else ""
    return name if name in ROOMS else ""  # a name of the package's face


def test_imports_point_down_only():
    up = set()
    for path, module in _imports():
        own = path.with_suffix("").parts
        own = () if own == ("__init__",) else own
        here, there = _room(own), _room(module.split(".")[1:])
        if here != there and ROOMS.index(there) > ROOMS.index(here):
            up.add(f"{path} imports {module}")
    assert not up, "\n".join(sorted(up))


def test_every_file_and_folder_has_a_room():
    found = {path.stem for path in ROOT.glob("*.py") if path.name != "__init__.py"}
    found |= {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert found == set(ROOMS) - {""}


def test_scripts_have_names_of_their_own():
    """Tests import them side by side: of two modules of one name the second is never read."""
    folders = ("benchmarks", "examples", "examples/papers", "examples/records")
    names = [path.stem for folder in folders for path in (ROOT.parent / folder).glob("*.py")]
    installed = importlib.metadata.packages_distributions()
    assert len(set(names)) == len(names) and not set(names) & set(installed)
