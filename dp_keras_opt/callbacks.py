"""Callbacks: ε in the logs, budgets that end a training, figures that may be published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt import clipping, workers
from dp_keras_opt.accounting.accountant import composable, epsilon_of
from dp_keras_opt.accounting.budget import Budget
from dp_keras_opt.accounting.segment import TRAINING
from dp_keras_opt.checks import whole_number
from dp_keras_opt.deprecation import renamed_attribute
from dp_keras_opt.model import DPModel
from dp_keras_opt.private_validation import PrivateValidation
from dp_keras_opt.types import Accountant

if TYPE_CHECKING:
    from dp_keras_opt.accounting.sampling import Sampling

__all__ = ["OptimizerReport", "PrivacyBudget", "PrivacyReport", "PrivateValidation"]


class PrivacyReport(keras.callbacks.Callback):
    """Writes ε into the training logs: the progress bar, `History`, `CSVLogger`, TensorBoard.

    `fit` runs it before the other callbacks, so that all of them see ε.

    Args:
        delta: δ at which ε is stated, in (0, 1); choose it well below 1 / number of examples. None:
            that of the `PrivacyBudget`.
        every: also report every this many batches, None for epoch ends only.
        accountant: "auto", "rdp", "pld" or "pure". Under a privacy filter "auto" is that filter,
            and others are refused.
        sampling: the `Sampling` that is to be accounted, if it shall be checked against the data's.

    Guarantee: `epsilon` covers all private steps in the model's ledger, those of earlier `fit`
    calls and of a loaded model included, as if their number had been fixed beforehand (see
    `epsilon`). Under a privacy filter it is what its sum says was spent; the guarantee is the
    budget. The other figures in the logs (loss, metrics) are computed
    from raw data and are not private.
    """

    #: Patterns of the names that it writes into `logs`, computed from nothing but what is released.
    #: `DPModel.fit` moves callbacks that have such to the front, and lets others monitor them.
    private_logs = ("epsilon", "epsilon_*")

    def __init__(
        self,
        delta: float | None = None,
        every: int | None = None,
        accountant: Accountant = "auto",
        sampling: Sampling | None = None,
    ) -> None:
        super().__init__()
        if every is not None:
            whole_number(every, "every", 1, "It is a number of batches.")
        self.delta: Any = delta
        self._takes_delta_of_budget = delta is None
        self.every = every
        self.accountant = accountant
        self.sampling = sampling
        self._shown: dict[str, float] = {}
        self._due = self._before = 0

    def on_train_begin(self, logs: Any = None) -> None:
        _check_model(self)
        if self._takes_delta_of_budget:
            if self.model.budget is None:
                raise ValueError(
                    "PrivacyReport needs a delta at which ε is stated, well below 1 / number of "
                    "examples: PrivacyReport(delta=1e-6). It may be left out beside a "
                    "PrivacyBudget, whose delta it then takes."
                )
            self.delta = self.model.budget.delta
        if self.sampling is not None and self.sampling != self.model.sampling:
            raise ValueError(
                f"PrivacyReport accounts {self.sampling}, but the data is sampled as "
                f"{self.model.sampling}. Make them the same."
            )
        self._shown = self._spent()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._due, self._before = 0, self.model.ledger.steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.every is None:
            return
        # Not from `batch`, which is the first or the last of an execution, by Keras's version.
        due = (self.model.ledger.steps - self._before) // self.every
        if due != self._due:  # with steps_per_execution, multiples of `every` may be jumped over
            self._due, self._shown = due, self._spent()
        logs.update(self._shown)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._shown = self._spent()
        logs.update(self._shown)

    def _spent(self):
        """For the logs: `epsilon`; one for each unit and adjacency where they do not compose.

        And one for each data set beside that of the training.
        """
        groups = composable(segment for segment in self.model.ledger.segments if segment.steps)
        trained = sum(group[0].data_set == TRAINING for group in groups)
        found = {} if trained > 1 else {"epsilon": self.epsilon}
        for group in groups:
            sampling, data_set = group[0].sampling, group[0].data_set
            name = f"epsilon_{data_set}"
            if data_set == TRAINING:
                name = f"epsilon_{sampling.unit}_{sampling.adjacency}"
            if data_set != TRAINING or trained > 1:
                found[name] = epsilon_of(group, self.delta, self.accountant)
        return found

    @property
    def epsilon(self) -> float:
        """ε of all steps in the model's ledger as it is now, at `delta`; 0.0 before the first.

        It takes the number of steps that ran as fixed. After a stop that may have looked at
        results, as early stopping does, the guarantee is that of the plan, and under a privacy
        filter that of its budget: `statement` has it, and `model.ledger.epsilon_as_planned(delta)`.
        """
        if self.model is None:
            return 0.0
        return self.model.ledger.epsilon(self.delta, self.accountant)

    def statement(self, group_size: int = 1) -> str:
        """The guarantee of the model as it is now, in words; see `accounting.statement`.

        A report that served several models speaks of the last one.

        Raises:
            ValueError: no training has begun.
        """
        if self.model is None:
            raise ValueError(
                "There is nothing to state yet: pass the report to fit first; of a model that was "
                "trained before, and loaded, call report.set_model(model)."
            )
        return self.model.statement(self.delta, self.accountant, group_size)


class PrivacyBudget(keras.callbacks.Callback):
    """Ends training before the step that would spend more than ε at δ, never after it.

    `fit` warns if that is before its last step, and raises `PrivacyBudgetError` if not even the
    first step of a new optimizer is affordable: nothing would be trained. The budget stays on the
    model: a later `fit` trains no further step beyond it, and `train_on_batch` raises
    `PrivacyBudgetError`. A new `PrivacyBudget` replaces it. It is not saved with the model, whose
    ledger is: pass a budget again after loading. It counts the steps that ran; where something
    else than the budget stops a `fit` early, the statement guarantees what the budget would have
    afforded.

    Args:
        epsilon: ε ≥ 0, the most that may be spent over all of the model's training.
        delta: δ in (0, 1).
        accountant: "auto", "rdp", "pld" or "pure"; or a privacy filter (`accounting.RenyiFilter`,
            `accounting.GaussianFilter`), so that noise, batches and steps may be chosen after
            looking at results. Then it must be given from the first `fit` on, and the same to all.

    Raises:
        ValueError: an argument is out of range, or the filter has no such budget.
    """

    def __init__(self, epsilon: float, delta: float, accountant: Accountant = "auto") -> None:
        super().__init__()
        self.budget = Budget(epsilon, delta, accountant)

    affords = renamed_attribute("affords", "budget.affords")
    limit = renamed_attribute("limit", "budget.limit")

    def on_train_begin(self, logs: Any = None) -> None:
        _check_model(self)

    def __str__(self):
        return str(self.budget)


class OptimizerReport(keras.callbacks.Callback):
    """Writes into the logs, at epoch ends, what the optimizer makes of the noise.

    All of it is computed from released values, so it is as private as the weights are:

    - `gradient_norm`: ‖mean clipped gradient‖/C of the epoch's steps, in the geometry that they are
      clipped in: the root of the mean of ‖g̃‖² less what the noise adds to it, 0 where that is
      negative. Near 1 the examples agree and are clipped; far below, noise outweighs signal.
    - `noise_to_signal`: the norm of the noise in the mean gradient, in the root mean square √d·σC/B
      for d weights, in units of what `gradient_norm` estimates. inf where that is 0: nothing of
      the gradient shows above the noise, and no number would be true; 0 without noise.
    - `negative_v`: the share of coordinates whose estimated second moment v̂ is negative, as it can
      be for bias-corrected, independent and joint second moments; there, only ε holds the step.
    - `v_q05`, `v_q50`, `v_q95`: quantiles of v̂ over the coordinates.

    - `clip_norm`: C after the epoch, where it finds itself (`clipping.Quantile`); where layers are
      clipped on their own, that of all together.
    - `public_clip_fraction`: the share of the examples in `public` that would be clipped now, in
      the optimizer's geometry (`clipping.clip_fraction`). The share of the private examples is a
      count of private examples, and releasing it with noise would make every step cost more.

    `negative_v` and the quantiles appear for optimizers that keep a second moment.

    Args:
        quantiles: which quantiles of v̂ to write, numbers in [0, 1].
        public: None, or examples that need no protection, `(x, y)` or `(x, y, sample_weight)` of
            arrays; all of them go through the model at each epoch's end.
    """

    private_logs = (
        "gradient_norm", "noise_to_signal", "negative_v", "v_q*", "clip_norm",
        "public_clip_fraction",
    )  # fmt: skip

    def __init__(
        self,
        quantiles: Sequence[float] = (0.05, 0.5, 0.95),
        public: tuple[Any, ...] | None = None,
    ) -> None:
        super().__init__()
        if public is not None and not (isinstance(public, tuple) and len(public) in (2, 3)):
            raise ValueError(
                "public must be None or a tuple (x, y) or (x, y, sample_weight) of arrays, "
                f"received a {type(public).__name__}."
            )
        self.public = public
        if not all(0 <= q <= 1 for q in quantiles):
            raise ValueError(f"quantiles must be numbers in [0, 1], received {quantiles!r}.")
        self.quantiles = tuple(quantiles)
        # Means over the epoch's steps, in units of C²: (signal, noise).
        self._power: tuple[keras.metrics.Mean, ...] = ()

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        _check_model(self)
        if self._observe not in model.release_observers:
            self._power = workers.without_strategy(
                lambda: tuple(keras.metrics.Mean(name=name) for name in ("signal", "noise"))
            )
            model.observe_releases(self._observe)

    def _observe(self, queries, released):
        """Adds one step's ‖g̃‖² − E‖noise‖², and E‖noise‖²."""
        part, clip_norm = released[0], tf.cast(queries[0].sensitivity, tf.float32)
        weights = sum(tf.size(getattr(g, "values", g)) for g in part.value)  # of rows: those
        noise = tf.cast(weights, tf.float32) * tf.square(part.noise_std)
        excess = tf.square(tf.linalg.global_norm(part.value)) - noise
        for mean, power in zip(self._power, (excess, noise), strict=True):
            mean.update_state(power / clip_norm**2)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        for mean in self._power:
            mean.reset_state()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        signal, noise = (np.sqrt(max(0.0, float(mean.result()))) for mean in self._power)
        logs["gradient_norm"] = float(signal)
        logs["noise_to_signal"] = float(noise / signal) if signal else float(np.inf if noise else 0)
        optimizer = self.model.optimizer
        if isinstance(optimizer.clip_norm, clipping.Quantile):
            logs["clip_norm"] = float(optimizer.current_clip_norm)
        estimates = optimizer.second_moment_estimates
        if estimates:
            v = np.concatenate([np.ravel(estimate) for estimate in estimates])
            logs["negative_v"] = float(np.mean(v < 0))
            for q in self.quantiles:
                logs[f"v_q{100 * q:02.0f}"] = float(np.quantile(v, q))
        if self.public is not None:
            logs["public_clip_fraction"] = clipping.clip_fraction(self.model, self.public)


def _check_model(callback):
    if not isinstance(callback.model, DPModel):
        raise TypeError(
            f"{type(callback).__name__} needs a dp_keras_opt.DPModel; "
            f"{type(callback.model).__name__} is not trained privately."
        )
