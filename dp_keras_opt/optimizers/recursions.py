"""How a second moment v takes in a square: the recursions that the adaptive rules share.

Each is a function of v and of the square that gives the next v; tensors, arrays or scalars.
"""

from typing import Any

from keras import ops


def running_mean(v: Any, square: Any, decay: float) -> Any:
    """v ← decay·v + (1 − decay)·square, of Adam and RMSProp.

    Reference: Tieleman and Hinton, "Lecture 6.5: rmsprop, divide the gradient by a running average
    of its recent magnitude", 2012; Kingma and Ba, "Adam: a method for stochastic optimization",
    ICLR 2015, arXiv:1412.6980, Algorithm 1.
    """
    return v + (square - v) * (1 - decay)


def running_sum(v: Any, square: Any) -> Any:
    """v ← v + square, of AdaGrad.

    Reference: Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and
    stochastic optimization", JMLR 12, 2011, https://jmlr.org/papers/v12/duchi11a.html.
    """
    return v + square


def bounded_step(v: Any, square: Any, decay: float) -> Any:
    """v ← v + (1 − decay)·sign(square − v)·square, of Yogi.

    Reference: Zaheer, Reddi, Sachan, Kale and Kumar, "Adaptive methods for nonconvex optimization",
    NeurIPS 2018, Algorithm 2.
    """
    return v + (1 - decay) * ops.sign(square - v) * square
