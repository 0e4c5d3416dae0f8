"""A plain optimizer that is called once for all replicas takes the steps that it took before."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from dp_keras_opt.optimizers.updates_once import UpdatesOnce, updating_once

PLAIN = {
    "Lion": lambda: keras.optimizers.Lion(0.01, weight_decay=0.5),
    "Nadam": lambda: keras.optimizers.Nadam(0.1),
    "SGD": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.3, 1, 0.5), momentum=0.9, use_ema=True
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_it_takes_the_same_steps(name):
    results = []
    for optimizer in (PLAIN[name](), updating_once(PLAIN[name]())):
        variable = keras.Variable(np.linspace(-1, 1, 6).reshape(2, 3))
        optimizer.build([variable])
        for step in range(4):
            optimizer.apply([tf.reshape(tf.cos(tf.range(6.0) + step), (2, 3))])
        optimizer.finalize_variable_values([variable])
        results.append(variable.numpy())
    np.testing.assert_allclose(*results, rtol=1e-6)


@pytest.mark.parametrize("name", PLAIN)
def test_it_is_of_the_class_and_has_the_configuration(name):
    plain = PLAIN[name]()
    once = updating_once(plain)
    assert isinstance(once, type(plain)) and isinstance(once, UpdatesOnce)
    assert type(once).__name__ == type(plain).__name__
    assert json.dumps(once.get_config()) == json.dumps(plain.get_config())


def test_what_a_class_overrides_it_overrides_still():
    class Own(keras.optimizers.SGD):
        def _apply_weight_decay(self, variables):
            self.assign_add(variables[0], 1.0)

    variable = keras.Variable(np.zeros(()))
    optimizer = updating_once(Own(0.1, weight_decay=0.1))
    optimizer.build([variable])
    optimizer.apply([tf.constant(0.0)])
    assert float(variable) == 1.0
