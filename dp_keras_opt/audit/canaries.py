"""The audit: canaries in or out, training, guesses from what it releases."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from dp_keras_opt.accounting import Ledger
from dp_keras_opt.audit.bounds import (
    many_run_bound,
    many_run_excess,
    many_run_mu_bound,
    membership_auc,
    one_run_bound,
)
from dp_keras_opt.audit.f_dp import gaussian_epsilon, gaussian_mu_bound
from dp_keras_opt.clipping import Batch, clip_groups, losses_and_outputs
from dp_keras_opt.clipping.book_keeping import gradients_for
from dp_keras_opt.clipping.clipped_sum import clip_factor, norms_by_group
from dp_keras_opt.clipping.geometry import seen_by
from dp_keras_opt.clipping.table_rows import lookups
from dp_keras_opt.data import poisson_batches
from dp_keras_opt.types import Accountant

if TYPE_CHECKING:
    from dp_keras_opt.clipping.query import Query
    from dp_keras_opt.data import Batches
    from dp_keras_opt.model import DPModel
    from dp_keras_opt.noise.released import Released


#: How much speaks for the presence of each canary; see `canary_audit`.
Score: TypeAlias = Literal["loss"] | Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """What an audit found.

    Guarantee: with probability `confidence` over the coins and the training, the training's true ε
    at `delta` is at least `lower_bound`. With the same probability the training is μ-Gaussian DP
    for no μ below `gaussian_mu`; that proves `gaussian_epsilon` only of a training whose trade-off
    curve is Gaussian. Both hold at once with 2·confidence − 1 at least. An audit that passes proves
    nothing: a stronger attack, or other canaries, might find more.

    Attributes:
        lower_bound: on ε at `delta`.
        epsilon: what the ledger claims at `delta`.
        delta: δ.
        confidence: that the lower bound holds.
        guesses, correct: how many coins were guessed, and how many rightly.
        auc: of membership inference, the chance that a canary that was in scores above one that was
            not: 1/2 is blind, 1 is perfect. A plain estimate, without any confidence.
        method: in words.
        gaussian_mu: the lower bound on μ, by f-DP for one run (`gaussian_mu_bound`), by the errors
            of the test for many (`many_run_mu_bound`).
        excess: of many runs, how far the test lies above what the ledger's `risk` lets any attack
            reach, at least (`many_run_excess`): above 0 refutes the ledger. None of one run.
    """

    lower_bound: float
    epsilon: float
    delta: float
    confidence: float
    guesses: int
    correct: int
    auc: float
    method: str
    gaussian_mu: float
    excess: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the claim was not refuted. The bound on μ does not count: it refutes no ε."""
        return self.lower_bound <= self.epsilon and not self.is_above_risk

    @property
    def is_above_risk(self) -> bool:
        """Whether the attack did better than the ledger lets any do."""
        return self.excess is not None and self.excess > 0

    @property
    def gaussian_epsilon(self) -> float:
        """ε at `delta` of `gaussian_mu`; what it proves, and of what, is said above."""
        return gaussian_epsilon(self.gaussian_mu, self.delta)

    def __str__(self):
        mu = f"μ ≥ {self.gaussian_mu:.3f}"
        if self.delta:
            mu += f" and ε ≥ {self.gaussian_epsilon:.3f}"
        verdict = "does not refute" if self.lower_bound <= self.epsilon else "REFUTES"
        return (
            f"ε ≥ {self.lower_bound:.3f} at δ = {self.delta:g} with confidence "
            f"{self.confidence:g}, which {verdict} the claimed ε = {self.epsilon:.3f}. "
            f"{self.correct} of {self.guesses} guesses were right, AUC {self.auc:.3f} "
            f"({self.method}). If its trade-off curve is Gaussian, {mu}; of other "
            "curves this proves no ε."
            + " The attack lies ABOVE what the ledger lets any reach."
            * self.is_above_risk
        )


# What somebody who sees all releases knows of the coins.


def inclusion_estimates(
    model: DPModel, canaries: Batch, queries: Sequence[Query], released: Sequence[Released]
) -> tuple[tf.Tensor, tf.Tensor]:
    """For each noisy mean that a step releases, an unbiased guess of each canary's presence.

    B·⟨c, g̃⟩/‖c‖², g̃ the released mean and c what the canary contributes if it is there, clipped as
    the query says: 1 for a canary in the batch and 0 for one that is not, plus noise, plus what the
    others contribute in c's direction. Squares and counts beside the mean are not looked at; rows
    of a table that were not released stand as 0, so that the guess is too low by their share.

    Args:
        model: the `DPModel`, at the weights at which the gradients were taken.
        canaries: a `clipping.Batch`.
        queries, released: of a step, as for `DPModel.observe_releases`.

    Returns:
        (estimates, stds of the noise in them), both (releases, canaries).
    """
    optimizer = model.optimizer
    engines = model.engines(canaries)
    _, _, found = gradients_for(queries, model, canaries, None, engines)
    estimates, stds = [], []
    for part, answer in zip(optimizer.releases, released, strict=True):
        query, gradients = queries[part.query], found[part.query]
        if part.is_public or query.square:
            continue
        groups = clip_groups(model, query)
        gradients = seen_by(query, gradients, model.trainable_variables, canaries.num_rows)
        gradients = lookups(query, gradients, model.trainable_variables)
        values = [tf.convert_to_tensor(value) for value in answer.value]  # of rows: 0 for others
        norms = norms_by_group(query, gradients, groups, canaries.num_rows)
        lengths = norms_by_group(query._replace(norm="l2"), gradients, groups, canaries.num_rows)
        scale = query.scale or [1.0] * len(gradients)
        inner = power = tf.zeros([canaries.num_rows])
        for norm, length, (indices, bound) in zip(norms, lengths, groups, strict=True):
            clip = clip_factor(norm, bound, query)
            used = [i for i in indices if gradients[i] is not None]
            inner += clip * sum(gradients[i].along(scale[i] * values[i]) for i in used)
            power += (clip * length) ** 2
        size = optimizer.expected_batch_size
        estimates.append(size * tf.math.divide_no_nan(inner, power))
        stds.append(size * answer.noise_std * tf.math.rsqrt(power))
    return tf.stack(estimates), tf.stack(stds)


def matched_filter(estimates: np.ndarray, stds: np.ndarray) -> np.ndarray:
    """The estimates of all steps, weighted by their precisions: best against independent noise.

    Args:
        estimates, stds: (steps, releases, canaries), as `inclusion_estimates` gives them.

    Returns:
        (canaries,).
    """
    return np.sum(estimates / np.maximum(stds, 1e-12) ** 2, axis=(0, 1))


def likelihood_ratio(sampling_rate: float) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """The most powerful score where a canary's batches are drawn: Poisson sampling.

    Whether a canary that is in the data is in a step's batch is a coin of probability q, which the
    matched filter takes for noise. The score is the logarithm of the likelihood ratio

        Σ_steps log(1 − q + q·exp(Σ_releases (e − ½)/s²)),

    e the estimates, 1 for a canary in the batch and 0 for another, s the std of the noise in them.
    It is the best by Neyman and Pearson as long as what the others contribute is small beside the
    noise. Presence shows more clearly than absence: guess mostly that, `guesses=[(0.02, 0)]`.

    Args:
        sampling_rate: q, the batch size over the number of examples. 1 ranks as `matched_filter`.

    Returns:
        A score for `canary_audit`.
    """
    if not 0 < sampling_rate <= 1:
        raise ValueError(f"sampling_rate must be above 0 and at most 1; received {sampling_rate}.")

    def score(estimates, stds):
        ratios = np.sum((estimates - 0.5) / np.maximum(stds, 1e-12) ** 2, axis=1)
        with np.errstate(divide="ignore"):  # log 0 is −∞
            absent, present = np.log(1 - sampling_rate), np.log(sampling_rate)
        return np.sum(np.logaddexp(absent, present + ratios), axis=0)

    return score


class _Training:
    """One model, trained again and again from the same start, with some of the canaries in."""

    def __init__(
        self, make_model, *, data, canaries, replacements, batches, epochs, scores, observe
    ):
        self.model = make_model()
        if self.model.steps_per_execution != 1:
            raise ValueError("An audit looks at every step: compile with steps_per_execution=1.")
        self.data, self.canaries, self.replacements = data, canaries, replacements
        self.batches = batches or (lambda d: poisson_batches(d, self.model.optimizer.batch_size))
        self.epochs, self.scores, self.observe = epochs, scores, observe
        self._latest = self._start = None
        self._made = {}
        if set(scores) != {"loss"}:
            self.model.observe_releases(self._observe)

    def __call__(self, included):
        """Trains with the canaries that are `included`; returns the scores (scores, canaries)."""
        self._restart()
        seen, before = [], self._losses() if "loss" in self.scores else 0.0
        look = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append(
                [variable.numpy() for variable in self._latest or ()]
            )
        )
        batches = self._batches(included)
        past = len(self.model.ledger.segments)
        self.model.fit(batches, epochs=self.epochs, callbacks=[look], verbose=0)
        self.ledger = Ledger.of_segments(self.model.ledger.segments[past:])  # what one run claims
        estimates = [np.stack(part) for part in zip(*seen, strict=True)]
        return np.stack(
            [before - self._losses() if s == "loss" else s(*estimates) for s in self.scores]
        )

    def _batches(self, included):
        key = included.tobytes()
        if key not in self._made:  # slow to make, and every run draws anew from them
            self._made[key] = self.batches(self._rows(included))
            if len({made.order_seed for made in self._made.values()}) > 1:
                raise ValueError(
                    "With and without the canary the examples are in another order, or in other "
                    "groups, which is a difference that no guarantee covers. Give `batches` one "
                    "order: fixed_order_epochs(..., order_seed=1)."
                )
        return self._made[key]

    def _rows(self, included):
        """The data with the canaries behind them: left out, one has weight 0 or is replaced."""
        stand_ins, weight = self.canaries, np.ones(len(included), np.float32)
        if self.replacements is None:
            weight[~included] = 0.0
        else:

            def choose(here, else_):
                return np.where(included.reshape(-1, *[1] * (here.ndim - 1)), here, else_)

            stand_ins = tree.map_structure(choose, self.canaries, self.replacements)
        x, y = tree.map_structure(lambda a, b: np.concatenate([a, b]), self.data, stand_ins)
        rest = _count(self.data)
        return x, y, np.concatenate([np.ones(rest, np.float32), weight])

    def _restart(self):
        """Sets the model back to its start; only the stream of the noise goes on."""
        model = self.model
        if self._start is None:
            if not model.built:
                model(tree.map_structure(lambda t: t[:1], self.canaries[0]))
            model.optimizer.ensure_built(model.trainable_variables)
            variables = [*model.variables, *model.optimizer.variables]
            self._start = [(v, keras.ops.copy(v)) for v in variables]
        for variable, value in self._start:
            variable.assign(value)

    def _losses(self, rows=1024):
        x, y = self.canaries
        parts = []
        for start in range(0, _count(x), rows):
            part = tree.map_structure(lambda t, s=start: tf.constant(t[s : s + rows]), (x, y))
            losses, _ = losses_and_outputs(self.model, Batch(*part), training=False)
            parts.append(losses.numpy())
        return np.concatenate(parts)

    def _observe(self, queries, released):
        x, y = tree.map_structure(tf.constant, self.canaries)
        canaries = Batch(x, y, tf.ones(_count(self.canaries)))
        found = self.observe(self.model, canaries, queries, released)
        if self._latest is None:
            with tf.init_scope():
                self._latest = [tf.Variable(tf.zeros(part.shape)) for part in found]
        for variable, part in zip(self._latest, found, strict=True):
            variable.assign(part)


def canary_audit(
    make_model: Callable[[], DPModel],
    data: tuple[Any, Any],
    canaries: int | tuple[Any, Any] = 256,
    *,
    delta: float,
    batches: Callable[[tuple[Any, Any, Any]], Batches] | None = None,
    epochs: int = 1,
    score: Score | tuple[Score, ...] = matched_filter,
    replacements: tuple[Any, Any] | None = None,
    runs: int = 1,
    guesses: Sequence[float | tuple[float, float]] = (1.0, 0.25, 0.0625),
    confidence: float = 0.95,
    accountant: Accountant = "auto",
    observe: Callable[..., tuple[tf.Tensor, tf.Tensor]] = inclusion_estimates,
    seed: int | None = None,
) -> AuditReport:
    """Tries to refute the ε that a private training claims, by guessing which canaries it saw.

    With `runs=1`, all canaries are in one training, each by a fair coin: the audit of Steinke,
    Nasr and Jagielski. The highest scores are guessed to be in, as many of the lowest to be out,
    and the others not guessed (`one_run_bound`, and `gaussian_mu_bound` for μ). Many canaries in
    one run are cheap, but even the best attack proves no more than about a third to a half of the
    true ε.

    With `runs` > 1, one canary is in `runs` trainings and out of as many. Score and threshold are
    chosen on the first quarter of them, the errors counted on the others (`many_run_bound`). For
    small models; the larger δ, the closer it comes to the true ε. The model is made once and set
    back to its start for each run, while its noise goes on.

    A canary that is left out has weight 0, so that its gradient is zero: neighbours in the sense of
    `zero_out`. Claims under `add_or_remove_one` cover that too, and those under `replace_one` cover
    more, which is tested in full only with `replacements`.

    Args:
        make_model: function without arguments that gives a compiled `DPModel`.
        data: `(x, y)` of arrays, or nested structures of them, with one row per example.
        canaries: `(x, y)` of such rows, or how many to make: examples taken out of `data`, each
            with the target of another drawn at random. One for `runs` > 1.
        delta: δ of the claim. For one run, well below 1/number of canaries.
        batches: function of `(x, y, sample_weight)` that gives the `Batches` to train on, whose
            every iteration draws anew. Default: `data.poisson_batches` of the optimizer's batch
            size. It is called once for each choice of canaries.
        epochs: as for `fit`.
        score: how much speaks for a canary's presence: "loss", by how much its loss has fallen,
            which is all that who sees only the trained model has; or a function of what
            `observe` gave at all steps, stacked, such as `matched_filter`. Or a tuple of them. For
            such functions all canaries go through the model, at once, at every step.
        replacements: None, or `(x, y)`, what stands in the place of canaries that are left out.
        runs: 1, or how many to do with the canary, and how many without.
        guesses: for one run, which shares (0 to 1) of the coins to guess, half of them in and half
            out, or pairs of shares, how many to guess in and how many out. The bound is the best
            over these and the scores, each at its share of 1 − confidence (Bonferroni); so is that
            on μ.
        confidence: with this probability or more, the lower bound holds.
        accountant: which of the ledger's to hold it against: "auto", "rdp", "pld" or "pure".
        observe: what is kept of each step; see `inclusion_estimates`.
        seed: of the coins and of the canaries that are made.

    Returns:
        `AuditReport`.
    """
    rng = np.random.default_rng(seed)
    data = _arrays(data)
    if isinstance(canaries, int | np.integer):
        data, canaries = _mislabelled(data, canaries, rng)
    canaries, replacements = _arrays(canaries), _arrays(replacements)
    count = _count(canaries)
    if runs != 1 and (runs < 4 or count != 1):
        raise ValueError(
            f"An audit of many runs has one canary and at least 4 runs; received {count} canaries "
            f"and {runs} runs."
        )
    if runs == 1 and count < 2:
        raise ValueError("An audit by one run needs at least two canaries.")
    scores = score if isinstance(score, tuple) else (score,)
    train = _Training(
        make_model,
        data=data,
        canaries=canaries,
        replacements=replacements,
        batches=batches,
        epochs=epochs,
        scores=scores,
        observe=observe,
    )
    if runs == 1:
        found = _one_run(train, guesses, delta, confidence, rng)
    else:
        found = _many_runs(train, runs, delta, confidence, lambda: train.ledger.risk(accountant))
    with warnings.catch_warnings():  # that delta is not below 1/n: the claim is to hold at any
        warnings.simplefilter("ignore")
        epsilon = train.ledger.epsilon(delta, accountant)
    return AuditReport(epsilon=epsilon, delta=delta, confidence=confidence, **found)


def _one_run(train, shares, delta, confidence, rng):
    m = _count(train.canaries)
    included = rng.random(m) < 0.5
    share = (1 - confidence) / (len(train.scores) * len(shares))
    best, mu = None, 0.0
    for score in train(included):
        order = np.lexsort((rng.random(m), score))  # ties in random order
        for part in shares:
            top, bottom = _sides(part, m)
            correct = int(included[order[m - top :]].sum() + (~included[order[:bottom]]).sum())
            bound = one_run_bound(m, top + bottom, correct, delta, 1 - share)
            mu = max(mu, gaussian_mu_bound(m, top + bottom, correct, 1 - share))
            if best is None or bound > best["lower_bound"]:
                best = {
                    "lower_bound": bound,
                    "guesses": top + bottom,
                    "correct": correct,
                    "auc": membership_auc(score[included], score[~included]),
                }
    return best | {"gaussian_mu": mu, "method": f"one run with {m} canaries"}


def _sides(part, m):
    """How many canaries to guess in, and how many out: fixed before anything is seen."""
    if not isinstance(part, tuple):
        side = max(1, int(part * m / 2))
        return side, side
    top, bottom = (round(share * m) for share in part)
    if min(part) < 0 or not 1 <= top + bottom <= m:
        raise ValueError(
            f"guesses={part} are {top} canaries in and {bottom} out, of {m}: from 1 to all of them "
            "can be guessed."
        )
    return top, bottom


def _many_runs(train, runs, delta, confidence, risk=None):
    runs_of_kind = [[train(np.array([there])) for _ in range(runs)] for there in (False, True)]
    without, with_ = np.stack(runs_of_kind)[..., 0].transpose(0, 2, 1)  # (scores, runs) each
    few = runs // 4
    rest = runs - few
    first, second = slice(few), slice(few, None)

    def errors(score, threshold, chosen):
        threshold = np.asarray(threshold)[..., None]
        positives = np.sum(without[score, chosen] >= threshold, axis=-1)
        return positives, np.sum(with_[score, chosen] < threshold, axis=-1)

    best = -1.0, None, None
    for score in range(len(without)):
        thresholds = np.concatenate([without[score, first], with_[score, first]])
        false_positives, false_negatives = errors(score, thresholds, first)
        # What these rates would prove of the others; half an error more, for none is luck.
        expected = [(e + 0.5) * rest / few for e in (false_positives, false_negatives)]
        bounds = many_run_bound(expected[0], rest, expected[1], rest, delta, confidence)
        place = int(np.argmax(bounds))
        best = max(best, (bounds[place], score, thresholds[place]), key=lambda found: found[0])
    _, score, threshold = best
    false_positives, false_negatives = errors(score, threshold, second)
    counts = false_positives, rest, false_negatives, rest
    return {
        "lower_bound": float(many_run_bound(*counts, delta, confidence)),
        "gaussian_mu": float(many_run_mu_bound(*counts, confidence)),
        "excess": risk and many_run_excess(*counts, risk().true_positive_rate, confidence),
        "guesses": 2 * rest,
        "correct": int(2 * rest - false_positives - false_negatives),
        "auc": membership_auc(with_[score], without[score]),
        "method": f"{runs} runs with the canary and {runs} without",
    }


def _mislabelled(data, count, rng):
    """Takes examples out of the data, as canaries with random targets of it: (data, canaries)."""
    n = _count(data)
    if not 1 <= count < n:
        raise ValueError(
            f"canaries must be from 1 to {n - 1}, fewer than the data; received {count}."
        )
    chosen, labels = rng.choice(n, count, replace=False), rng.choice(n, count)
    x, y = data
    rest = tree.map_structure(lambda a: np.delete(a, chosen, axis=0), data)
    return rest, (
        tree.map_structure(lambda a: a[chosen], x),
        tree.map_structure(lambda a: a[labels], y),
    )


def _arrays(rows):
    """Arrays of (x, y), the numbers among them as Keras takes them."""

    def array(values):
        values = np.asarray(values)
        floats = np.issubdtype(values.dtype, np.floating)
        return values.astype(keras.config.floatx()) if floats else values

    return rows and tree.map_structure(array, tuple(rows))


def _count(rows):
    return len(tree.flatten(rows)[0])
