"""Which engine serves which layer: its rule, or the layer run one example at a time."""

from typing import NamedTuple

from dp_keras_opt._keras import layers_of, trained_in
from dp_keras_opt.clipping import hub_rules, per_example, recurrent_rules  # noqa: F401  (register)
from dp_keras_opt.clipping.layer_rules import rule_for


class Engines(NamedTuple):
    """Which engine serves which layer.

    Attributes:
        ruled: layers served by their rule.
        general: layers (or the whole model) run one example at a time, vectorised.
        sequential: whether these take the examples one after another instead.
        splits: for each call of a `general` layer, which of its arguments have one row per example,
            and how many times an example is repeated (`per_example.call`); filled by the
            self-check, whose batch size nothing else in a model is likely to share. None goes by
            the size of each argument.
        hidden: variables that code may change which no graph shows; they must stay as they are.
        moving: variables that every pass moves on, such as seeds and counters.
        demoted: (layer of `general`, why a faster engine did not do) for each that was demoted.
    """

    ruled: tuple
    general: tuple
    sequential: bool = False
    splits: dict | None = None
    hidden: tuple = ()
    moving: tuple = ()
    demoted: tuple = ()

    def demote(self, layers, model, reason):
        """The engines with a slower one for these layers, where theirs has failed, and why.

        Instead of its rule, a layer is run one example at a time; instead of the layer alone, the
        one around it is, and so on up to the model.
        """
        around = {id(c): p for p in layers_of(model) for c in per_example.children(p)}
        units = [layer if layer in self.ruled else around.get(id(layer), model) for layer in layers]
        units = [unit for unit in units if not any(_inside(unit, other) for other in units)]

        def others(served):
            return [s for s in served if not any(s is u or _inside(s, u) for u in units)]

        ruled, general = others(self.ruled), [*others(self.general), *dict.fromkeys(units)]
        demoted = (*self.demoted, *((unit, reason) for unit in units))
        return self._replace(ruled=tuple(ruled), general=tuple(general), splits={}, demoted=demoted)


def engines_for(model, open_sizes=False):
    """Walks the model and gives each layer that owns trainable variables an engine.

    `open_sizes`: whether the data leaves sizes open besides the number of rows.
    """
    ruled, general = [], []

    def walk(layer):
        if not trained_in(layer):
            return
        found = rule_for(layer)
        if found is not None:
            ruled.append(layer)
            if found.loop is not None:
                return
        elif per_example.is_unit(layer, open_sizes):
            general.append(layer)
            return
        for child in per_example.children(layer):  # of a ruled layer: an activation with weights
            walk(child)

    walk(model)
    return Engines(tuple(dict.fromkeys(ruled)), tuple(dict.fromkeys(general)), splits={})


def _inside(layer, other):
    """Whether `layer` is one of those that `other` is made of."""
    return any(layer is part for part in layers_of(other, include_self=False))
