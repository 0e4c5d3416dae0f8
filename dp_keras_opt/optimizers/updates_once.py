"""Optimizers that are called once for all replicas, after the sums of the replicas are added up."""

from typing import Any

import keras


class UpdatesOnce(keras.optimizers.Optimizer):
    """A Keras optimizer that is called outside of any replica.

    Keras's own asks TensorFlow to leave the replica that it is called in; here there is none to
    leave.
    """

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            variable = variable.value if isinstance(variable, keras.Variable) else variable
            self.update_step(gradient, variable, learning_rate)

    def _apply_weight_decay(self, variables):
        if self.weight_decay is None:
            return
        for variable in variables:
            if self._use_weight_decay(variable):
                rate = keras.ops.cast(self.learning_rate, variable.dtype)
                value = keras.ops.convert_to_tensor(variable)
                self.assign_sub(variable, value * self.weight_decay * rate)


def updating_once(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """A new optimizer with the configuration of this one, as an `UpdatesOnce`.

    Its class comes first in the order of methods: what it overrides, it overrides here too.
    """
    plain = type(optimizer)
    once: Any = type(plain.__name__, (plain, UpdatesOnce), {"__module__": plain.__module__})
    return once.from_config(optimizer.get_config())
