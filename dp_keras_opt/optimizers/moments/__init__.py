"""Where the second moment of an adaptive optimizer comes from: one strategy a source.

The private gradient is noisy, and squaring it squares the noise. Each strategy answers three
questions, for any of the rules (Adam, AdaGrad, RMSProp, Yogi): what is asked of the data, what the
rule's accumulator v takes in, and what the step is divided by.
"""

from dp_keras_opt.optimizers.moments.base import PostProcessing, SecondMoment
from dp_keras_opt.optimizers.moments.bias_corrected import BiasCorrected
from dp_keras_opt.optimizers.moments.identifiers import SecondMomentLike as SecondMomentLike
from dp_keras_opt.optimizers.moments.identifiers import get
from dp_keras_opt.optimizers.moments.joint import Independent, Joint
from dp_keras_opt.optimizers.moments.noiseless import Noiseless
from dp_keras_opt.optimizers.moments.scale_then_privatize import ScaleThenPrivatize
from dp_keras_opt.optimizers.moments.side_information import SideInformation

__all__ = [
    "BiasCorrected",
    "Independent",
    "Joint",
    "Noiseless",
    "PostProcessing",
    "ScaleThenPrivatize",
    "SecondMoment",
    "SideInformation",
    "get",
]
