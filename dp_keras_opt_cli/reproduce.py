"""`reproduce`: runs the papers' experiments, which are in the repository and not in the package."""

import ast
import pathlib
import subprocess
import sys

import dp_keras_opt as dp
from dp_keras_opt.tables import aligned
from dp_keras_opt_cli.results import CommandError, FileError, Result, UsageError

_FOLDER = pathlib.Path("examples", "papers")


def reproduce(arguments):
    """The `Result` of `reproduce`."""
    found = experiments(arguments.examples)
    if arguments.list:
        listed = [{"name": name, "about": about(path)} for name, path in found.items()]
        rows = [list(each.values()) for each in listed]
        return Result({"experiments": listed}, aligned(["name", "about"], rows))
    if arguments.name is None:
        raise UsageError("Give the NAME of an experiment, or --list.")
    name = arguments.name.replace("-", "_")
    if name not in found:
        raise UsageError(f"There is no experiment {name!r}; there are {', '.join(found)}.")
    output = arguments.output or pathlib.Path("output", "papers", name)
    run(found[name], output, arguments)
    files = sorted(str(path) for path in output.iterdir())
    data = {"name": name, "output": str(output), "files": files}
    return Result(data, f"{name}: {len(files)} files in {output}")


def run(script, output, arguments):
    """Runs an experiment in a process of its own; what it prints is not the result."""
    command = [sys.executable, str(script), "--output", str(output)]
    command += ["--quick"] * arguments.quick
    command += [] if arguments.seed is None else ["--seed", str(arguments.seed)]
    to = 2 if arguments.json else None  # stderr
    code = subprocess.run(command, stdout=to, check=False).returncode
    if code:
        raise CommandError(f"The experiment ended with exit code {code}; what it said is above.")


def experiments(folder=None):
    """The scripts by name, of `folder`, or of the checkout around the working folder.

    Raises:
        FileError: there are none.
    """
    here = pathlib.Path.cwd()
    package = pathlib.Path(dp.__file__).parent  # of a checkout that is installed as editable
    places = [folder] if folder else [p / _FOLDER for p in (here, *here.parents, package.parent)]
    for place in places:
        scripts = {p.stem: p for p in sorted(place.glob("*.py")) if '"__main__"' in p.read_text()}
        if scripts:
            return scripts
    raise FileError(
        f"The experiments are not {f'in {folder}' if folder else 'here'}: they are in the folder "
        f"{_FOLDER} of the repository of dp-keras-opt, and not in the package. Run this in a "
        "clone of it, or give --examples DIR."
    )


def about(script):
    """The first line of a script's docstring."""
    text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]
