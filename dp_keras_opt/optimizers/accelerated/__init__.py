"""Accelerated methods: heavy ball, Nesterov, and Nesterov in stages."""

from dp_keras_opt.optimizers.accelerated.heavy_ball import DPHeavyBall
from dp_keras_opt.optimizers.accelerated.multistage import DPMultistageNesterov, Stages
from dp_keras_opt.optimizers.accelerated.nesterov import DPNesterov

__all__ = ["DPHeavyBall", "DPMultistageNesterov", "DPNesterov", "Stages"]
