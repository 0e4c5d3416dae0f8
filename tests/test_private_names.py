"""The private names of Keras: all are still there, and only `_keras.py` speaks of them."""

import ast
import importlib
import pathlib

import keras
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.saving.saving_lib import H5IOStore

import dp_keras_opt as dp
from dp_keras_opt import _keras

PACKAGE = pathlib.Path(dp.__file__).parent


@pytest.fixture(scope="module")
def owners():
    """An object of each class whose attributes are used, as it is when they are."""
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile(keras.optimizers.SGD(use_ema=True), "mse", metrics=["mae"])
    model.train_on_batch(tf.ones((3, 2)), tf.ones((3, 1)))
    dropout = keras.layers.Dropout(0.5)
    embedded = keras.layers.Embedding(3, 2, mask_zero=True)(tf.constant([[0, 1]]))
    batches = tf.data.Dataset.from_tensors((tf.ones((3, 2)), tf.ones((3, 1))))
    strategy = tf.distribute.get_strategy()
    return {
        "Layer": dropout,
        "GroupNormalization": keras.layers.GroupNormalization(1),
        "TextVectorization": keras.layers.TextVectorization(),
        "Model": model,
        "Optimizer": model.optimizer,
        "CompileLoss": model._compile_loss,
        "CompileMetrics": model._compile_metrics,
        "Variable": model.trainable_variables[0],
        "StatelessScope": keras.StatelessScope(),
        "tensor": embedded,
        "TFEpochIterator": TFEpochIterator(x=batches, distribute_strategy=strategy),
    }


@pytest.mark.parametrize("private", _keras.FUNCTIONS, ids=lambda p: p.name)
def test_what_is_imported_from_keras_is_there(private):
    module = importlib.import_module(f"keras.src.{private.owner}")
    assert hasattr(module, private.name), (
        f"Keras {keras.__version__} has no {private.owner}.{private.name} any more: {private.why}"
    )


@pytest.mark.parametrize("private", _keras.ATTRIBUTES, ids=lambda p: f"{p.owner}.{p.name}")
def test_attributes_are_there(private, owners, tmp_path):
    owner = owners.get(private.owner)
    if owner is None:
        owner = H5IOStore(tmp_path / "x.weights.h5", mode="w")
    assert hasattr(owner, private.name), (
        f"Keras {keras.__version__} has no {private.owner}.{private.name} any more, which is used "
        f"for this: {private.why}"
    )


#: What a subclass of a Keras class overrides, or reads of itself as Keras's own subclasses do.
_OF_SUBCLASSES = {
    "_get_variable_index", "_use_weight_decay", "_apply_weight_decay", "_backend_update_step",
    "_trainable_variables", "_maybe_symbolic_build", "_update_model_variables_moving_average",
    "_model_variables_moving_average",
}  # fmt: skip


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_only_one_file_speaks_of_them(path):
    if path.name == "_keras.py":
        return
    names = {private.name for private in _keras.ATTRIBUTES}
    tree, found = ast.parse(path.read_text()), []
    of_our_own = {  # attributes and methods of our classes by the same name
        node.attr if isinstance(node, ast.Attribute) else node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras.src"):
            found.append(f"{node.module} (line {node.lineno})")
        if isinstance(node, ast.Constant) and node.value in names:
            found.append(f"{node.value!r} (line {node.lineno})")
        if isinstance(node, ast.Attribute) and node.attr in names:
            of_itself = isinstance(node.value, ast.Name) and node.value.id == "self"
            of_super = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
            if node.attr not in of_our_own and not (
                (of_itself or of_super) and node.attr in _OF_SUBCLASSES
            ):
                found.append(f"{node.attr} (line {node.lineno})")
    assert not found, f"private names of Keras belong in _keras.py: {', '.join(found)}"
