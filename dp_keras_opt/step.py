"""The private training step: one logical batch, chunk by chunk, with one noise draw."""

import contextlib
import threading
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from dp_keras_opt import clipping, noise, replicas
from dp_keras_opt.clipping import Batch, per_example
from dp_keras_opt.clipping.identity import Identity
from dp_keras_opt.data import LOST_ROWS, Rows
from dp_keras_opt.losses import per_example_losses, update_metrics

#: Factor on a float16 loss: a power of two, undone before the norm is taken.
FLOAT16_LOSS_SCALE = 2.0**7

#: Seconds after which a check of the model is announced.
PATIENCE = 5.0


class PrivateStep:
    """Mixin over `keras.Model`: what happens to one batch, from raw rows to updated weights.

    It reads `optimizer`, `release_observers`, `physical_batch_size`, `_block` (rows to process at
    once), `_stepping` (whether the ledger knows of the step), `_objective` (what `compile` was
    given) and `_is_heard` (whether `fit` shows progress), and keeps `_plans` (which engine serves
    which layer), `_checked` (the `Identity` of the model for which they hold) and `_non_finite` (a
    count); `DPModel` has them.
    """

    def train_step(self, data: Any) -> dict[str, Any]:
        """One logical batch: clip each example, sum, add noise, update (docs: concepts).

        Raises:
            RuntimeError: it was not called by `fit` or `train_on_batch`, which keep the ledger.
        """
        batch, plan = self._taken(data)
        self.optimizer.prepare(self.trainable_variables)
        queries = self.optimizer.queries()
        self._update_from(queries, self._sums(batch, queries, plan))
        return self.get_metrics_result()

    def _clipped_sums_of(self, data):
        """What one replica does: (clipped sums of its rows, its logs). `replicas` adds them up."""
        batch, plan = self._taken(data)
        sums = self._sums(batch, self.optimizer.queries(), plan)
        return sums, self.get_metrics_result()

    def _taken(self, data):
        """(the `Batch`, the engines for it), once it may be used."""
        if not self._stepping:
            raise RuntimeError(
                "train_step was called past the privacy ledger: its steps would be counted "
                "nowhere. In a training loop of your own, call train_on_batch."
            )
        batch = _as_batch(data)
        if self._sampling.is_padded and batch.mask is None:
            raise ValueError(LOST_ROWS)
        self._check_users(batch)
        plan = self._plan(batch)
        if self.optimizer.needs_public and batch.public is None:
            raise ValueError(
                f"{type(self.optimizer).__name__} needs public rows in every batch, as it is "
                "configured here. Add them: dp_keras_opt.data.with_public(batches, public)."
            )
        self.optimizer.serve(self.trainable_variables)
        return batch, plan

    def _check_users(self, batch):
        """Refuses batches that are not clipped as the sampling says: by row, or by user."""
        mask = batch.mask
        if mask is not None and (mask.shape.rank not in (1, 2) or None in mask.shape[1:]):
            raise ValueError(
                f"The mask of a batch has the shape {mask.shape}; it must be [rows], or [users, K] "
                "with K known when the step is traced. Restore the shape with tf.ensure_shape."
            )
        stated, found = self._sampling.examples_per_unit, batch.rows_per_user
        if stated != found:
            unit = self._sampling.unit
            raise ValueError(
                f"The sampling says that {_clipped_as(stated, unit)}, but in the batches "
                f"{_clipped_as(found, 'user')}, as the mask in their third element says: the "
                "statement would be false. Take the batches of dp_keras_opt.data.poisson_users as "
                "they are, with the Rows as third element, or state the sampling that takes place."
            )

    def _update_from(self, queries, sums):
        """The second part of a step: noise, and the optimizer's update, from the clipped sums."""
        optimizer = self.optimizer
        released = noise.release(
            optimizer.releases,
            queries,
            sums,
            batch_size=optimizer.batch_size,
            alpha=optimizer.noise_schedule.alpha(optimizer.iterations),
            source=optimizer.noise_source,
        )
        for observe in self.release_observers:
            observe(queries, released)
        # The step counter then proves that a batch was used: a graph would advance it without one.
        with tf.control_dependencies(tf.nest.flatten(sums)):
            optimizer.update(released)

    def _prepare(self, iterator):
        """Checks the engines and builds the optimizer before the step is traced.

        Variables that are made while it is traced have it traced a second time.
        """
        specs = replicas.element_spec(iterator)
        if not self._plans and specs is not None:
            self._plan(_as_batch(specs, convert=lambda spec: spec))
            with self.distribute_strategy.scope():
                self.optimizer.serve(self.trainable_variables)

    def _plan(self, batch):
        """The engines for batches of this form, checked once, before the first step."""
        form = _form(batch, any_rows=not self._fitting)
        plan = self._known_plan(form)
        if plan is None:
            replicas.without_strategy(self._check, batch, form)
            plan = self._known_plan(form)  # of other layers than before, where it built the model
        return plan

    def _known_plan(self, form):
        for (layers, checked), plan in self._plans.items():
            if layers == self._trained_parts() and _common(checked, form) == checked:
                return plan
        return None

    def _trained_parts(self):
        """What a plan depends on besides the form of the batches."""
        trained = tuple(layer.trainable for layer in self._flatten_layers())
        return tuple(id(v) for v in self.trainable_variables), trained

    def _check(self, batch, form):
        """Finds the engines for batches of a form, and shows that they may be used."""
        if not self._fitting:  # batches of several lengths are batches of an open length
            for layers, other in self._plans:
                if layers == self._trained_parts():
                    form = _common(form, other) or form
        structure = (batch.x, batch.y, batch.sample_weight)
        synthetic = Batch(*tf.nest.pack_sequence_as(structure, form))
        with _announced(self._fitting and self._is_heard):
            rows = self.physical_batch_size or synthetic.rows
            plan = clipping.checked_plan(self, synthetic, rows)
        object.__setattr__(self, "_checked", Identity(self, self._objective))
        clipping.clip_groups(self, self.optimizer.query())  # names layers that exist
        loops = any(per_example.has_loops(layer) for layer in plan.general)
        plan = plan._replace(sequential=bool(self.jit_compile and loops))
        self._plans[self._trained_parts(), form] = plan
        if self._non_finite is None:
            count = replicas.count_variable(self.distribute_strategy)
            object.__setattr__(self, "_non_finite", count)

    def _hidden_state(self):
        """Variables that must stay as they are, though no graph shows that they do."""
        return list({id(v): v for plan in self._plans.values() for v in plan.hidden}.values())

    def _sums(self, batch, queries, plan):
        """The clipped sums over a logical batch, chunk by chunk where memory asks for it."""
        limits = (self.physical_batch_size or self._block, per_example.max_rows(plan.general))
        size = min((limit for limit in limits if limit is not None), default=None)
        if size is not None and batch.rows_per_user is not None:  # no user is cut in two
            size = max(1, size // batch.rows_per_user) * batch.rows_per_user
        if size is None or (batch.rows is not None and batch.rows <= size):
            return self._chunk_sums(batch, queries, plan)
        if batch.rows is None and size != self._block:  # a batch is never padded beyond itself
            size = tf.clip_by_value(tf.shape(tree.flatten(batch.x)[0])[0], 1, size)
        chunks, count = _chunks(batch, size)

        def sums_of(*chunk):
            return self._chunk_sums(Batch(*chunk), queries, plan)

        if not self.run_eagerly:  # called at two places, traced once
            sums_of = tf.function(sums_of, autograph=False).get_concrete_function(*chunks(0))

        def add_next(index, sums):
            return index + 1, tf.nest.map_structure(tf.add, sums, sums_of(*chunks(index)))

        first = sums_of(*chunks(0))
        once = [tf.convert_to_tensor(variable) for variable in plan.moving]
        sums = tf.while_loop(lambda index, _: index < count, add_next, (1, first))[1]
        for variable, value in zip(plan.moving, once, strict=True):
            variable.assign(value)  # it is saved, and would tell how many rows the batches had
        return sums

    def _chunk_sums(self, batch, queries, plan):
        scale = FLOAT16_LOSS_SCALE if self.compute_dtype == "float16" else 1.0
        result = clipping.clipped_sums(self, batch, queries, plan, scale)
        self._non_finite.assign_add(result.non_finite)
        self._update_metrics(batch, result.losses, result.y_pred)
        return result.sums

    def test_step(self, data: Any) -> dict[str, Any]:
        """Keras's evaluation, with rows of padding counted in nothing."""
        batch = _as_batch(data)
        if batch.mask is None and not replicas.is_used(self.distribute_strategy):
            return super().test_step(data)
        y_pred = self(batch.x, training=False)
        losses = self.per_example_losses(batch.y, y_pred, batch.sample_weight)
        self._update_metrics(batch, losses, y_pred)
        return self.get_metrics_result()

    # Losses and metrics.

    def per_example_losses(self, y: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        """The loss of each example, (B,), without regularisers."""
        if self._compile_loss is None:
            raise ValueError("No loss to compute. Pass `loss` to compile().")
        return per_example_losses(self._compile_loss, y, y_pred, sample_weight)[0]

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Keras's loss over a batch, for evaluation; training takes it per example."""
        if isinstance(sample_weight, Rows):
            sample_weight = sample_weight.sample_weight
        return super().compute_loss(x, y, y_pred, sample_weight, training)

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> dict[str, Any]:
        """Updates the compiled metrics; rows of padding count in none of them."""
        mask = None
        if isinstance(sample_weight, Rows):
            sample_weight, mask = sample_weight.sample_weight, _by_row(sample_weight.mask)
        if self._compile_metrics is not None:
            update_metrics(self._compile_metrics, y, y_pred, sample_weight, mask)
        return self.get_metrics_result()

    def _update_metrics(self, batch, losses, y_pred):
        mask = _by_row(batch.mask, tf.float32)
        regularization = sum(tf.reduce_sum(v.regularizer(v)) for v in self.trainable_variables
                             if v.regularizer is not None)  # fmt: skip
        self._loss_tracker.update_state(losses + regularization, sample_weight=mask)
        if self._compile_loss.metrics:
            _, parts = per_example_losses(self._compile_loss, batch.y, y_pred, batch.sample_weight)
            for metric, part in zip(self._compile_loss.metrics, parts, strict=True):
                metric.update_state(part, sample_weight=mask)
        self.compute_metrics(batch.x, batch.y, y_pred, Rows(batch.mask, batch.sample_weight))

    @property
    def non_finite_examples(self) -> int:
        """How many examples contributed zero because their gradient was NaN or infinite.

        Of batches of `data.poisson_users` it counts users: one such example zeroes all of theirs.
        This count depends on the data without noise: it is for the owner of the data, and is in no
        log or saved file. With several workers, each counts its own examples.
        """
        if self._non_finite is None:
            return 0
        return replicas.local_sum(self.distribute_strategy, self._non_finite)


@contextlib.contextmanager
def _announced(heard):
    """Says so if the check takes long, where the progress of training is shown."""
    patience = threading.Timer(PATIENCE, print, ["Checking the model (once) ..."], {"flush": True})
    if heard:
        patience.start()
    try:
        yield
    finally:
        patience.cancel()


def _as_batch(data, convert=tf.convert_to_tensor):
    """The (x, y[, sample_weight or Rows]) that Keras hands to `train_step`, as a `Batch`."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    mask = public = None
    if isinstance(weight, Rows):
        mask, weight, public = (None if _is_empty(part) else part for part in weight)
    x, y, weight, mask, public = _map(convert, (x, y, weight, mask, public))
    mask = tf.cast(mask, tf.bool) if tf.is_tensor(mask) else mask
    return Batch(x, y, weight, mask, public)


def _is_empty(part):
    """Whether it is the `()` that stands for None in the `Rows` of a `PyDataset`."""
    return isinstance(part, tuple) and not part


def _form(batch, any_rows):
    """The specs of x, y and weights; with `any_rows`, of batches of any number of rows."""

    def spec(tensor):
        rows = None if any_rows else tensor.shape[0]
        return tf.TensorSpec([rows, *tensor.shape[1:]], tensor.dtype)

    return tuple(tf.nest.flatten(_map(spec, (batch.x, batch.y, batch.sample_weight))))


def _common(form, other):
    """The form of which batches of two forms are, None if there is none.

    A size that differs is open. How many rows there are counts only as far as it is fixed.
    """

    def common(one, two):
        if one is None or two is None:
            return one
        inner = [a if a == b else None for a, b in zip(one.shape[1:], two.shape[1:], strict=True)]
        rows = one.shape[0] if two.shape[0] is not None else None
        return tf.TensorSpec([rows, *inner], one.dtype)

    def kind(form):
        return [spec and (spec.dtype, spec.shape.rank) for spec in form]

    return tuple(map(common, form, other)) if kind(form) == kind(other) else None


def _clipped_as(size, unit):
    return (
        "each row is clipped alone"
        if size is None
        else f"{size} rows of a {unit} are clipped as one"
    )


def _by_row(mask, dtype=None):
    """A mask (rows,) or (users, K) as (rows,); None stays."""
    return None if mask is None else tf.cast(tf.reshape(mask, [-1]), dtype or mask.dtype)


def _map(function, structure):
    """`function` of every leaf of a structure that is not None."""
    return tree.map_structure(lambda t: None if t is None else function(t), structure)


def _chunks(batch, size):
    """Cuts a batch into blocks of `size` rows, the last one padded.

    Args:
        batch: a `Batch`.
        size: a number, or a scalar tensor.

    Returns:
        (function of an index that gives that block as a `Batch`, number of blocks).
    """
    static = size if isinstance(size, int) else None
    total = batch.rows or tf.shape(tree.flatten(batch.x)[0])[0]
    count = -(-total // size)
    mask = tf.ones((total,), tf.bool) if batch.mask is None else _by_row(batch.mask)

    def pad(tensor):
        return tf.pad(tensor, [(0, count * size - total)] + [(0, 0)] * (tensor.shape.rank - 1))

    padded = _map(pad, tuple(batch._replace(mask=mask)))

    def chunk(index):
        def block(tensor):  # XLA needs the size of a slice to be static
            begin = [index * size, *[0] * (tensor.shape.rank - 1)]
            part = tf.slice(tensor, begin, tf.concat([[size], tf.shape(tensor)[1:]], axis=0))
            return tf.ensure_shape(part, (static, *tensor.shape[1:]))

        part = Batch(*_map(block, padded))
        if batch.rows_per_user is None:
            return part
        return part._replace(mask=tf.reshape(part.mask, (-1, batch.rows_per_user)))

    return chunk, count
