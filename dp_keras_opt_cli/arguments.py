"""Arguments that several commands share. Nothing here loads the library."""

import argparse
import math

#: As in `accounting.Sampling`, which is not loaded when arguments are parsed.
SAMPLINGS = (
    "poisson",
    "truncated_poisson",
    "balls_in_bins",
    "without_replacement",
    "full",
    "shuffled",
    "shuffled_accounted_as_poisson",
    "fixed_order",
    "cyclic_poisson",
)
ADJACENCIES = ("add_or_remove_one", "zero_out", "replace_one")
ACCOUNTANTS = ("auto", "rdp", "pld", "pure")


def add_command(subparsers, name, run, help, **options):
    """A parser for a command.

    Args:
        subparsers: of the parser of all commands.
        name: of the command.
        run: "module:function" of this package; the function takes the parsed arguments and returns
            a `Result`.
        help: a line on the command.
        **options: those of `argparse.ArgumentParser`.
    """
    parser = subparsers.add_parser(name, help=help, description=help, **options)
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")
    parser.set_defaults(run=run)
    return parser


def count(text):
    """A whole number from 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return value


def positive(text):
    """A positive finite number."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def multiplier(text):
    """A noise multiplier: 0, which is no privacy, or more."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return value


def probability(text):
    """A delta: from 0 to below 1."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number from 0 to below 1, such as 1e-6"
        )
    return value


def _number(text):
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _name(text):
    return text.replace("-", "_")


def add_accounting(parser, delta=True):
    """--delta and --accountant."""
    parser.add_argument(
        "--delta", type=probability, required=delta,
        help="probability that the guarantee fails, well below 1/examples; 0 with Laplace noise",
    )  # fmt: skip
    add_accountant(parser)


def add_accountant(parser):
    """--accountant."""
    parser.add_argument("--accountant", choices=ACCOUNTANTS, default="auto")


def add_optimizer(parser, default="DPSGD"):
    """--optimizer, --clip-norm and --set."""
    parser.add_argument(
        "--optimizer", default=default, metavar="NAME",
        help=f"see `dp-keras-opt optimizers`; default {default}",
    )  # fmt: skip
    parser.add_argument("--clip-norm", type=positive, default=1.0, help="default 1")
    parser.add_argument(
        "--set", action="append", default=[], dest="settings", metavar="KEY=VALUE",
        help="an argument of the optimizer, its value as JSON: momentum=0.9, "
        'second_moment=bias_corrected, noise={"class_name": "BandedMatrix", "config": {...}}; '
        "may be repeated",
    )  # fmt: skip


def add_neighbours(parser):
    """--adjacency and --unit."""
    parser.add_argument(
        "--adjacency", type=_name, choices=ADJACENCIES,
        help="which data sets are neighbours; default: that of the sampling",
    )  # fmt: skip
    parser.add_argument("--unit", default="example", help="what one row of the data is, in a word")


def add_run(parser, required=True):
    """All that says what a planned run releases, on which batches.

    Args:
        parser: of a command.
        required: whether examples are required; the others are checked when they are used.
    """
    parser.add_argument("--num-examples", type=count, required=required, metavar="N")
    parser.add_argument("--batch-size", type=count, metavar="B", help="expected number of examples")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=count)
    length.add_argument("--epochs", type=count, help="passes over the data, in whole steps")
    parser.add_argument(
        "--noise-multiplier", type=multiplier, metavar="SIGMA", help="noise over clip norm"
    )
    parser.add_argument("--sampling", type=_name, choices=SAMPLINGS, default="poisson")
    parser.add_argument("--groups", type=count, default=1, help="of cyclic Poisson sampling")
    parser.add_argument(
        "--max-batch-size", type=count, metavar="M", help="of truncated Poisson sampling"
    )
    parser.add_argument(
        "--drop-remainder", action="store_true", help="of epochs whose last batch is incomplete"
    )
    add_neighbours(parser)
    add_optimizer(parser)
