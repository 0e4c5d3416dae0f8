"""Baselines that use public data: rows of each batch that the user declares public.

`data.with_public(private, public)` puts them there. They are neither clipped nor noised nor
accounted, and every privacy statement says so.
"""

from dp_keras_opt.optimizers.public_data.ada_dps import AdaDPS
from dp_keras_opt.optimizers.public_data.pda_dpmd import PDADPMD
from dp_keras_opt.optimizers.public_data.subspace_adagrad import SubspaceAdagrad

__all__ = ["AdaDPS", "PDADPMD", "SubspaceAdagrad"]
