"""Step 4 of the pipeline: optimizers, one rule a file; `catalog` lists them."""

from collections.abc import Mapping
from typing import Any

import keras

from dp_keras_opt.optimizers import catalog, moments
from dp_keras_opt.optimizers.catalog import *  # noqa: F403
from dp_keras_opt.optimizers.private_optimizer import PrivateOptimizer
from dp_keras_opt.optimizers.projection import GaLore
from dp_keras_opt.optimizers.sparse_embeddings import SparseEmbeddings

__all__ = [*catalog.__all__, "GaLore", "PrivateOptimizer", "SparseEmbeddings", "get", "moments"]


def classes() -> dict[str, type[PrivateOptimizer]]:
    """All private optimizers by their names in lower case."""
    return {entry.name.lower(): entry.cls for entry in catalog.CATALOG}


def get(identifier: PrivateOptimizer | str | Mapping[str, Any], **kwargs: Any) -> PrivateOptimizer:
    """Resolves the name of a private optimizer, its configuration, or an optimizer object.

    Args:
        identifier: such as "DPAdam" (any case), a serialised optimizer, or an optimizer.
        **kwargs: the constructor's arguments, where `identifier` is a name.

    Raises:
        ValueError: no private optimizer is meant.
    """
    if isinstance(identifier, str):
        known = classes()
        if identifier.lower() not in known:
            raise ValueError(f"optimizer {identifier!r} is not known; use one of {sorted(known)}.")
        return known[identifier.lower()](**kwargs)
    if isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(identifier)
    if not isinstance(identifier, PrivateOptimizer):
        raise ValueError(f"{identifier!r} is not a private optimizer of dp_keras_opt.optimizers.")
    return identifier
