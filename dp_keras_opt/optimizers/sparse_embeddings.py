"""Embeddings of which each step moves few rows: noise on these alone."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from dp_keras_opt._keras import variable_itself
from dp_keras_opt.checks import is_number
from dp_keras_opt.clipping.query import Tables
from dp_keras_opt.noise.row_selection import RowSelection
from dp_keras_opt.noise.serializable import Serializable
from dp_keras_opt.optimizers.settings import positive

if TYPE_CHECKING:
    from dp_keras_opt.noise.released import Released

_NOTHING_CHOSEN = (
    "threshold=None chooses no rows by what a batch touches. Give the rows that are trained, "
    "rows={layer: ids}, or a threshold."
)


@keras.saving.register_keras_serializable(package="dp_keras_opt")
class SparseEmbeddings(Serializable):
    """Noise, state and step of few rows of a table, in place of all.

    A batch looks up few of a table's rows, but noise on its gradient makes all of them move: a
    table of a million rows costs more than the rest of the model, and the rows that are never
    looked up drift. With this a step first chooses rows by noisy counts of the examples that touch
    them (`noise.row_selection` has the proof); the gradients of these rows get noise, and the
    others stay as they are.

    - By default (DP-AdaFEST) each step chooses its rows anew: those of which the noisy count
      reaches the threshold.
    - With `rows` and threshold=None (DP-FEST) the rows are given, and all others are never trained.
    - With both (DP-AdaFEST+), each step chooses among the rows that are given.

    Each row is trained by the optimizer's rule on the steps at which it was chosen, and its moments
    hold these alone: its bias correction counts them. (Without moments, as in SGD and AdaGrad, that
    is what the rule does with gradients of zero for the others.)

    Args:
        threshold: τ, the least noisy count at which a row is chosen, in standard deviations of the
            noise on counts, σ₁C₁. Of the rows that nobody touches a share of Φ(−τ) is chosen: 0.13%
            at 3, 32 of a million at 4. None: all of `rows`.
        contribution_norm: C₁. An example that touches k rows counts min(1, C₁/√k) in each. With
            C₁ = √k each counts fully; the noise on the counts grows with C₁.
        noise_ratio: σ₁/σ₂, of the noise on counts and on gradients, each over its bound. Together
            they cost what `noise_multiplier` z says: σ₁ = z√(1 + ratio²), σ₂ = z√(1 + ratio⁻²). At
            5, the gradients have 2% more noise than without a choice.
        layers: None, or the names of the layers whose tables these are; by default all variables of
            two axes that are called "embeddings". Name the large ones: a small table of which
            each example has many rows, as of positions, makes it count less in all others.
        rows: None, or {name of a layer: ids of rows}, the only ones that are trained. They must be
            public or *released*: whoever takes the rows that occur in private data, or the most
            frequent ones without noise, publishes that outside of the ledger.
            `statistics.PrivateData.category_counts` releases counts by which to choose.

    Raises:
        ValueError: an argument is out of range; or, by the optimizer, it does not go with another
            setting, or no table is there.

    Guarantee: that of the optimizer, at its noise multiplier; and rows that were chosen are
    released. Not with XLA, whose sums have a size that is known beforehand.

    Reference: Ghazi, Huang, Kamath, Kumar, Manurangsi, Sinha and Zhang, "Sparsity-preserving
    differentially private training of large embedding models", NeurIPS 2023, arXiv:2311.08357,
    Algorithm 1 (DP-AdaFEST) and Section 3.1 (DP-FEST).
    """

    def __init__(
        self,
        threshold: float | None = 3.0,
        *,
        contribution_norm: float = 1.0,
        noise_ratio: float = 5.0,
        layers: Sequence[str] | None = None,
        rows: Mapping[str, Iterable[int]] | None = None,
    ) -> None:
        if threshold is None and rows is None:
            raise ValueError(_NOTHING_CHOSEN)
        if threshold is not None and not (is_number(threshold) and 0 < threshold < math.inf):
            raise ValueError(
                f"threshold must be None, or positive and finite; received {threshold!r}. At 0, "
                "half of the rows that nobody touches would be chosen."
            )
        if isinstance(layers, str):
            raise ValueError(f"layers must be a list of names; received {layers!r}.")
        self.threshold = None if threshold is None else float(threshold)
        self.contribution_norm = positive("contribution_norm", contribution_norm)
        self.noise_ratio = positive("noise_ratio", noise_ratio)
        self.layers = None if layers is None else list(layers)
        self.rows = None if rows is None else {k: _ids(k, v) for k, v in rows.items()}

    @property
    def selection(self) -> RowSelection:
        """How a step chooses rows."""
        return RowSelection(self.threshold, self.noise_ratio, self.rows is not None)

    def tables(self, variables: Sequence[keras.Variable]) -> Tables:
        """What is asked of these trainable variables.

        Raises:
            ValueError: no table is among them, or one that is named is not, or has no such row.
        """
        found = {}
        for index, variable in enumerate(variables):
            layer, name = ("", *str(variable.path).split("/"))[-2:]
            is_named = self.layers is None or layer in self.layers
            if name == "embeddings" and len(variable.shape) == 2 and is_named:
                found[index] = layer
        named, there = {*(self.layers or ()), *(self.rows or ())}, sorted(set(found.values()))
        if not found or named - set(there):
            raise ValueError(
                "SparseEmbeddings finds no trained embeddings"
                f"{f' of the layers {sorted(named - set(there))}' if named else ''} in this "
                f"model; there are {there or 'none'}."
            )
        trained = {index: self._trained(layer, variables[index]) for index, layer in found.items()}
        return Tables(trained, None if self.threshold is None else self.contribution_norm)

    def _trained(self, layer, variable):
        """Which rows are trained, a boolean array (V,), which no graph owns; None for all."""
        if self.rows is None:
            return None
        if layer not in self.rows:
            if self.threshold is None:
                raise ValueError(f"rows= says nothing of the layer {layer!r}. {_NOTHING_CHOSEN}")
            return None
        ids = np.array(self.rows[layer])
        if ids.max() >= variable.shape[0]:
            raise ValueError(
                f"rows[{layer!r}] has {ids.max()}, and the table has {variable.shape[0]} rows."
            )
        trained = np.zeros(variable.shape[0], bool)
        trained[ids] = True
        return trained

    def get_config(self) -> dict[str, Any]:
        return dict(vars(self))


def _ids(layer, ids):
    found = np.asarray(list(ids))
    if found.ndim != 1 or not len(found) or found.dtype.kind not in "iu" or found.min() < 0:
        raise ValueError(f"rows[{layer!r}] must be a list of ids >= 0; received {ids!r}.")
    return np.unique(found).tolist()


class ByRow:
    """The tables of an optimizer with what it remembers of them, of which a step moves some rows.

    Within `of` the optimizer's rule sees these rows alone of what it remembers, and what it assigns
    goes to them.

    Args:
        tables: by their index among the trainable variables.
        slots: for each of them, the variables in which the rule remembers something of each row.
        steps: for each of them, how many steps each row was chosen at, (V, 1).
    """

    def __init__(
        self,
        tables: Mapping[int, keras.Variable],
        slots: Mapping[int, Sequence[keras.Variable]],
        steps: Mapping[int, keras.Variable],
    ) -> None:
        self.tables, self.slots, self.steps = tables, slots, steps
        every = ((index, v) for index, table in tables.items() for v in (table, *slots[index]))
        self._places = {id(variable_itself(v)): (index, v) for index, v in every}
        self._rows: dict[int, Any] = {}
        self._scope: Any = None

    def take(self, released: Released) -> Released:
        """The release with the rows of tables as plain tensors; until `finish`, these are moved."""
        values = list(released.value)
        for index in self.tables:
            self._rows[index] = values[index].indices
            values[index] = values[index].values
        return released._replace(value=values)

    def finish(self) -> None:
        """Counts the step."""
        for index, rows in self._rows.items():
            one = tf.ones((tf.size(rows), 1), tf.int32)
            for copy in _copies(self.steps[index]):
                copy.scatter_add(tf.IndexedSlices(one, rows))
        self._rows = {}

    def steps_of(self, index: int) -> tf.Tensor:
        """How many steps the moments of each chosen row hold after this one, (rows, 1)."""
        return _read(self.steps[index], self._rows[index]) + 1

    @contextlib.contextmanager
    def of(self):
        """The scope in which what is remembered of tables has the chosen rows only."""
        with _RowScope() as self._scope:
            for index, rows in self._rows.items():
                for slot in self.slots[index]:
                    self._scope.stand_in(slot, _read(slot, rows))
            try:
                yield
            finally:
                self._scope = None

    def holds(self, variable: Any) -> bool:
        """Whether rows of it are moved now: it is such a table, or remembers something of one.

        Args:
            variable: one of Keras, or its `tf.Variable`.
        """
        return self._scope is not None and _id(variable) in self._places

    def assign(self, variable: Any, function: Callable[[tf.Tensor], tf.Tensor]) -> None:
        """Assigns `function` of what the chosen rows were to them."""
        index, found = self._places[_id(variable)]
        rows, old = self._rows[index], self._scope.get_current_value(found)
        new = function(_read(found, rows) if old is None else old)
        if old is not None:
            self._scope.stand_in(found, new)
        for copy in _copies(found):
            copy.scatter_update(tf.IndexedSlices(new, rows))


class _RowScope(keras.StatelessScope):
    """Rows stand for some variables; what is assigned to any other goes to it as ever."""

    def stand_in(self, variable, rows):
        super().add_update((variable, rows))

    def add_update(self, update):
        variable, value = update
        variable_itself(variable).assign(value)


def _copies(variable):
    """The `tf.Variable`s of a Keras variable: one, or that of each replica of this process."""
    itself = variable_itself(variable)
    return getattr(itself, "values", (itself,))


def _read(variable, rows):
    return _copies(variable)[0].sparse_read(rows)


def _id(variable):
    return id(variable_itself(variable) if isinstance(variable, keras.Variable) else variable)
