"""The matrices of correlated noise, dense and written from the specification."""

import numpy as np
from scipy import linalg, special

from dp_keras_opt import noise


def toeplitz(coefficients, steps):
    """C as a (T, T) matrix."""
    column = np.zeros(steps)
    column[: min(len(coefficients), steps)] = coefficients[:steps]
    return linalg.toeplitz(column, np.zeros(steps))


def inverse(mechanism, steps=12):
    """What the draws are multiplied with, (steps, draws), from the specification."""
    if isinstance(mechanism, noise.TreeAggregation):
        # One draw a step, for the node that begins then; prefix t has the nodes of t's binary form.
        prefixes = np.zeros((steps + 1, steps))
        for t in range(1, steps + 1):
            end, rest = 0, t
            for level in reversed(range(t.bit_length())):
                if rest >> level & 1:
                    end += 2**level
                    prefixes[t, end - 1] += 1
        return np.diff(prefixes, axis=0)
    if isinstance(mechanism, noise.correlated.FromMatrix):
        return np.linalg.inv(mechanism.matrix)
    return np.linalg.inv(strategy(mechanism, steps))


def strategy(mechanism, steps):
    """C of a Toeplitz mechanism, of unit column norm over `mechanism.length` steps."""
    length = mechanism.length
    k = np.arange(length)
    if isinstance(mechanism, noise.BufferedToeplitz):
        column = np.zeros(length)
        for scale, decay in zip(mechanism.scales, mechanism.decays, strict=True):
            column[1:] += scale * decay ** (k[1:] - 1)
        column[0] = 1.0
    elif isinstance(mechanism, noise.BandedInverseSquareRoot):
        # (1 − x)^(1/2), cut off, is inverted.
        row = [special.binom(0.5, j) * (-1.0) ** j for j in range(mechanism.inverse_bands)]
        column = np.linalg.inv(toeplitz(np.array(row), length))[:, 0]
    elif isinstance(mechanism, noise.LambdaCGD):
        column = mechanism.fraction**k
    else:
        column = np.array(mechanism.coefficients)
    return toeplitz(column / np.linalg.norm(column), steps)


def workload(steps, beta=0.0, nesterov=False, rates=None, horizon=np.inf):
    """A: what the weights after each step have of each gradient, by the recursion of the rule."""
    rates = np.ones(steps) if rates is None else np.array(rates)
    columns = []
    for impulse in np.eye(steps):
        velocity, weight, weights = 0.0, 0.0, []
        for rate, gradient in zip(rates, impulse, strict=True):
            velocity = beta * velocity + rate * gradient
            weight *= 1 - 1 / horizon
            weight += beta * velocity + rate * gradient if nesterov else velocity
            weights.append(weight)
        columns.append(weights)
    return np.array(columns).T
