"""Which optimizer, and with which hyper-parameters: comparisons and tuning at a budget."""

from dp_keras_opt import deprecation
from dp_keras_opt.tuning.candidates import CANDIDATES, Candidate, RunInfo, candidate, get
from dp_keras_opt.tuning.comparison import Comparison, compare
from dp_keras_opt.tuning.runs import Task
from dp_keras_opt.tuning.tuner import Tuned, tune

__all__ = [
    "CANDIDATES",
    "Candidate",
    "Comparison",
    "RunInfo",
    "Task",
    "Tuned",
    "candidate",
    "compare",
    "get",
    "tune",
]

__getattr__ = deprecation.renamed_names(__name__, {"Plan": RunInfo})
