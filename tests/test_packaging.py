"""What is stated in several files of the packaging agrees."""

import configparser
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]


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
    environment = config["testenv:hub"]
    assert "hub" in environment["extras"].split(", ") and " -t hub " in environment["commands"]
    assert "tox -e hub" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    packages = ("keras_hub", "keras_tuner", "datasets", "PIL")
    for page, found in pages.items():
        imported = re.findall(r"^(?:import|from) (\w+)", page.read_text("utf-8"), re.M)
        assert found or not set(imported) & set(packages), page
