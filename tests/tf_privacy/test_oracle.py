"""Our epsilon and statement by RDP against TensorFlow Privacy's.

Its statement counts steps as ceil(epochs / q) and gives two figures: Poisson sampling, and each
example once an epoch, which is one Gaussian an epoch. `used_microbatching=False` keeps it from
doubling the sensitivity.
"""

import dataclasses
import math
import re

import pytest

from dp_keras_opt import accounting
from dp_keras_opt.accounting import Sampling
from dp_keras_opt.noise import Gaussian, Release, schedules

SETTINGS = [  # n, B, epochs, sigma, delta
    (25_000, 64, 100, 1.0, 1e-5),
    (80_000, 64, 8, 0.5, 1e-6),
    (60_000, 256, 15, 1.1, 1e-5),
    (1000, 100, 3, 4.0, 1e-4),
]


@dataclasses.dataclass
class Optimizer:
    noise_multiplier: float
    batch_size: int
    clip_norm: float = 1.0
    noise_schedule: schedules.NoiseSchedule = dataclasses.field(default_factory=schedules.Constant)

    def check_sampling(self, sampling):
        pass

    def releases_for(self, noise_multiplier):
        return (Release(0, "mean", noise_multiplier, Gaussian()),)

    @property
    def releases(self):
        return self.releases_for(self.noise_multiplier)


@pytest.mark.parametrize(
    ("n", "size", "epochs", "sigma", "delta", "accountant"),
    [*((*setting, "RDP") for setting in SETTINGS), (*SETTINGS[-1], "PLD")],
)
def test_poisson_epsilon(tf_privacy, n, size, epochs, sigma, delta, accountant):
    theirs = tf_privacy._compute_dp_sgd_example_privacy(
        epochs,
        sigma,
        delta,
        used_microbatching=False,
        poisson_subsampling_probability=size / n,
        accountant_type=tf_privacy.AccountantType[accountant],
    )
    steps = math.ceil(epochs / (size / n))
    ours = accounting.epsilon(
        Optimizer(sigma, size), Sampling.poisson(n, size), steps, delta, accountant.lower()
    )
    close = 1e-12 if accountant == "RDP" else 1e-3  # the grids of PLD differ
    assert ours == pytest.approx(theirs, rel=close)


@pytest.mark.parametrize(("n", "size", "epochs", "sigma", "delta"), SETTINGS)
def test_once_an_epoch(tf_privacy, n, size, epochs, sigma, delta):
    theirs = tf_privacy._compute_dp_sgd_example_privacy(
        epochs, sigma, delta, used_microbatching=False
    )
    sampling = Sampling.shuffled(n, size, "zero_out")
    steps = epochs * sampling.steps_per_epoch
    ours = accounting.epsilon(Optimizer(sigma, size), sampling, steps, delta, "rdp")
    assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize(("n", "size", "epochs", "sigma", "delta"), SETTINGS)
def test_statement(tf_privacy, n, size, epochs, sigma, delta):
    theirs = tf_privacy.compute_dp_sgd_privacy_statement(
        n, size, epochs, sigma, delta, used_microbatching=False
    )
    once, poisson = (float(x) for x in re.findall(r":\s+(\d+\.\d{3})$", theirs, re.MULTILINE))
    for sampling, steps, figure in (
        (Sampling.shuffled(n, size, "zero_out"), None, once),
        (Sampling.poisson(n, size), math.ceil(epochs / (size / n)), poisson),
    ):
        steps = steps or epochs * sampling.steps_per_epoch
        text = accounting.statement(Optimizer(sigma, size), sampling, steps, delta, "rdp")
        shown = float(re.search(r"epsilon\s+=\s+(\d+\.\d{3})", text).group(1))
        assert figure - 1e-9 <= shown <= figure + 0.001 + 1e-9  # they round to nearest, we up


def test_old_function_with_its_orders(tf_privacy):
    """`compute_dp_sgd_privacy` tries fewer Rényi orders, so it is never below ours."""
    theirs, _ = tf_privacy.compute_dp_sgd_privacy(60_000, 256, 1.1, 15, 1e-5)
    steps = math.ceil(15 * 60_000 / 256)
    ours = accounting.epsilon(
        Optimizer(1.1, 256), Sampling.poisson(60_000, 256), steps, 1e-5, "rdp"
    )
    assert ours <= theirs <= 1.02 * ours
