"""The commands and their arguments. Nothing here loads the library, so that `--help` is quick."""

import argparse
import importlib.metadata
import pathlib

from dp_keras_opt_cli import arguments as args
from dp_keras_opt_cli.results import UsageError

_EPILOG = """exit codes: 0 done; 1 what was asked cannot be done; 2 wrong arguments; 3 a file is not
there or cannot be read; 4 the budget is spent already; 130 interrupted"""


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` whose errors are like all others: one line."""

    def error(self, message):
        raise UsageError(f"{message} ({self.prog} --help lists the arguments)")


class _Version(argparse.Action):
    """Prints which version is installed, and ends."""

    def __init__(self, option_strings, dest):
        super().__init__(option_strings, dest, nargs=0, help="show the version, and end")

    def __call__(self, parser, *_args):
        print(f"{parser.prog} {importlib.metadata.version('dp-keras-opt')}")
        parser.exit()


def make_parser():
    """The parser of all commands."""
    parser = Parser(
        prog="dp-keras-opt",
        description="Train Keras models under differential privacy, and account for it.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action=_Version)
    subparsers = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True
    )
    for add in (
        _add_plan,
        _add_spent,
        _add_optimizers,
        _add_train,
        _add_compare,
        _add_explain,
        _add_index,
        _add_reproduce,
        _add_completion,
    ):
        add(subparsers)
    return parser


def _add_plan(subparsers):
    parser = args.add_command(subparsers, "epsilon", "plan:epsilon", "the epsilon of a planned run")
    args.add_run(parser)
    args.add_accounting(parser)
    parser = args.add_command(
        subparsers, "calibrate", "plan:calibrate",
        "what meets a privacy budget: the one that you leave out of noise multiplier, steps or "
        "epochs, and batch size",
    )  # fmt: skip
    args.add_run(parser)
    parser.add_argument("--epsilon", type=args.positive, required=True, help="the budget")
    args.add_accounting(parser)


def _add_spent(subparsers):
    parser = args.add_command(
        subparsers, "statement", "spent:statement",
        "the privacy statement of a saved model, a ledger file or a planned run",
    )  # fmt: skip
    _add_spent_or_planned(parser)
    args.add_accounting(parser)
    _add_group_size(parser)
    parser = args.add_command(
        subparsers, "risk", "spent:risk",
        "what attacks can gain at most: of a saved model, a ledger file or a planned run",
    )  # fmt: skip
    _add_spent_or_planned(parser)
    args.add_accountant(parser)
    parser = args.add_command(subparsers, "ledger", "spent:ledger", "what a ledger file has spent")
    parser.add_argument("file", metavar="FILE", help="a ledger, or a .keras model that has one")
    _add_import(parser)
    args.add_accounting(parser)
    _add_group_size(parser)


def _add_spent_or_planned(parser):
    parser.add_argument(
        "file", nargs="?", metavar="FILE", help="a .keras model or a ledger; none: a planned run"
    )
    _add_import(parser)
    args.add_run(parser, required=False)


def _add_optimizers(subparsers):
    args.add_command(
        subparsers, "optimizers", "optimizers:optimizers",
        "the optimizers: what they need, what a step costs, and their papers",
    )  # fmt: skip


def _add_train(subparsers):
    parser = args.add_command(
        subparsers, "train", "train:train",
        "train a model within a privacy budget, on Poisson batches of a data set",
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", help="a .keras file, private or not")
    parser.add_argument("data", metavar="DATA", help=".npz, .csv or .tfrecord")
    _add_import(parser)
    parser.add_argument(
        "--fix", action="store_true", help="replace batch normalization, which cannot be private"
    )
    _add_data(parser)
    parser.add_argument("--validation", metavar="FILE", help="data to evaluate on, like DATA")
    parser.add_argument("--public", metavar="FILE", help="public data, for optimizers that need it")
    parser.add_argument("--loss", required=True, metavar="NAME", help="a Keras loss, such as mse")
    parser.add_argument(
        "--metric", action="append", default=[], dest="metrics", metavar="NAME",
        help="a Keras metric, such as mae; may be repeated",
    )  # fmt: skip
    args.add_optimizer(parser, default="DPAdam")
    parser.add_argument("--epsilon", type=args.positive, required=True, help="the budget")
    args.add_accounting(parser)
    args.add_neighbours(parser)
    parser.add_argument("--epochs", type=args.count, required=True)
    parser.add_argument("--batch-size", type=args.count, required=True, help="expected")
    parser.add_argument(
        "--physical-batch-size", type=args.count, metavar="ROWS", help="to take at a time"
    )
    parser.add_argument(
        "--ledger", metavar="FILE",
        help="a ledger file: what it holds counts against the budget, what is spent goes into it",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("trained"), metavar="DIR",
        help="for model.keras, statement.txt and history.csv; default: trained",
    )  # fmt: skip
    parser.add_argument("--export", metavar="DIR", help="write a SavedModel for serving, too")


def _add_compare(subparsers):
    parser = args.add_command(
        subparsers, "compare", "compare:compare",
        "train with several optimizers at equal budgets, hyper-parameters by a small random search",
    )  # fmt: skip
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a .keras file, private or not")
    parser.add_argument("data", nargs="?", metavar="DATA", help=".npz, .csv or .tfrecord")
    parser.add_argument("--list", action="store_true", help="the names for --optimizers, and end")
    _add_import(parser)
    _add_data(parser)
    for name, purpose in (("validation", "choose settings by"), ("test", "judge them by")):
        parser.add_argument(
            f"--{name}", metavar="FILE",
            help=f"data to {purpose}; without it, about a tenth of DATA is held out",
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
    parser.add_argument("--accountant", choices=args.ACCOUNTANTS, default="auto")
    parser.add_argument("--batch-size", type=args.count, metavar="B", help="expected")
    parser.add_argument("--steps", type=args.count, help="of each run")
    parser.add_argument("--clip-norm", type=args.positive, default=1.0, help="default 1")
    parser.add_argument("--unit", default="example", help="what one row of the data is, in a word")
    parser.add_argument(
        "--trials", type=args.count, default=4,
        help="settings to try at each ε for each hyper-parameter; default 4",
    )  # fmt: skip
    parser.add_argument("--seeds", type=args.count, default=3, help="runs to judge by; default 3")
    parser.add_argument(
        "--fresh", action="store_true",
        help="draw initial weights anew for each run, instead of those in MODEL",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("compared"), metavar="DIR",
        help="for results.csv, table.md and scores.png; what is in it already is not run again; "
        "default: compared",
    )  # fmt: skip


def _add_explain(subparsers):
    parser = args.add_command(
        subparsers, "explain", "explain:explain",
        "which engine clips which layer of a model, and what cannot be trained privately",
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", help="a .keras file")
    _add_import(parser)


def _add_index(subparsers):
    parser = args.add_command(
        subparsers, "index", "index:index",
        "build the indices of TFRecord files, through which samplers read any of their records",
    )  # fmt: skip
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="not compressed; its index is FILE.index"
    )
    parser.add_argument(
        "--check", action="store_true",
        help="write nothing: hold every record against its checksum and the index that is there",
    )  # fmt: skip


def _add_reproduce(subparsers):
    parser = args.add_command(
        subparsers,
        "reproduce",
        "reproduce:reproduce",
        "run an experiment of the papers, by its name",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="see --list")
    parser.add_argument("--list", action="store_true", help="list the experiments")
    parser.add_argument("--quick", action="store_true", help="a minute's worth, to try it out")
    parser.add_argument("--seed", type=int, help="of data and initial weights")
    parser.add_argument(
        "--output", type=pathlib.Path, metavar="DIR", help="default: output/papers/NAME"
    )
    parser.add_argument(
        "--examples", type=pathlib.Path, metavar="DIR",
        help="the folder of the experiments; default: examples/papers of the clone of the "
        "repository that this is run in",
    )  # fmt: skip


def _add_completion(subparsers):
    parser = args.add_command(
        subparsers, "completion", "completion:completion", "print a completion script for a shell",
        epilog="bash: source <(dp-keras-opt completion bash)",
    )  # fmt: skip
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def _add_group_size(parser):
    parser.add_argument(
        "--group-size", type=args.count, default=1, metavar="K",
        help="state the guarantee for K units together, too",
    )  # fmt: skip


def _add_import(parser):
    """--import, for the user's own classes."""
    parser.add_argument(
        "--import", action="append", default=[], dest="modules", metavar="MODULE",
        help="a Python module that registers the model's own layers; may be repeated",
    )  # fmt: skip


def _add_data(parser):
    """--target, --feature and --schema."""
    parser.add_argument(
        "--target", metavar="NAME",
        help="the column or array to predict; needed for CSV, elsewhere default: y",
    )  # fmt: skip
    parser.add_argument(
        "--feature", action="append", default=[], dest="features", metavar="NAME:SHAPE:TYPE",
        help="of a TFRecord file, e.g. image:28x28:float32 or y::int64; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--schema", metavar="FILE",
        help='the same in a JSON file: {"image": {"shape": [28, 28], "dtype": "float32"}, ...}',
    )  # fmt: skip
