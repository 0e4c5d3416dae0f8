"""`compare`: several optimizers on a model file and a data set, at equal budgets."""

import pathlib

import keras

import dp_keras_opt as dp
from dp_keras_opt_cli import datasets, models, runs
from dp_keras_opt_cli.results import CommandError, Result, UsageError, errors_as
from dp_keras_opt_cli.train import check_names

RESULTS, TABLE, PLOT = "results.csv", "table.md", "scores.png"

_HELD_OUT = 0.1  # of the data, each for validation and test where no file is given


def compare(arguments):
    """The `Result` of `compare`."""
    if arguments.list:
        names = list(dp.tuning.CANDIDATES)
        return Result({"optimizers": names}, "\n".join(names))
    if arguments.data is None:
        raise UsageError("Give MODEL and DATA, or --list.")
    runs.need(arguments, "loss", "delta", "batch_size", "steps")
    check_names(arguments.loss, [arguments.metric] if arguments.metric else [])
    with errors_as(UsageError, before="--optimizers: "):
        chosen = arguments.optimizers and [dp.tuning.get(name) for name in arguments.optimizers]
    task = _task(arguments)
    arguments.output.mkdir(parents=True, exist_ok=True)
    comparison = dp.tuning.compare(
        task,
        chosen,
        arguments.epsilon,
        arguments.delta,
        trials=arguments.trials,
        seeds=arguments.seeds,
        results=arguments.output / RESULTS,
        name=pathlib.Path(arguments.data).name,
        verbose=0 if arguments.json else 1,
        accountant=arguments.accountant,
    )
    return _result(arguments, comparison)


def _task(arguments):
    data, validation, test, public = datasets.load_all(
        arguments, arguments.validation, arguments.test, arguments.public
    )
    shares = [_HELD_OUT * (part is None) for part in (validation, test)]
    train, *held_out = datasets.split(data, shares)
    validation, test = (part or own for part, own in zip((validation, test), held_out, strict=True))
    build = _builder(arguments)
    with errors_as(CommandError):
        dp.clipping.validate(dp.make_private(build()))
    return dp.tuning.Task(
        build,
        train,
        validation,
        arguments.loss,
        arguments.batch_size,
        arguments.steps,
        score=arguments.metric,
        higher_is_better=arguments.maximize,
        test=test,
        public=public,
        clip_norm=arguments.clip_norm,
        unit=arguments.unit,
    )


def _builder(arguments):
    """A function that makes the model anew."""

    def build():
        model = models.load(arguments.model, arguments.modules)
        return keras.models.clone_model(model) if arguments.fresh else model

    return build


def _result(arguments, comparison):
    table = comparison.markdown()
    (arguments.output / TABLE).write_text(table, encoding="utf-8")
    written = [RESULTS, TABLE]
    try:
        comparison.plot().figure.savefig(arguments.output / PLOT, dpi=130)
        written.append(PLOT)
    except ImportError:  # without the extra `plots`, the table has to do
        pass
    files = [str(arguments.output / name) for name in written]
    warning = (
        "Each model alone is private at its epsilon. The table is not, nor is a choice made by it, "
        "unless the data are public: see docs/how_to/hyperparameters.md."
    )
    data = {"rows": comparison.rows, "files": files, "note": warning}
    return Result(data, f"\n{table}\n{warning}\nWrote {', '.join(files)}")
