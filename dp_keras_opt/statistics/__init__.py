"""Private numbers beside the weights: counts, means, vocabularies, scores; on one ledger."""

from dp_keras_opt.statistics import metrics
from dp_keras_opt.statistics.adapting import adapt_privately
from dp_keras_opt.statistics.evaluation import evaluate
from dp_keras_opt.statistics.private_data import Estimate, Moments, PrivateData
from dp_keras_opt.statistics.vocabulary import Vocabulary

__all__ = [
    "Estimate", "Moments", "PrivateData", "Vocabulary", "adapt_privately", "evaluate", "metrics",
]  # fmt: skip
