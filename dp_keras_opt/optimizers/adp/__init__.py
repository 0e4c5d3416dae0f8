"""ADP: more of the budget where steps are large."""

from dp_keras_opt.optimizers.adp.adagrad_norm import ADPAdagradNorm
from dp_keras_opt.optimizers.adp.adp_sgd import ADPSGD

__all__ = ["ADPAdagradNorm", "ADPSGD"]
