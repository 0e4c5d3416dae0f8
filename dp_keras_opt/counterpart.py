"""The private counterpart of a model that exists already."""

from __future__ import annotations

import keras

from dp_keras_opt import _keras
from dp_keras_opt._keras import Functional
from dp_keras_opt.model import DPFunctional, DPModel, as_published, warn_of_export


def make_private(model: keras.Model) -> DPModel:
    """The private counterpart of a Keras model, sharing its layers and weights.

    Args:
        model: a functional, Sequential or subclassed `keras.Model`.

    Returns:
        A `DPModel`, to be compiled with an optimizer of `dp_keras_opt.optimizers`; the same one
        whenever it is called with the same model, since both train the same weights.

    Raises:
        TypeError: the model overrides `train_step` or `compute_loss`, whose code would see raw
            gradients or mix examples.
    """
    if isinstance(model, DPModel):
        return model
    if not isinstance(model, keras.Model):
        raise TypeError(f"make_private needs a keras.Model, received {model!r}.")
    for method in ("train_step", "compute_loss"):
        if getattr(type(model), method) is not getattr(keras.Model, method):
            raise TypeError(
                f"{type(model).__name__} overrides `{method}`, which cannot be made private. "
                "Express the objective as a per-example loss in compile(loss=...); what a loss of "
                "outputs does not see, as a dp_keras_opt.Objective."
            )
    # One private counterpart a model: they share the weights, so they must share the ledger.
    if "_private_counterpart" not in vars(model):
        _tie(model, _counterpart(model))
    return vars(model)["_private_counterpart"]()


def _tie(model, private):
    """Has a model know its private counterpart, and saved as it once that was trained.

    Saved as it is, it would lose the ledger. Weights alone are saved with the ledger beside them,
    which only a private model loads.
    """
    kind = type(model)

    def save(filepath, *args, **kwargs):
        if private.ledger.steps:
            private.save(filepath, *args, **kwargs)
        else:
            kind.save(model, filepath, *args, **kwargs)

    def export(filepath, *args, **kwargs):
        warn_of_export(private)
        with as_published(private):
            kind.export(model, filepath, *args, **kwargs)

    def reduce():  # of `copy` and `pickle`
        return private.__reduce__() if private.ledger.steps else kind.__reduce__(model)

    def save_own_variables(store):
        kind.save_own_variables(model, store)
        if not _keras.is_part_of_a_store(store):
            private.save_own_variables(store)

    def load_own_variables(store):
        kind.load_own_variables(model, private._without_ledger(store))

    model._private_counterpart = lambda: private  # a function: Keras saves what attributes hold
    model.save = save
    model.export = export
    model.__reduce__ = reduce
    model.save_own_variables = save_own_variables
    model.load_own_variables = load_own_variables


def _counterpart(model):
    if isinstance(model, keras.Sequential) and model.built:
        return DPModel(model.inputs[0], model.outputs[0], name=model.name)
    if not isinstance(model, Functional) or type(model).call is not Functional.call:
        return PrivateWrapper(model, name=model.name)
    if type(model).get_config is Functional.get_config:
        return DPModel(model.input, model.output, name=model.name)
    private = PrivateFunctional(model.input, model.output, name=model.name)
    private._original = lambda: model  # a function, as above
    return private


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class PrivateFunctional(DPFunctional):
    """What `make_private` makes of a functional model with a configuration of its own.

    Such is a task of KerasHub. Its file holds the model that it was made of, since a layer that is
    used in that model and in one inside of it would be loaded as two.
    """

    @property
    def model(self) -> keras.Model:
        """The model that it was made of, whose weights it trains."""
        return self._original()

    def get_config(self):
        return {"model": keras.saving.serialize_keras_object(self.model)}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        return make_private(keras.saving.deserialize_keras_object(config["model"], custom_objects))


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class PrivateWrapper(DPModel):
    """What `make_private` makes of a subclassed or unbuilt model: it calls the model.

    Args:
        model: the model that is trained.
        **kwargs: those of `keras.Model`.
    """

    def __init__(self, model, **kwargs):
        super().__init__(**kwargs)
        self.model = model
        _tie(model, self)

    def call(self, inputs, training=None):
        return self.model(inputs, training=training)

    def get_config(self):
        return super().get_config() | {"model": keras.saving.serialize_keras_object(self.model)}

    @classmethod
    def from_config(cls, config):
        return cls(**config | {"model": keras.saving.deserialize_keras_object(config["model"])})
