"""Export to TensorFlow Serving, with the privacy statement and a model card beside the model."""

from dp_keras_opt.serving.card import Metric, ModelCard
from dp_keras_opt.serving.saved_model import MODEL_CARD, STATEMENT, export

__all__ = ["MODEL_CARD", "STATEMENT", "Metric", "ModelCard", "export"]
