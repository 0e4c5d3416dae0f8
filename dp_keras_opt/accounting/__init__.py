"""What training costs in privacy: sampling, epsilon, calibration, ledger and statement."""

from dp_keras_opt.accounting import composition
from dp_keras_opt.accounting.batch_sizes import BatchSizes
from dp_keras_opt.accounting.budget import Budget
from dp_keras_opt.accounting.calibration import affordable_batch_size, calibrate
from dp_keras_opt.accounting.forecast import epsilon, statement
from dp_keras_opt.accounting.ledger import Ledger
from dp_keras_opt.accounting.noise_planner import NoiseChoice, NoisePlan, plan_noise
from dp_keras_opt.accounting.plan import Plan
from dp_keras_opt.accounting.privacy_filters import GaussianFilter, RenyiFilter
from dp_keras_opt.accounting.repetitions import RandomRepetitions
from dp_keras_opt.accounting.risk import Risk
from dp_keras_opt.accounting.sampling import Sampling
from dp_keras_opt.deprecation import renamed_names

# What only comparisons with papers need.
_MOVED = {
    "adp_noise_multiplier": composition.adp_noise_multiplier,
    "advanced_composition": composition.advanced_composition,
}
__getattr__ = renamed_names(__name__, _MOVED)

__all__ = [
    "BatchSizes",
    "Budget",
    "GaussianFilter",
    "Ledger",
    "NoiseChoice",
    "NoisePlan",
    "Plan",
    "RandomRepetitions",
    "RenyiFilter",
    "Risk",
    "Sampling",
    "affordable_batch_size",
    "calibrate",
    "epsilon",
    "plan_noise",
    "statement",
]
