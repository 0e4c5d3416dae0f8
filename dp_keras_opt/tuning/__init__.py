"""Which optimizer, and with which hyper-parameters: comparisons and tuning at a budget."""

from dp_keras_opt.tuning.candidates import CANDIDATES, Candidate, Plan, candidate, get
from dp_keras_opt.tuning.comparison import Comparison, compare
from dp_keras_opt.tuning.runs import Task
from dp_keras_opt.tuning.tuner import Tuned, tune

__all__ = [
    "CANDIDATES",
    "Candidate",
    "Comparison",
    "Plan",
    "Task",
    "Tuned",
    "candidate",
    "compare",
    "get",
    "tune",
]
