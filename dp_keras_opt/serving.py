"""Export to TensorFlow Serving, with the privacy statement beside the model."""

import pathlib
from typing import Any

import keras

from dp_keras_opt.types import Path

__all__ = ["STATEMENT", "export"]

#: Where the statement lies in the SavedModel, the folder that the format keeps for such files.
STATEMENT = pathlib.Path("assets.extra", "privacy_statement.txt")


def export(model: keras.Model, path: Path, report: Any) -> None:
    """Writes a SavedModel that loads without this library, and without Keras.

    The signatures `serve` and `serving_default` run the model in inference mode, with a free batch
    dimension; the privacy statement lies beside the graph as `assets.extra/privacy_statement.txt`.
    Neither optimizer state nor raw data is exported.

    Args:
        model: a built `DPModel`.
        path: folder to write; for TensorFlow Serving its name is a version number.
        report: the `PrivacyReport` of the training (or anything with a `statement()` method): a
            private model does not travel without its guarantee.

    Raises:
        ValueError: the model is not built, so that its inputs are not known, or `report` has
            nothing to state or is that of another model.
    """
    if not hasattr(report, "statement"):
        raise ValueError(
            f"report must be the PrivacyReport of the training, received {report!r}: the privacy "
            "statement travels with the model."
        )
    text = report.statement()
    if model.built and getattr(report, "model", model) is not model:
        raise ValueError("The report is that of another model; pass the one of this training.")
    model.export(path, format="tf_saved_model", verbose=False)
    file = pathlib.Path(path, STATEMENT)
    file.parent.mkdir(exist_ok=True)
    file.write_text(text + "\n", encoding="utf-8")
