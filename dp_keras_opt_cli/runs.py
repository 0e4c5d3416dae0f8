"""What the parsed arguments of a run describe: its sampling, its steps and its optimizer."""

import json

import keras

import dp_keras_opt as dp
from dp_keras_opt.accounting.sampling import KINDS
from dp_keras_opt.optimizers.catalog import CATALOG
from dp_keras_opt_cli.results import UsageError, errors_as

#: Constructor arguments that have an option of their own, or are not for the command line.
_NOT_SET = {
    "batch_size": "give --batch-size",
    "clip_norm": "give --clip-norm",
    "noise_multiplier": "give --noise-multiplier, or have it calibrated",
    "seed": "whoever knows the seed can subtract the noise",
}


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
    batch_size = batch_size or arguments.batch_size
    if takes_all(arguments):
        batch_size = batch_size or arguments.num_examples
    if batch_size is None:
        raise UsageError("Give --batch-size.")
    config = {
        "kind": arguments.sampling,
        "num_examples": arguments.num_examples,
        "batch_size": batch_size,
        "unit": arguments.unit,
        "drop_remainder": arguments.drop_remainder,
        "groups": arguments.groups,
        "max_batch_size": arguments.max_batch_size,
    }
    if arguments.adjacency is not None:
        config["adjacency"] = arguments.adjacency
    with errors_as(UsageError):
        return dp.accounting.Sampling.from_config(config)


def takes_all(arguments):
    """Whether each batch is all of the data, so that its size is no choice."""
    return KINDS[arguments.sampling].takes_all


def make_steps(arguments, sampling):
    """The number of steps, from --steps or --epochs."""
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
    name = config["class_name"]
    registered = f"dp_keras_opt>{name}"
    with errors_as(UsageError, of=(ValueError, TypeError, KeyError), before=f"--set: {name}: "):
        if keras.saving.get_registered_object(registered) is not None:
            whole = {"module": None, "registered_name": registered, "config": {}, **config}
            return keras.saving.deserialize_keras_object(whole)
        if hasattr(keras.optimizers.schedules, name):
            return keras.optimizers.schedules.deserialize({"config": {}, **config})
        return config
