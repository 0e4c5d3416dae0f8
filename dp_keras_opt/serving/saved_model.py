"""A SavedModel of what a private model computes in inference, and of nothing else."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

import keras

from dp_keras_opt import files
from dp_keras_opt.clipping.graphs import PYTHON, nodes
from dp_keras_opt.model import DPModel, as_published
from dp_keras_opt.serving import card as cards
from dp_keras_opt.serving import comparison, signature
from dp_keras_opt.types import Path

if TYPE_CHECKING:
    from dp_keras_opt.serving.card import ModelCard

#: Where the statement lies in the SavedModel, the folder that the format keeps for such files.
STATEMENT = pathlib.Path("assets.extra", "privacy_statement.txt")

#: Where the model card lies, as JSON; the same in Markdown lies beside it as `model_card.md`.
MODEL_CARD = pathlib.Path("assets.extra", "model_card.json")

#: All that an export consists of, so that an older one can be told from other files.
_CONTENT = ("assets", "fingerprint.pb", "saved_model.pb", "variables", STATEMENT, MODEL_CARD,
            MODEL_CARD.with_suffix(".md"))  # fmt: skip


def export(
    model: DPModel,
    path: Path,
    report: Any,
    *,
    card: ModelCard | None = None,
    public_inputs: Any = None,
) -> None:
    """Writes a SavedModel that loads without this library, and without Keras.

    The signatures `serving_default` and `serve` run the model in inference mode
    (`training=False`), with a free batch dimension. They take what the model takes. In
    `serving_default` an output has its key in a dict of outputs, or the name that was given to its
    layer, or else `output_0`, `output_1`, ...; in `serve` the names are Keras's. `serve`, called on
    the loaded object, returns the structure that the model returns, unless that is nested.

    Before anything is at `path`, what was written is loaded and compared with `predict`, on
    synthetic inputs of the signature. An output that `predict` itself does not repeat, since a
    layer draws random numbers of TensorFlow's global generator in inference, too, is compared in
    shape and dtype alone, with a warning; numbers of a `keras.random.SeedGenerator` are the same in
    both, and compared.

    Beside the graph lie the privacy statement, `assets.extra/privacy_statement.txt`, and a model
    card, `assets.extra/model_card.json` and `.md`: the guarantee of the statement, the training,
    the optimizer's settings, the architecture, the versions, and what `card` says. Neither
    optimizer state nor raw data is exported, and no metric but those in `card`.

    Args:
        model: a built `DPModel`.
        path: folder to write; for TensorFlow Serving its name is a version number. An export that
            is there already is replaced as a whole.
        report: the `PrivacyReport` of the training (or anything with a `statement()` method): a
            private model does not travel without its guarantee. Of a model that was loaded, a new
            `PrivacyReport`: the model knows what it spent.
        card: what only you know about the model: its name, intended use, data, metrics.
        public_inputs: inputs of the model that need no protection, as `predict` takes them: at
            least one row. They are compared instead of synthetic ones, for which a model may have
            no use; and they say what a subclassed model takes that was not trained in this process.

    Raises:
        ValueError: the model is not built, or what it takes is not known; `report` has nothing to
            state, or is that of another model; the SavedModel cannot be loaded elsewhere, or does
            not give what `predict` gives. Nothing is written then.
        FileExistsError: `path` holds other files than those of an export.
    """
    if not hasattr(report, "statement"):
        raise ValueError(
            f"report must be the PrivacyReport of the training, received {report!r}: the privacy "
            "statement travels with the model."
        )
    if not isinstance(model, DPModel):
        raise ValueError(
            f"model must be the private model that was trained, received {model!r}. Pass what "
            "dp_keras_opt.make_private(model) returned."
        )
    cards.check(card)
    if getattr(report, "model", model) is None and model.ledger.steps:
        report.set_model(model)  # which was loaded, with all that it spent
    text = report.statement()
    if not model.built:
        raise ValueError(
            f"The model '{model.name}' is not built, so that its inputs are not known. Train it, "
            "load its weights, or call it on a batch first."
        )
    if getattr(report, "model", model) is not model:
        raise ValueError("The report is that of another model; pass the one of this training.")
    inputs = signature.inputs(model, public_inputs)
    with files.new_folder(path, _CONTENT) as folder, as_published(model):
        outputs = _write(model, folder, inputs)
        comparison.check(model, folder, inputs, public_inputs)
        (folder / STATEMENT).parent.mkdir(exist_ok=True)
        (folder / STATEMENT).write_text(text + "\n", encoding="utf-8")
        content = cards.content(model, report, text, inputs, outputs, card)
        (folder / MODEL_CARD).write_text(cards.to_json(content), encoding="utf-8")
        (folder / MODEL_CARD.with_suffix(".md")).write_text(
            cards.to_markdown(content), encoding="utf-8"
        )


def check_folder(path):
    """Refuses a place for an export where there are other files; see `export`."""
    files.check_replaceable(path, _CONTENT)


def _write(model, folder, inputs):
    """The SavedModel alone; returns its outputs, as a dict from names to specs."""
    archive = keras.export.ExportArchive()
    archive.track(model)

    def infer(*args):  # by this name TensorFlow calls inputs that have no name args_0, args_1, ...
        outputs = model(*args, training=False)
        return outputs if signature.is_flat(outputs) else signature.named(model, outputs)

    serve = archive.add_endpoint("serve", infer, [inputs])

    def named(*args):
        outputs = serve(*args)
        return outputs if isinstance(outputs, dict) else signature.named(model, outputs)

    default = archive.add_endpoint("serving_default", named, [inputs]).get_concrete_function()
    _refuse_python(default)
    archive.write_out(str(folder), verbose=False)
    return default.structured_outputs


def _refuse_python(function):
    found = sorted({node.name for node in nodes(function.graph) if node.op in PYTHON})
    if found:
        raise ValueError(
            f"The model calls Python code in its graph ({', '.join(found)}), by tf.py_function or "
            "tf.numpy_function, which no server has. Compute this with TensorFlow or keras.ops."
        )
