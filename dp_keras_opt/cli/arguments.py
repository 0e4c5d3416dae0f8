"""Arguments that several commands share, and what is made of them."""

import argparse
import json
import math

import dp_keras_opt as dp
from dp_keras_opt.cli.results import UsageError, errors_as

#: As in `accounting.Sampling`, which is not loaded when arguments are parsed.
SAMPLINGS = (
    "poisson",
    "without_replacement",
    "full",
    "shuffled",
    "shuffled_accounted_as_poisson",
    "fixed_order",
    "cyclic_poisson",
)
ADJACENCIES = ("add_or_remove_one", "zero_out", "replace_one")
ACCOUNTANTS = ("rdp", "pld", "pure")

#: Constructor arguments that have an option of their own, or are not for the command line.
_NOT_SET = {
    "batch_size": "give --batch-size",
    "clip_norm": "give --clip-norm",
    "noise_multiplier": "give --noise-multiplier, or have it calibrated",
    "seed": "whoever knows the seed can subtract the noise",
}


def add_command(subparsers, name, run, help, **options):
    """A parser for a command; `run(arguments)` gives its `Result`.

    Args:
        subparsers: what `add_parser(subparsers)` of a module of commands was given.
        name: of the command.
        run: function of the parsed arguments.
        help: a line on it.
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
    parser.add_argument("--accountant", choices=ACCOUNTANTS, default="rdp")


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
        "--drop-remainder", action="store_true", help="of epochs whose last batch is incomplete"
    )
    add_neighbours(parser)
    add_optimizer(parser)


def need(arguments, *names):
    """Refuses a run of which something is not said."""
    for name in names:
        if name == "length":
            if arguments.steps is None and arguments.epochs is None:
                raise UsageError("How long the training is, is not said: give --steps or --epochs.")
        elif getattr(arguments, name) is None:
            raise UsageError(f"Give --{name.replace('_', '-')}.")


def make_sampling(arguments, batch_size=None):
    """The `Sampling` that the arguments of `add_run` describe.

    Args:
        arguments: parsed.
        batch_size: to take instead of the one given.
    """
    from dp_keras_opt.accounting.sampling import ADJACENCIES as BY_KIND

    batch_size = batch_size or arguments.batch_size
    if arguments.sampling == "full":
        batch_size = batch_size or arguments.num_examples
    if batch_size is None:
        raise UsageError("Give --batch-size.")
    with errors_as(UsageError):
        return dp.accounting.Sampling(
            arguments.sampling,
            arguments.num_examples,
            batch_size,
            arguments.adjacency or BY_KIND[arguments.sampling][0],
            arguments.unit,
            arguments.drop_remainder,
            arguments.groups,
        )


def make_steps(arguments, sampling):
    """The number of steps, of which an epoch has so many as the sampling says."""
    return arguments.steps or arguments.epochs * sampling.steps_per_epoch


def make_optimizer(arguments, batch_size, noise_multiplier=None, steps=None):
    """The optimizer that the arguments of `add_optimizer` describe.

    Args:
        arguments: parsed.
        batch_size: the expected batch size.
        noise_multiplier: None where it is to be found.
        steps: of the run, for optimizers that must know; None where it is to be found.

    Raises:
        UsageError: there is no such optimizer, or it does not take what is set.
    """
    from dp_keras_opt.optimizers.catalog import CATALOG

    entries = {entry.name.lower(): entry for entry in CATALOG}
    entry = entries.get(arguments.optimizer.lower())
    if entry is None:
        raise UsageError(
            f"--optimizer {arguments.optimizer!r} is not known; use one of "
            f"{', '.join(entry.name for entry in CATALOG)}."
        )
    settings = _settings(arguments.settings)
    if "steps" in entry.arguments and steps is not None:
        settings.setdefault("steps", steps)
    for name in entry.arguments.keys() - settings.keys():
        raise UsageError(f"{entry.name} needs {name}: give --set {name}=VALUE.")
    with errors_as(UsageError, before=f"{entry.name}: "):
        return dp.optimizers.get(
            entry.name,
            clip_norm=arguments.clip_norm,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            **settings,
        )


def _settings(pairs):
    settings = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not (equals and key.isidentifier()):
            raise UsageError(f"--set {pair!r} is not KEY=VALUE, such as momentum=0.9.")
        if key in _NOT_SET:
            raise UsageError(f"--set does not take {key}: {_NOT_SET[key]}.")
        settings[key] = _value(text, pair)
    return settings


def _value(text, pair):
    """A JSON value; what is no JSON is a name, such as that of a second moment."""
    try:
        value = json.loads(text)
    except ValueError:
        if text[:1] in '{["' or not text:
            raise UsageError(f"--set {pair!r}: the value is not JSON.") from None
        return text
    return _revived(value) if isinstance(value, dict) and "class_name" in value else value


def _revived(config):
    """The object of this library, or the learning rate schedule of Keras, that a config names."""
    import keras

    name = config["class_name"]
    registered = f"dp_keras_opt>{name}"
    with errors_as(UsageError, of=(ValueError, TypeError, KeyError), before=f"--set: {name}: "):
        if keras.saving.get_registered_object(registered) is not None:
            whole = {"module": None, "registered_name": registered, "config": {}, **config}
            return keras.saving.deserialize_keras_object(whole)
        if hasattr(keras.optimizers.schedules, name):
            return keras.optimizers.schedules.deserialize({"config": {}, **config})
        return config
