"""Keras's `adapt` for private data: the state of a layer as a release."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from dp_keras_opt import _keras
from dp_keras_opt.statistics.columns import chunks
from dp_keras_opt.statistics.private_data import PrivateData

_Lookup = keras.layers.StringLookup | keras.layers.IntegerLookup


def adapt_privately(
    layer: keras.layers.Layer,
    data: Any,
    private: PrivateData,
    epsilon: float,
    delta: float,
    *,
    bounds: tuple[Any, Any] | None = None,
    most_per_unit: int | None = None,
    bins: int = 256,
) -> None:
    """Sets the state of a preprocessing layer, as `layer.adapt(data)` does, with noise for ε at δ.

        private = dp.statistics.PrivateData(ledger)
        dp.statistics.adapt_privately(text, reviews, private, 0.3, 1e-7, most_per_unit=50)

    - `Normalization`: mean and variance, of values within `bounds`. A variance below its noise
      counts as that.
    - `Discretization`: the bounds of its `num_bins`, as quantiles of values within `bounds`.
    - `StringLookup`, `IntegerLookup`, `TextVectorization`: the words that enough units use, in the
      order of noisy counts, at most `max_tokens`; each unit counts for at most `most_per_unit`
      words. The weights of "tf_idf" are of the same noisy counts, with units for documents.

    A private model that has the layer counts what it cost. A file of a plain model, or a copy of
    the layer, does not tell: give a model that is made of these the ledger, `model.ledger = ...`.

    Args:
        layer: one of these layers, without a state of its own.
        data: as for its `adapt`: arrays, a `tf.data.Dataset` of batches of one column; or an array
            of a file.
        private: whose data they are, and the ledger that counts the release.
        epsilon, delta: what it may cost.
        bounds: (lower, upper) of the values; numbers, or arrays of the shape of the mean.
        most_per_unit: how many words a unit counts for, at most.
        bins: as for `PrivateData.quantiles`.

    Raises:
        TypeError: the layer has no state that is known here.
        ValueError: bounds or most_per_unit are missing; the state was given to the layer; or as the
            method of `PrivateData` that is called.
    """
    if not isinstance(private, PrivateData):
        raise TypeError(
            "private must be a dp_keras_opt.statistics.PrivateData, which says whose data these "
            f"are and which ledger counts the release; received {private!r}."
        )
    terms = private, epsilon, delta
    if isinstance(layer, keras.layers.Normalization):
        _adapt_normalization(layer, data, _given(bounds, layer, "bounds"), *terms)
    elif isinstance(layer, keras.layers.Discretization):
        _adapt_discretization(layer, data, _given(bounds, layer, "bounds"), bins, *terms)
    elif isinstance(layer, keras.layers.TextVectorization | _Lookup):
        most = _given(most_per_unit, layer, "most_per_unit")
        _adapt_lookup(layer, data, most, *terms)
    else:
        raise TypeError(
            f"{type(layer).__name__} cannot be adapted privately: what it keeps of the data is not "
            "known here. Set its state from what PrivateData releases, adapt it to public data, or "
            "adapt the layers in it one by one: Normalization, Discretization, StringLookup, "
            "IntegerLookup and TextVectorization can be."
        )
    layer._released_on = private.ledger  # a model that has the layer takes it in


def _given(value, layer, name):
    why = {
        "bounds": "within which range values lie, (lower, upper): one value beyond all bounds "
        "would decide the state. Take it from what the values mean, or from PrivateData.bounds",
        "most_per_unit": "for how many words one unit counts at most: one long text would decide "
        "the vocabulary. Some tens are usual for texts, 1 for a category",
    }
    if value is None:
        raise ValueError(f"{type(layer).__name__} ({layer.name!r}) needs {name}, {why[name]}.")
    return value


def _purpose(what, layer):
    return f"{what} of {type(layer).__name__} {layer.name!r}"


def _adapt_normalization(layer, data, bounds, private, epsilon, delta):
    if layer.input_mean is not None:
        raise ValueError(f"Normalization ({layer.name!r}) was given its mean: nothing is adapted.")
    shape = (None, *next(chunks(data)).shape[1:])
    kept = [axis % len(shape) for axis in layer.axis]
    if 0 in kept:
        raise ValueError(
            f"Normalization ({layer.name!r}) keeps axis 0, that of the rows: a mean of each row "
            "alone is no statistic. Choose another axis; a column (n,) needs axis=None."
        )
    if not layer.built:
        layer.build(shape)
    over = [axis for axis in range(1, len(shape)) if axis not in kept]
    purpose = _purpose("mean and variance", layer)
    found = private.mean_and_variance(data, bounds, epsilon, delta, purpose, over=over)
    layer.adapt_mean.assign(found.mean)
    layer.adapt_variance.assign(np.maximum(found.variance, found.variance_std))
    layer.finalize_state()


def _adapt_discretization(layer, data, bounds, bins, private, epsilon, delta):
    if layer.num_bins is None:
        raise ValueError(
            f"Discretization ({layer.name!r}) was given its bin_boundaries: nothing is adapted. "
            "Make it with num_bins."
        )
    if np.size(layer.summary):
        raise ValueError(
            f"Discretization ({layer.name!r}) was adapted before, and keeps a summary of those "
            "data without noise. Make a layer anew."
        )
    shares = np.arange(1, layer.num_bins) / layer.num_bins
    purpose = _purpose("bin boundaries", layer)
    found, _ = private.quantiles(data, shares, bounds, epsilon, delta, purpose, bins=bins)
    layer.bin_boundaries = found.tolist()


def _adapt_lookup(layer, data, most, private, epsilon, delta):
    if layer.get_vocabulary(include_special_tokens=False):
        raise ValueError(
            f"{type(layer).__name__} ({layer.name!r}) has a vocabulary already: nothing is "
            "adapted. Make a layer without one."
        )
    config = layer.get_config()
    special = [config.get("mask_token", ""), config.get("oov_token", "[UNK]")]
    size = config["max_tokens"]
    if size is not None:
        size -= len(layer.get_vocabulary())  # the places of special words
    found = private.vocabulary(
        data, most, epsilon, delta, _purpose("vocabulary", layer),
        size=size, split=_keras.words_of(layer), without=special,
    )  # fmt: skip
    if config["output_mode"] == "tf_idf":  # as Keras weights them
        layer.set_vocabulary(found.words, np.log1p(found.num_units / (1 + found.counts)))
    else:
        layer.set_vocabulary(found.words)
