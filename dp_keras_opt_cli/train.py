"""`train`: from a model file, a data set and a budget to a private model with its statement."""

import csv
import sys

import keras

import dp_keras_opt as dp
from dp_keras_opt_cli import datasets, models, runs
from dp_keras_opt_cli.results import (
    CommandError,
    FileError,
    Result,
    SpentError,
    UsageError,
    errors_as,
)

MODEL, STATEMENT, HISTORY = "model.keras", "statement.txt", "history.csv"

_ANY_TARGET = ("accuracy", "acc", "crossentropy", "ce")  # what they are, compile decides
_SPENT = 0.999  # of a budget: what calibration leaves over is no budget for more steps


def train(arguments):
    """The `Result` of `train`."""
    check_names(arguments.loss, arguments.metrics)
    model = _private_model(arguments)
    data, validation, public = datasets.load_all(arguments, arguments.validation, arguments.public)
    batches = _batches(arguments, data, public)
    _attach_ledger(arguments, model)
    try:
        return _trained(arguments, model, batches, public is not None, validation)
    finally:
        model.ledger.unlock()


def _trained(arguments, model, batches, has_public, validation):
    steps = arguments.epochs * len(batches)
    optimizer = runs.make_optimizer(arguments, arguments.batch_size, steps=steps)
    if optimizer.needs_public and not has_public:
        raise UsageError(f"{arguments.optimizer} needs public data: give --public FILE.")
    if (arguments.output / MODEL).exists():
        raise FileError(
            f"{arguments.output / MODEL} exists, and with it the record of what it has spent. Give "
            "another --output."
        )
    if arguments.export:
        with errors_as(FileError, of=(OSError, ValueError)):
            dp.serving.saved_model.check_folder(arguments.export)
    _calibrate(arguments, model.ledger, optimizer, batches.sampling, steps)
    model.compile(optimizer=optimizer, loss=arguments.loss, metrics=arguments.metrics)
    report = _fit(arguments, model, batches)
    return _result(arguments, model, optimizer, report, validation)


def check_names(loss, metrics):
    """Refuses names that Keras does not know, which it would say later and at length."""
    with errors_as(UsageError, before="--loss: "):
        keras.losses.get(loss)
    for metric in set(metrics) - set(_ANY_TARGET):
        with errors_as(UsageError, before="--metric: "):
            keras.metrics.get(metric)


def _private_model(arguments):
    model = models.load(arguments.model, arguments.modules)
    with errors_as(CommandError):
        if arguments.fix:
            model = dp.clipping.fix(model)
        model = dp.make_private(model)
        dp.clipping.validate(model)
    return model


def _batches(arguments, data, public):
    given = {"adjacency": arguments.adjacency} if arguments.adjacency else {}
    with errors_as(UsageError, before=f"{arguments.data}: "):
        batches = dp.data.poisson_batches(
            data, arguments.batch_size, unit=arguments.unit,
            physical_batch_size=arguments.physical_batch_size, **given,
        )  # fmt: skip
    if public is None:
        return batches
    with errors_as(FileError, before=f"{arguments.public}: "):
        return dp.data.with_public(batches, public)


def _attach_ledger(arguments, model):
    if arguments.ledger:
        with errors_as(FileError, of=(ValueError, RuntimeError)):
            model.ledger = dp.accounting.Ledger(arguments.ledger)


def _calibrate(arguments, ledger, optimizer, sampling, steps):
    """Sets the least noise with which all that was spent and all steps to come meet the budget."""
    budget = arguments.epsilon, arguments.delta, arguments.accountant
    before = ledger.epsilon(*budget[1:])
    if before > _SPENT * budget[0]:
        raise SpentError(
            f"The budget of epsilon={budget[0]:g} at delta={budget[1]:g} is spent already: earlier "
            f"training has had {before:.6g} of it. Raise --epsilon, or stop here."
        )
    dp.accounting.calibrate(optimizer, sampling, steps, *budget, spent=ledger)


def _fit(arguments, model, batches):
    """Trains; also if that is interrupted, what was trained is kept with what it has spent."""
    budget = arguments.epsilon, arguments.delta, arguments.accountant
    report = dp.callbacks.PrivacyReport(arguments.delta, accountant=arguments.accountant)
    shown = 0 if arguments.json else 1 if sys.stdout.isatty() else 2
    try:
        model.fit(
            batches,
            epochs=arguments.epochs,
            callbacks=[report, dp.callbacks.PrivacyBudget(*budget)],
            verbose=shown,
        )
    except KeyboardInterrupt:
        _write(arguments.output, model, report)
        raise
    _write(arguments.output, model, report)
    return report


def _write(folder, model, report):
    folder.mkdir(parents=True, exist_ok=True)
    model.save(folder / MODEL)
    (folder / STATEMENT).write_text(report.statement(), encoding="utf-8")
    history = {"epoch": model.history.epoch, **model.history.history}
    with open(folder / HISTORY, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(history)
        writer.writerows(zip(*history.values(), strict=True))


def _result(arguments, model, optimizer, report, validation):
    files = {name: str(arguments.output / name) for name in (MODEL, STATEMENT, HISTORY)}
    if arguments.export:
        dp.serving.export(model, arguments.export, report)
        files["export"] = arguments.export
    evaluated = None
    if validation is not None:
        evaluated = model.evaluate(*validation, verbose=0, return_dict=True)
        evaluated = {name: float(value) for name, value in evaluated.items()}
    data = {
        "epsilon": report.epsilon,
        "delta": arguments.delta,
        "accountant": arguments.accountant,
        "noise_multiplier": optimizer.noise_multiplier,
        "steps": model.ledger.steps,
        "validation": evaluated,
        "files": files,
        "statement": report.statement(),
    }
    lines = [data["statement"]]
    if evaluated:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in evaluated.items())
        lines.append(f"Validation (computed without noise): {shown}")
    lines.append("Wrote " + ", ".join(files.values()))
    return Result(data, "\n".join(lines))
