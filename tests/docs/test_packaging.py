"""What is stated in several files of the packaging agrees."""

import ast
import configparser
import importlib.metadata
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def setup():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config


def versions():
    """The Python versions of the classifiers, as (major, minor)."""
    found = re.findall(r"Python :: (\d+)\.(\d+)", setup()["metadata"]["classifiers"])
    return sorted((int(major), int(minor)) for major, minor in found)


def test_the_conda_environment_asks_for_what_the_package_supports():
    lines = (ROOT / "environment.yml").read_text(encoding="utf-8").splitlines()
    items = [line.strip().removeprefix("- ") for line in lines if line.strip().startswith("- ")]
    (python,) = (item for item in items if item.startswith("python "))
    (major, first), (_, last) = versions()[0], versions()[-1]
    assert python == f"python >={major}.{first},<{major}.{last + 1}"
    assert setup()["options"]["python_requires"] == f">={major}.{first}"
    assert "conda-forge" in items and "pip" in items
    (package,) = (item for item in items if item.startswith("-e ."))
    extras = set(re.fullmatch(r"-e \.\[(.*)\]", package).group(1).split(","))
    assert extras <= set(setup()["options.extras_require"])
    required = re.findall(r"^[\w-]+", setup()["options"]["install_requires"], re.M)
    pinned_twice = {item.split()[0] for item in items} & {"python", *required} - {"python"}
    assert not pinned_twice, f"setup.cfg states these: {pinned_twice}"


def test_tox_installs_the_package_on_every_supported_python():
    tox = (ROOT / "tox.ini").read_text(encoding="utf-8")
    minors = ",".join(str(minor) for _, minor in versions())
    assert f"install-py3{{{minors}}}," in tox and f" py3{{{minors}}}," in tox


def test_the_package_says_that_it_is_typed():
    config = setup()
    assert (ROOT / "dp_keras_opt" / "py.typed").exists()
    assert "py.typed" in config["options.package_data"]["dp_keras_opt"].split()
    assert "Typing :: Typed" in config["metadata"]["classifiers"]


def test_pages_that_need_more_packages_are_run_where_these_are():
    front = re.compile(r"\A---\nextra: (\w+)\n---\n")
    pages = {page: front.match(page.read_text("utf-8")) for page in (ROOT / "docs").rglob("*.md")}
    extras = {found.group(1) for found in pages.values() if found}
    assert extras == {"hub"}
    config = configparser.ConfigParser()
    config.read(ROOT / "tox.ini", encoding="utf-8")
    assert "data" in config["testenv:doctest"]["extras"].split(", ")  # docs/how_to/my_data.md
    environment = config["testenv:hub"]
    assert "hub" in environment["extras"].split(", ") and " -t hub " in environment["commands"]
    assert re.search(r"tox -e [\w,-]*\bhub\b", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    packages = ("keras_hub", "keras_tuner", "PIL")
    for page, found in pages.items():
        imported = re.findall(r"^(?:import|from) (\w+)", page.read_text("utf-8"), re.M)
        assert found or not set(imported) & set(packages), page


def imported(package):
    """The top-level modules that the files of a package import."""
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                yield from (name.name.partition(".")[0] for name in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield node.module.partition(".")[0]


def test_attrs_is_asked_for_as_by_the_accountant():
    """Of a wider range a resolver takes an attrs that only old releases of dp-accounting allow."""
    asked = re.findall(r"^attrs(.*)", setup()["options"]["install_requires"], re.M)
    theirs = [
        requirement.removeprefix("attrs")
        for requirement in importlib.metadata.requires("dp-accounting")
        if requirement.startswith("attrs")
    ]
    if "<" not in theirs[0]:
        pytest.skip("dp-accounting before 0.6 takes any attrs")
    assert [set(one.split(",")) for one in asked] == [set(one.split(",")) for one in theirs]


def test_what_the_package_imports_is_asked_for():
    config = setup()
    asked = config["options"]["install_requires"] + "".join(
        config["options.extras_require"].values()
    )
    asked = set(re.findall(r"^[\w-]+", asked, re.M))
    of_modules = {
        module: [name.replace("_", "-") for name in names]
        for module, names in importlib.metadata.packages_distributions().items()
    }
    found = {*imported("dp_keras_opt"), *imported("dp_keras_opt_cli")}
    found -= {"dp_keras_opt", "dp_keras_opt_cli", *sys.stdlib_module_names}
    assert {"attr", "keras"} <= found
    unasked = {name for name in found if not asked & set(of_modules.get(name, [name]))}
    assert not unasked


def test_pages_state_the_versions_that_are_required():
    required = dict(
        re.findall(r"^([\w-]+)>=([\d.]+),", setup()["options"]["install_requires"], re.M)
    )
    page = (ROOT / "docs" / "reference" / "compatibility.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([\w-]+) \| ([\d.]+) or later", page, re.M))
    assert {name.lower(): version for name, version in rows.items()} == required
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("TensorFlow", "Keras"):
        assert f"{name} {required[name.lower()]} or later" in readme
    (_, first), (_, last) = versions()[0], versions()[-1]
    assert f"Python 3.{first} to 3.{last}" in readme


def test_public_checks_run_what_developers_run():
    workflows = ROOT / ".github" / "workflows"
    ci, release = ((workflows / f"{name}.yml").read_text("utf-8") for name in ("ci", "release"))
    assert "run: .ci/run\n" in ci and "pull_request:" in ci
    tests, build, publish = (
        release.index("  tests:"),
        release.index("  build:"),
        release.index("  publish:"),
    )
    assert "uses: ./.github/workflows/ci.yml" in release[tests:build]
    assert "needs: tests" in release[build:publish] and "twine check --strict" in release
    assert "id-token: write" in release[publish:] and "id-token" not in release[:publish]
    assert "secrets." not in release, "trusted publishing needs no token"
