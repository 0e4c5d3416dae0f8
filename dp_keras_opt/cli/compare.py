"""`compare`: several optimizers on a model file and a data set, at equal budgets."""

import pathlib

import dp_keras_opt as dp
from dp_keras_opt.cli import arguments as args
from dp_keras_opt.cli import datasets, models
from dp_keras_opt.cli.results import CommandError, Result, UsageError, errors_as
from dp_keras_opt.cli.train import check_names

RESULTS, TABLE, PLOT = "results.csv", "table.md", "scores.png"

_HELD_OUT = 0.1  # of the data, each for validation and test where no file is given


def add_parser(subparsers):
    """Adds `compare`."""
    parser = args.add_command(
        subparsers, "compare", compare,
        "train with several optimizers at equal budgets, hyper-parameters by a small random search",
    )  # fmt: skip
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a .keras file, private or not")
    parser.add_argument("data", nargs="?", metavar="DATA", help=".npz, .csv or .tfrecord")
    parser.add_argument("--list", action="store_true", help="the names for --optimizers, and end")
    models.add_import(parser)
    datasets.add_arguments(parser)
    for name, purpose in (("validation", "choose settings by"), ("test", "judge them by")):
        parser.add_argument(
            f"--{name}", metavar="FILE",
            help=f"data to {purpose}; without it, a random tenth of DATA is held out",
        )  # fmt: skip
    parser.add_argument("--public", metavar="FILE", help="public data, for optimizers that need it")
    parser.add_argument(
        "--optimizers", nargs="+", metavar="NAME", help="default: all that the data is there for"
    )
    parser.add_argument("--loss", metavar="NAME", help="a Keras loss, such as mse")
    parser.add_argument(
        "--metric", metavar="NAME", help="a Keras metric, the score; default: the loss"
    )
    parser.add_argument(
        "--maximize", action="store_true", help="larger scores are better, such as accuracy"
    )
    parser.add_argument(
        "--epsilon", type=args.positive, nargs="+", default=[1.0, 3.0, 8.0], metavar="EPSILON",
        help="the budgets; default 1 3 8",
    )  # fmt: skip
    parser.add_argument("--delta", type=args.probability, help="well below 1/examples")
    parser.add_argument("--batch-size", type=args.count, metavar="B", help="expected")
    parser.add_argument("--steps", type=args.count, help="of each run")
    parser.add_argument("--clip-norm", type=args.positive, default=1.0, help="default 1")
    parser.add_argument("--unit", default="example", help="what one row of the data is, in a word")
    parser.add_argument(
        "--trials", type=args.count, default=4, help="settings to try, each; default 4"
    )
    parser.add_argument("--seeds", type=args.count, default=3, help="runs to judge by; default 3")
    parser.add_argument(
        "--fresh", action="store_true",
        help="draw initial weights anew for each run, instead of those in MODEL",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("compared"), metavar="DIR",
        help=f"for {RESULTS}, {TABLE} and {PLOT}; what is in it already is not run again; "
        "default: compared",
    )  # fmt: skip


def compare(arguments):
    """The `Result` of `compare`."""
    if arguments.list:
        names = list(dp.tuning.CANDIDATES)
        return Result({"optimizers": names}, "\n".join(names))
    if arguments.data is None:
        raise UsageError("Give MODEL and DATA, or --list.")
    args.need(arguments, "loss", "delta", "batch_size", "steps")
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
    import keras

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
        "unless the data are public: see docs/hyperparameters.md."
    )
    data = {"rows": comparison.rows, "files": files, "note": warning}
    return Result(data, f"\n{table}\n{warning}\nWrote {', '.join(files)}")
