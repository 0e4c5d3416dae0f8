"""Before the first step: what a model and its engines do is tried on synthetic batches.

Nothing here looks at the training data: what the check decides would otherwise depend on it.
"""

from dp_keras_opt.clipping.self_check.check import checked_engines

__all__ = ["checked_engines"]
