"""Metrics, and rules for weights, of one's own: what of the data they keep must not come back."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp

layers, ops = keras.layers, keras.ops
X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True) + 7


class _Centred(dp.DPModel):
    """Predicts from a centre on, which it does not train."""

    def __init__(self):
        super().__init__(name="centred")
        self.dense = layers.Dense(1)
        self.centre = self.add_weight(shape=(), initializer="zeros", trainable=False, name="centre")

    def call(self, inputs):
        return self.dense(inputs) + self.centre

    def move(self, targets):
        self.centre.assign(0.9 * self.centre + 0.1 * ops.mean(targets))


class _InMetrics(_Centred):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.move(y)
        return super().compute_metrics(x, y, y_pred, sample_weight)


class _InResults(_Centred):
    def get_metrics_result(self):
        results = super().get_metrics_result()
        self.centre.assign(results["loss"])
        return results


def _fit(model, **options):
    optimizer = options.pop("optimizer", None)
    private = {"clip_norm": 1.0, "noise_multiplier": 1.0}
    model.compile(optimizer or dp.optimizers.DPSGD(0.1, **private), "mse", **options)
    return model.fit(dp.data.poisson_batches((X, Y), batch_size=8), verbose=0)


def _in_function(model):
    def mean_of_targets(targets, outputs):
        model.move(targets)
        return ops.mean(targets, axis=-1)

    return {"metrics": [mean_of_targets]}


OWN = {
    "compute_metrics": (_InMetrics, lambda model: {}),
    "compute_metrics, weighted": (_InMetrics, lambda model: {"weighted_metrics": ["mae"]}),
    "get_metrics_result": (_InResults, lambda model: {}),
    "a function": (_Centred, _in_function),
}


@pytest.mark.parametrize("mode", [{}, {"run_eagerly": True}, {"jit_compile": True}])
@pytest.mark.parametrize(("make", "options"), OWN.values(), ids=OWN)
def test_a_state_that_metrics_move_is_refused(make, options, mode):
    model = make()
    with pytest.raises(ValueError, match="centre' is updated from the data"):
        _fit(model, **options(model), **mode)
    assert float(model.centre) == 0


def test_a_variable_beside_the_model_that_the_loss_reads_is_refused():
    """A weight of the loss that follows its size."""
    size = tf.Variable(1.0)

    class Weighted(keras.metrics.MeanSquaredError):
        def update_state(self, targets, outputs, sample_weight=None):
            size.assign(tf.reduce_mean(tf.abs(targets)))
            return super().update_state(targets, outputs, sample_weight)

    def loss(targets, outputs):
        return tf.reduce_mean((targets - outputs) ** 2, -1) / size

    model = _dense()
    private = {"clip_norm": 1.0, "noise_multiplier": 1.0}
    model.compile(dp.optimizers.DPSGD(0.1, **private), loss, metrics=[Weighted()])
    with pytest.raises(ValueError, match="is updated from the data"):
        model.fit(dp.data.poisson_batches((X, Y), batch_size=8), verbose=0)


def _dense(**options):
    inputs = keras.Input((4,))
    return dp.DPModel(inputs, layers.Dense(1, **options)(inputs))


class _Largest(keras.metrics.Metric):
    """With a metric in it, and a variable that nothing else reads."""

    def __init__(self):
        super().__init__(name="largest")
        self.mean = keras.metrics.Mean()
        self.calls = tf.Variable(0.0)

    def update_state(self, targets, outputs, sample_weight=None):
        self.mean.update_state(ops.max(targets, axis=-1), sample_weight)
        self.calls.assign_add(ops.mean(targets))

    def result(self):
        return self.mean.result()


def test_metrics_that_keep_to_themselves_train():
    built_late = keras.metrics.F1Score(average="micro", threshold=0.5)
    history = _fit(_dense(), metrics=[_Largest(), built_late, "mae"], weighted_metrics=["mse"])
    assert 3 < history.history["largest"][0] < 11


class _ByMetric(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, metric):
        self.metric = metric

    def __call__(self, step):
        return 0.01 * self.metric.result()

    def get_config(self):
        return {}


@pytest.mark.parametrize("by", ["kernel_regularizer", "kernel_constraint", "learning rate"])
def test_what_moves_weights_by_a_metric_is_refused(by):
    metric = keras.metrics.MeanSquaredError()
    if by == "learning rate":
        schedule = _ByMetric(metric)
        optimizer = dp.optimizers.DPSGD(schedule, clip_norm=1.0, noise_multiplier=1.0)
        model, options = _dense(), {"optimizer": optimizer}
    else:
        model = _dense(**{by: lambda weights: metric.result() * ops.sum(ops.square(weights))})
        options = {}
    with pytest.raises(ValueError, match="depends on the value of a metric"):
        _fit(model, metrics=[metric], **options)


class _Keeping(layers.Layer):
    def call(self, inputs):
        self.last = inputs
        return inputs


@pytest.mark.parametrize("by", ["kernel_regularizer", "kernel_constraint", "learning rate"])
def test_what_moves_weights_by_a_tensor_of_the_batch_is_refused(by):
    """Of a constraint the kernel was the mean of the batch."""
    keeping = _Keeping()
    inputs = keras.Input((4,))
    rules = {by: lambda weights: weights * ops.mean(keeping.last)} if "kernel" in by else {}
    model = dp.DPModel(inputs, layers.Dense(1, **rules)(keeping(inputs)))
    rate = (lambda: ops.mean(keeping.last)) if by == "learning rate" else 0.1
    optimizer = dp.optimizers.DPSGD(rate, clip_norm=1.0, noise_multiplier=1.0, batch_size=8)
    model.compile(optimizer, "mse")
    model.sampling = dp.accounting.Sampling.poisson(24, 8)
    with pytest.raises(ValueError, match="depends on the batch"):
        model.train_on_batch(X[:8], Y[:8])


def test_rules_for_weights_and_rates_that_fall_train():
    rate = keras.optimizers.schedules.CosineDecay(0.1, 10)
    optimizer = dp.optimizers.DPSGD(rate, clip_norm=1.0, noise_multiplier=1.0)
    _fit(_dense(kernel_regularizer="l2", kernel_constraint="max_norm"), optimizer=optimizer)
