"""`explain`: how a model would be trained privately, and what in it cannot be."""

import contextlib
import io

import dp_keras_opt as dp
from dp_keras_opt.cli import arguments as args
from dp_keras_opt.cli import models
from dp_keras_opt.cli.results import CommandError, Result, errors_as


def add_parser(subparsers):
    """Adds `explain`."""
    parser = args.add_command(
        subparsers, "explain", explain,
        "which engine clips which layer of a model, and what cannot be trained privately",
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", help="a .keras file")
    models.add_import(parser)


def explain(arguments):
    """The `Result` of `explain`."""
    model = models.load(arguments.model, arguments.modules)
    with errors_as(CommandError):
        private = dp.make_private(model)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        layers = [served._asdict() for served in dp.clipping.explain(private)]
    problems = refused(private)
    data = {"model": str(arguments.model), "layers": layers, "refused": problems}
    return Result(data, printed.getvalue().rstrip("\n"), " ".join(problems) or None)


def refused(model):
    """What `clipping.validate` refuses of a model, a sentence or two each."""
    try:
        dp.clipping.validate(model)
    except ValueError as error:
        return str(error).split("\n- ")[1:]
    return []
