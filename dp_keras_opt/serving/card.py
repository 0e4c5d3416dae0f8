"""The model card: what is public or released about a private model, for who gets it.

The fields follow the reference as far as a library can know them; the guarantee is that of the
privacy statement.

Reference: Mitchell, Wu, Zaldivar, Barnes, Vasserman, Hutchinson, Spitzer, Raji and Gebru, "Model
cards for model reporting", FAT* 2019, doi:10.1145/3287560.3287596.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import json
import math
import numbers
import platform
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from dp_keras_opt import checksums
from dp_keras_opt._keras import layers_of
from dp_keras_opt.accounting.privacy_statement import claims, not_covered, rounded_up
from dp_keras_opt.accounting.segment import conditions
from dp_keras_opt.statistics.private_data import Estimate
from dp_keras_opt.version import __version__

#: Whoever knows the seed can draw the noise again and subtract it.
_SECRET = "seed"
#: Longer lists of settings are described and not written out.
_LONGEST = 100

_OF_PRIVATE_DATA = "computed from private data without noise: not covered by the guarantee"
_WITH_NOISE = (
    "released with noise of standard deviation {:.4g}, at a price in the ledger that it was "
    "released on, which the guarantees here include if that is the model's"
)
_OF_PUBLIC_DATA = "computed from data that need no protection"


@dataclasses.dataclass(frozen=True)
class Metric:
    """A figure for the model card.

    Attributes:
        value: the figure, a finite number; or the `statistics.Estimate` of one that was released
            with noise, as by `statistics.evaluate`, whose price the ledger has.
        data: on which data it was computed, in words.
        private: whether these data are private. Of a plain number the card then says that it was
            computed from them without noise, so that the guarantee does not cover its publication.
    """

    value: float | Estimate
    data: str
    private: bool

    def __post_init__(self) -> None:
        if not isinstance(self.figure, numbers.Real) or not math.isfinite(self.figure):
            raise ValueError(f"value must be a finite number, received {self.value!r}.")
        if not isinstance(self.private, bool):
            raise ValueError(
                f"private must be True or False, received {self.private!r}: say whether the metric "
                "was computed on private data."
            )

    @property
    def figure(self) -> float:
        """The number."""
        return self.value.value if isinstance(self.value, Estimate) else self.value

    @property
    def noise_std(self) -> float | None:
        """The standard deviation of its noise; None of a number that has none."""
        return float(self.value.noise_std) if isinstance(self.value, Estimate) else None

    @property
    def note(self) -> str:
        """What the card says of its publication."""
        if self.noise_std is not None:
            return _WITH_NOISE.format(self.noise_std)
        return _OF_PRIVATE_DATA if self.private else _OF_PUBLIC_DATA


@dataclasses.dataclass(frozen=True)
class ModelCard:
    """What only the owner of a model knows about it; None for what is not said.

    Attributes:
        name: of the model.
        intended_use: what it is for, and what not.
        data: what it was trained on, in words that may be published.
        metrics: figures by name, each a `Metric`. No other metric gets into the card: those of the
            training are computed from raw data.
    """

    name: str | None = None
    intended_use: str | None = None
    data: str | None = None
    metrics: Mapping[str, Metric] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, metric in self.metrics.items():
            if not isinstance(metric, Metric):
                raise ValueError(
                    f"metrics[{name!r}] must be a dp_keras_opt.serving.Metric, which says whether "
                    f"it was computed on private data; received {metric!r}."
                )


def check(card):
    """Refuses what is no `ModelCard`."""
    if card is not None and not isinstance(card, ModelCard):
        raise ValueError(
            f"card must be a dp_keras_opt.serving.ModelCard or None, received {card!r}."
        )


def content(model, report, statement, inputs, outputs, card=None):
    """The card as JSON-able values.

    Args:
        model: the `DPModel` that was exported.
        report: what made the statement; the guarantee is at its `delta`, by its `accountant`.
        statement: its text.
        inputs: structure of `tf.TensorSpec` with names, as they are served.
        outputs: dict from names to `tf.TensorSpec`.
        card: None, or the `ModelCard` of the caller.
    """
    card = card or ModelCard()
    return {
        "name": card.name or model.name,
        "intended_use": card.intended_use,
        "data": card.data,
        "metrics": {
            name: {
                "value": float(metric.figure),
                "noise_std": metric.noise_std,
                "data": metric.data,
                "private": metric.private,
                "note": metric.note,
            }
            for name, metric in card.metrics.items()
        },
        "privacy": _privacy(model, report) | {"statement": statement},
        "optimizer": _optimizer(model.optimizer),
        "architecture": _architecture(model, inputs, outputs),
        "versions": {
            "dp-keras-opt": __version__,
            "dp-accounting": importlib.metadata.version("dp-accounting"),
            "keras": keras.__version__,
            "tensorflow": tf.__version__,
            "python": platform.python_version(),
        },
    }


def _privacy(model, report):
    """What the statement says, in fields; less of it where the report names no delta."""
    delta = getattr(report, "delta", None)
    accountant = getattr(report, "accountant", "auto")
    segments = [segment for segment in model.ledger.segments if segment.steps]
    found = claims(model.ledger, delta, accountant) if delta is not None else []
    return {
        "guarantees": [
            {
                "epsilon": _epsilon(claim.promised),
                "delta": float(delta),
                "data_set": claim.data_set,
                "unit": claim.unit,
                "adjacency": claim.adjacency,
                "proven": not claim.is_heuristic,
                "conditions": conditions(claim.segments),
                "accountants": sorted(claim.accountants),
                "risk": claim.risk.to_dict(),
            }
            for claim in found
        ],
        "weights_changed_since": checksums.are_changed(model.weights),
        "training": [_training(segment) for segment in segments],
        "not_covered": not_covered(found),
    }


def _epsilon(epsilon):
    """As the statement rounds it; JSON has no infinity."""
    return "infinite" if math.isinf(epsilon) else float(rounded_up(epsilon))


def _training(segment):
    return {
        "purpose": segment.purpose,
        "data_set": segment.data_set,
        "steps": segment.steps,
        "planned_steps": segment.planned_steps if math.isfinite(segment.planned_steps) else None,
        "noise": [
            {
                "distribution": type(release.mechanism).__name__,
                "statistic": release.statistic,
                "multiplier": float(release.multiplier),
            }
            | ({} if release.count_noise is None else {"count_noise": release.count_noise})
            | ({} if release.rows is None else {"rows": dataclasses.asdict(release.rows)})
            for release in segment.releases
            if not release.is_public
        ],
        "noise_schedule": _settings(keras.saving.serialize_keras_object(segment.schedule)),
        "clip_norm": segment.clip_norm,
        "sampling": _settings(segment.sampling.get_config()),
        "privacy_filter": segment.filter and str(segment.filter),
    }


def _optimizer(optimizer):
    """Name and settings of the last training's optimizer; None of a model without one."""
    if optimizer is None:
        return None
    return {"name": type(optimizer).__name__, "settings": _settings(optimizer.get_config())}


def _settings(value):
    """A configuration for people to read: without import paths, seeds and long arrays."""
    if isinstance(value, dict):
        if set(value) >= {"class_name", "config"}:
            return {"name": value["class_name"], **(_settings(value["config"]) or {})}
        return {key: _settings(each) for key, each in value.items() if key != _SECRET}
    if isinstance(value, list | tuple):
        size = len(keras.tree.flatten(value))
        if size > _LONGEST:
            return f"{size} values, not shown"
        return [_settings(each) for each in value]
    if isinstance(value, numbers.Integral | str | None):
        return value
    if isinstance(value, numbers.Real):  # of float32, whose digits these are
        return float(f"{value:.7g}") if math.isfinite(value) else str(value)
    return type(value).__name__


def _architecture(model, inputs, outputs):
    layers = [
        layer
        for layer in layers_of(model)
        if not isinstance(layer, keras.layers.InputLayer)
        and not any(layers_of(layer, include_self=False))
    ]
    trained = sum(math.prod(v.shape) for v in model.trainable_variables)
    return {
        "inputs": {spec.name: _form(spec) for spec in tf.nest.flatten(inputs)},
        "outputs": {name: _form(spec) for name, spec in outputs.items()},
        "parameters": model.count_params(),
        "trainable_parameters": trained,
        "layers": dict(collections.Counter(type(layer).__name__ for layer in layers)),
        "dtype_policy": model.dtype_policy.name,
    }


def _form(spec):
    return {"dtype": tf.as_dtype(spec.dtype).name, "shape": spec.shape.as_list()}


# Texts.


def to_json(content):
    """The card for programs."""
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def to_markdown(content: Mapping[str, Any]) -> str:
    """The card for people: the statement as it is, and the rest of the JSON around it."""
    privacy, architecture = content["privacy"], content["architecture"]
    not_said = "Not stated."
    metrics = [
        f"| {name} | {each['value']:.6g} | {each['data']} | {each['note']} |"
        for name, each in content["metrics"].items()
    ]
    table = ["| metric | value | data | |", "|---|---|---|---|", *metrics]
    sections = {
        "Intended use": content["intended_use"] or not_said,
        "Training data": content["data"] or not_said,
        "Metrics": "\n".join(table) if metrics else not_said,
        "Privacy": f"```text\n{privacy['statement'].strip()}\n```",
        "Optimizer": _listed(content["optimizer"]) if content["optimizer"] else not_said,
        "Architecture": _listed(architecture),
        "Versions": _listed(content["versions"]),
    }
    parts = [f"# {content['name']}", *(f"## {name}\n\n{text}" for name, text in sections.items())]
    return "\n\n".join(parts) + "\n"


def _listed(values, indent=""):
    """Nested Markdown lists of nested dicts."""
    lines = []
    for name, value in values.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}- {name}:", _listed(value, indent + "  ")]
        else:
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines.append(f"{indent}- {name}: {shown}")
    return "\n".join(lines)
