"""Which engine serves which layer of a model: found and checked once for batches of one form."""

import contextlib
import functools
import threading
import warnings

import tensorflow as tf

from dp_keras_opt import clipping, workers
from dp_keras_opt._keras import layers_of, trained_in
from dp_keras_opt.clipping import Batch, per_example
from dp_keras_opt.clipping.identity import Identity
from dp_keras_opt.training.batches import common_form, form_of
from dp_keras_opt.training.losses import update_figures

#: Seconds after which a check of the model is announced.
PATIENCE = 5.0


class CheckedEngines:
    """The engines that a model's steps use, each shown to be right before the first step.

    They hold for a form of the batches (`form_of`), for what trains, and for a model and an
    objective that are what they were.
    """

    def __init__(self):
        self.ignored = frozenset()  # names of attributes of the model that checks do not look at
        self._known = {}  # (what trains, form of the batches) -> engines
        self._identity, self._options = None, ()
        self._is_fresh = False  # checked since the execution began

    def __bool__(self):
        return bool(self._known)

    @property
    def last(self):
        """Those that were found last, None before the first."""
        return list(self._known.values())[-1] if self._known else None

    def expect(self, model, options):
        """`look_again`, where `compile` was told these options that a check depends on."""
        self._options = options
        self.look_again(model)

    def begin_execution(self):
        """Before each execution of the train function, which may trace the step anew."""
        self._is_fresh = False

    def look_again(self, model):
        """Forgets what was checked, unless model and objective are what they were."""
        if self._identity is None or not self._identity.is_that_of(model, self._objective(model)):
            self._known.clear()

    def _objective(self, model):
        return model.loss, model.jit_compile, model.run_eagerly, *self._options

    def of(self, model, batch, physical_rows, *, fitting, announce=False):
        """The engines for batches of this form, checked before they are used for the first time.

        Args:
            model: the `DPModel`.
            batch: a `Batch` of tensors or of specs.
            physical_rows: how many rows are processed at once; None for all of them.
            fitting: whether `fit` runs, whose batches have one form; else the number of rows, and
                sizes in which batches differ, are left open.
            announce: whether a long check is announced.
        """
        # Attributes may have changed since the check. What somebody else has written is checked
        # whenever it is traced, and by what can be seen where it runs eagerly in each step.
        eager = tf.executing_eagerly()
        if self._identity and (eager or not self._is_fresh):
            objective = self._objective(model)
            if not eager:
                changed = not self._identity.is_that_of(model, objective)
            elif (changed := self._identity.changed(model, objective)) and model.run_eagerly:
                warnings.warn(
                    f"Since the model was checked, {', '.join(changed)} changed: it is checked "
                    "again. What changes in each call, such as a counter, makes training without "
                    "graphs slow; with run_eagerly=False a step is checked once.",
                    stacklevel=2,
                )
            if changed:
                self._known.clear()
        form = form_of(batch, any_rows=not fitting)
        engines = self._find(model, form)
        if engines is None:
            workers.without_strategy(
                self._check, model, batch, form, physical_rows, fitting, announce
            )
            engines = self._find(model, form)  # of other layers, where the check built the model
        return engines

    def _find(self, model, form):
        for (trained, checked), engines in self._known.items():
            if trained == _trained_parts(model) and common_form(checked, form) == checked:
                return engines
        return None

    def _check(self, model, batch, form, physical_rows, fitting, announce):
        if not fitting:  # batches of several lengths are batches of an open length
            for trained, other in self._known:
                if trained == _trained_parts(model):
                    form = common_form(form, other) or form
        structure = (batch.x, batch.y, batch.sample_weight)
        synthetic = Batch(*tf.nest.pack_sequence_as(structure, form))

        def show(rows, losses, y_pred):
            update_figures(model, rows, losses, y_pred)
            model.get_metrics_result()

        with _announced(announce), _quantization_named(model):
            rows = physical_rows or synthetic.num_rows
            engines = clipping.checked_engines(model, synthetic, rows, show=show)
        self._identity = Identity(model, self._objective(model), self.ignored)
        clipping.clip_groups(model, model.optimizer.query())  # names layers that exist
        loops = any(per_example.has_loops(layer) for layer in engines.general)
        engines = engines._replace(sequential=bool(model.jit_compile and loops))
        self._known[_trained_parts(model), form] = engines
        self._is_fresh = True

    def hidden_state(self):
        """Variables that must stay as they are, though no graph shows that they do."""
        return list({id(v): v for known in self._known.values() for v in known.hidden}.values())

    def specs(self, number):
        """Specs of the first tensors in the batches so far, [] without any.

        Sizes in which the batches differed are open, as is the number of rows.
        """
        forms = [form[:number] for _, form in self._known]
        return [functools.reduce(_common_spec, specs) for specs in zip(*forms, strict=True)]


def _trained_parts(model):
    """What engines depend on besides the form of the batches."""
    trainable = tuple(layer.trainable for layer in layers_of(model))
    return tuple(id(v) for v in model.trainable_variables), trainable


def _common_spec(one, two):
    one = tf.TensorSpec([None, *one.shape[1:]], one.dtype)
    return one.most_specific_compatible_type(two) if one.dtype == two.dtype else two


@contextlib.contextmanager
def _quantization_named(model):
    """Says so where layers are quantized, since then that is why the check fails."""
    try:
        yield
    except ValueError as error:
        quantized = {
            layer.path: layer.quantization_mode
            for layer in layers_of(model)
            if getattr(layer, "quantization_mode", None) and trained_in(layer)
        }
        if not quantized:
            raise
        raise ValueError(
            f"Layers are quantized, {quantized}: their kernels are rounded and not trained. LoRA "
            "and biases beside kernels of int8 and int4 can be trained privately, and nothing else "
            "of such layers. Train first, and quantize the trained model; or freeze these layers "
            "(layer.trainable = False). "
            f"What failed: {error}"
        ) from error


@contextlib.contextmanager
def _announced(announce):
    """Says so if the check takes long, where the progress of training is shown."""
    patience = threading.Timer(PATIENCE, print, ["Checking the model (once) ..."], {"flush": True})
    if announce:
        patience.start()
    try:
        yield
    finally:
        patience.cancel()
