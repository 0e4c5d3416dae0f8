"""What `help` and an editor say of `DPModel` is what Keras says of its own models."""

import inspect

import keras
import pytest

import dp_keras_opt as dp


def _parameters(function):
    return {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self"
    }


def test_fit_has_the_arguments_and_defaults_of_keras():
    ours, theirs = _parameters(dp.DPModel.fit), _parameters(keras.Model.fit)
    assert list(ours) == list(theirs)
    assert {n: p.default for n, p in ours.items()} == {n: p.default for n, p in theirs.items()}


def test_compile_has_the_arguments_of_keras_and_one_of_its_own():
    ours, theirs = _parameters(dp.DPModel.compile), _parameters(keras.Model.compile)
    assert list(ours) == [*theirs, "physical_batch_size"]
    different = {name for name in theirs if ours[name].default != theirs[name].default}
    # No private optimizer could be a default, and a float16 loss is scaled by a constant.
    assert different == {"optimizer", "auto_scale_loss"}


@pytest.mark.parametrize("method", ["fit", "compile", "train_on_batch"])
def test_every_argument_has_a_type_and_a_line_of_documentation(method):
    function = getattr(dp.DPModel, method)
    for name, parameter in _parameters(function).items():
        assert parameter.annotation is not inspect.Parameter.empty, name
        if method != "train_on_batch":
            assert name in inspect.getdoc(function), name
    assert inspect.signature(function).return_annotation is not inspect.Signature.empty
