"""What training costs in privacy: sampling, epsilon, calibration, ledger and statement."""

from dp_keras_opt.accounting.calibration import affordable_batch_size, calibrate
from dp_keras_opt.accounting.composition import adp_noise_multiplier, advanced_composition
from dp_keras_opt.accounting.ledger import Ledger
from dp_keras_opt.accounting.planning import epsilon, statement
from dp_keras_opt.accounting.repetitions import RandomRepetitions
from dp_keras_opt.accounting.sampling import Sampling

__all__ = [
    "Ledger",
    "RandomRepetitions",
    "Sampling",
    "adp_noise_multiplier",
    "advanced_composition",
    "affordable_batch_size",
    "calibrate",
    "epsilon",
    "statement",
]
