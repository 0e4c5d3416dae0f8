"""Weights that something else than a private step has changed."""

import contextlib
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.quantizers import GPTQConfig

import dp_keras_opt as dp
from dp_keras_opt import checksums
from dp_keras_opt.accounting import Sampling
from dp_keras_opt.callbacks import PrivacyReport

layers = keras.layers
N, B, DELTA = 24, 8, 1e-3
X = np.random.default_rng(1).normal(size=(N, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
SAMPLING = Sampling.poisson(N, B)
PRIVATE = {"clip_norm": 1.0, "noise_multiplier": 2.0, "batch_size": B}


def _batches(steps=3):
    """Batches said to be Poisson samples; their content is of no account here."""
    data = tf.data.Dataset.from_tensors((X[:B], Y[:B], dp.data.RowInfo(np.ones(B, "float32"))))
    return dp.data.assume_sampling(data.repeat(steps), SAMPLING)


def _base(**kwargs):
    return keras.Sequential(
        [keras.Input((3,)), layers.Dense(4, **kwargs), layers.Dropout(0.5), layers.Dense(1)]
    )


def _compiled(model, optimizer=None):
    model.compile(optimizer or dp.optimizers.DPSGD(0.1, **PRIVATE), "mse")
    return model


def _model(optimizer=None, **kwargs):
    return _compiled(dp.make_private(_base(**kwargs)), optimizer)


def _fit(model, **kwargs):
    return model.fit(_batches(), verbose=0, **kwargs)


def _is_changed(model):
    return "changed since by something that is not a private step" in " ".join(
        model.statement(DELTA).split()
    )


def _move(model):
    variable = model.trainable_variables[0]
    variable.assign(variable + 1)


# What is noticed.


class _Block(layers.Layer):
    def build(self, shape):
        self.dense = layers.Dense(8)
        self.dense.build(shape)

    def call(self, x):
        return x + self.dense(x)


TAKES_PARTS = "quantization_layer_structure" in inspect.signature(GPTQConfig).parameters
LATER = pytest.mark.skipif(not TAKES_PARTS, reason="of later versions of Keras")


@pytest.mark.parametrize("mode", ["int8", pytest.param("gptq", marks=LATER)])
def test_quantization_by_a_data_set_is_noted(mode):
    """GPTQ fits kernels to what the layers make of the rows."""
    inputs, embedding, block = keras.Input((6,), dtype="int32"), layers.Embedding(9, 8), _Block()
    outputs = layers.Dense(1)(layers.Flatten()(block(embedding(inputs))))
    model = _compiled(dp.DPModel(inputs, outputs))
    ids = np.random.default_rng(0).integers(0, 9, (B, 6))
    model.sampling = SAMPLING
    model.train_on_batch(ids, Y[:B])
    if mode == "gptq":
        parts = {"pre_block_layers": [embedding], "sequential_blocks": [block]}
        config = GPTQConfig(
            [row[None] for row in ids], tokenizer=lambda row: row, sequence_length=6, group_size=8,
            num_samples=4, quantization_layer_structure=parts,
        )  # fmt: skip
    model.quantize(mode, config=config if mode == "gptq" else None)
    assert _is_changed(model) == (mode == "gptq")


def _train_plainly(base):
    base.compile("sgd", "mse")
    base.fit(X, Y, verbose=0)


CHANGES = {
    "plain training": _train_plainly,
    "set_weights": lambda base: base.set_weights([w + 1 for w in base.get_weights()]),
    "assign": lambda base: base.layers[0].kernel.assign(base.layers[0].kernel + 1e-6),
    "bias": lambda base: base.layers[0].bias.assign(-base.layers[0].bias),
    "rows exchanged": lambda base: base.layers[0].kernel.assign(base.layers[0].kernel[::-1]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_from_outside_is_said(change):
    base = _base()
    change(base)  # before any private step: nothing to say
    private = _compiled(dp.make_private(base))
    change(base)
    assert not _is_changed(private)
    _fit(private)
    assert not _is_changed(private)
    change(base)
    assert _is_changed(private)
    _fit(private)  # nor is it forgotten
    assert _is_changed(private)


def test_report_and_export_say_it(tmp_path):
    base, report = _base(), PrivacyReport(DELTA)
    private = _compiled(dp.make_private(base))
    _fit(private, callbacks=[report])
    assert "changed since" not in report.statement()
    _train_plainly(base)
    dp.serving.export(private, tmp_path / "served", report)
    assert "changed since" in (tmp_path / "served" / dp.serving.STATEMENT).read_text()


def test_a_change_goes_with_the_file(tmp_path):
    for change_first in (False, True):
        private = _model()
        _fit(private)
        if change_first:
            _move(private)
        path = tmp_path / "model.keras"
        private.save(path)
        again = keras.saving.load_model(path)
        assert _is_changed(again) == change_first
        _move(again)
        assert _is_changed(again)
        fresh = dp.make_private(_base())
        fresh.load_weights(path)
        assert _is_changed(fresh) == change_first


def test_weights_without_their_ledger_are_a_change(tmp_path):
    private, plain = _model(), _base()
    _fit(private)
    plain.save_weights(tmp_path / "plain.weights.h5")
    with pytest.raises(ValueError, match="0 variables"):  # no state for the optimizer
        private.load_weights(tmp_path / "plain.weights.h5")
    assert _is_changed(private)


def test_a_change_is_known_where_lora_takes_the_weights_in(tmp_path):
    """The file has other variables than the model: any of them may be the changed one."""
    model = _model()
    _fit(model)
    _move(model)
    assert _is_changed(model)
    model.save_weights(tmp_path / "changed.weights.h5")
    base = _base()
    base.layers[0].enable_lora(2)
    other = _compiled(dp.make_private(base))
    other.load_weights(tmp_path / "changed.weights.h5")
    assert _is_changed(other) and other.ledger.steps == 3


def test_a_change_stays_where_loading_skips_it(tmp_path):
    saved = _model()
    _fit(saved)
    saved.save_weights(tmp_path / "saved.weights.h5")
    inputs = keras.Input((3,))
    outputs = layers.Dense(2)(layers.Dropout(0.5)(layers.Dense(4)(inputs)))
    other = _compiled(dp.DPModel(inputs, outputs))
    other.fit(X, np.concatenate([Y, Y], axis=1), verbose=0)
    other.layers[-1].kernel.assign_add(keras.ops.ones((4, 2)))
    assert _is_changed(other)
    with pytest.warns(UserWarning):
        other.load_weights(tmp_path / "saved.weights.h5", skip_mismatch=True)
    assert _is_changed(other)
    same = _model()
    _fit(same)
    _move(same)
    assert _is_changed(same)
    same.load_weights(tmp_path / "saved.weights.h5", skip_mismatch=True)  # nothing is skipped
    assert not _is_changed(same)


def test_after_train_on_batch_nothing_is_known():
    private = _model()
    _fit(private)
    private.sampling = dp.accounting.Sampling.poisson(len(X), B)
    private.train_on_batch(X[:B], Y[:B])
    _move(private)
    assert not _is_changed(private)
    _fit(private)
    _move(private)
    private.sampling = dp.accounting.Sampling.poisson(len(X), B)
    private.train_on_batch(X[:B], Y[:B])
    assert _is_changed(private)


# What is no change.


OPTIMIZERS = {
    "ema": lambda: dp.optimizers.DPSGD(0.1, use_ema=True, **PRIVATE),
    "ema, overwritten": lambda: dp.optimizers.DPSGD(
        0.1, use_ema=True, ema_overwrite_frequency=2, **PRIVATE
    ),
    "adam": lambda: dp.optimizers.DPAdam(0.1, **PRIVATE),
    "correlated": lambda: dp.optimizers.DPSGD(0.1, noise=dp.noise.TreeAggregation(12), **PRIVATE),
    "delayed": lambda: dp.optimizers.DP2RMSprop(0.1, adaptive_clip_norm=1.0, delay=2, **PRIVATE),
    "nesterov": lambda: dp.optimizers.DPNesterov(0.1, **PRIVATE),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_evaluating_saving_is_no_change(optimizer, tmp_path):
    private = _model(optimizer())
    if isinstance(private.optimizer.noise, dp.noise.TreeAggregation):
        sampling = Sampling.fixed_order(N, B)
        data = dp.data.assume_sampling(
            tf.data.Dataset.from_tensor_slices((X, Y)).batch(B), sampling
        )
    else:
        data = _batches()
    private.fit(data, epochs=2, verbose=0, validation_data=(X, Y))
    assert not _is_changed(private)
    private.fit(data, verbose=0)
    private.evaluate(X, Y, verbose=0)
    private.predict(X, verbose=0)
    private(X, training=True)
    assert not _is_changed(private)
    private.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert not _is_changed(again)
    private.load_weights(tmp_path / "model.keras")
    assert not _is_changed(private)


@pytest.mark.parametrize("restored_by", ["early stopping", "backup", "swap", "swap at epochs"])
def test_callbacks_that_move_weights_are_no_change(restored_by, tmp_path):
    callback = {
        "early stopping": lambda: keras.callbacks.EarlyStopping(
            monitor="loss", min_delta=1e3, restore_best_weights=True
        ),
        "backup": lambda: keras.callbacks.BackupAndRestore(tmp_path / "backup"),
        "swap": keras.callbacks.SwapEMAWeights,
        "swap at epochs": lambda: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
    }[restored_by]()
    optimizer = dp.optimizers.DPSGD(0.1, use_ema=True, **PRIVATE)
    private = _model(optimizer)
    _fit(private, epochs=4, callbacks=[callback], validation_data=(X, Y))
    assert not _is_changed(private)
    if restored_by == "swap":  # swapped by sums, which rounds
        private.evaluate(X, Y, verbose=0, callbacks=[callback])
        private.predict(X, verbose=0, callbacks=[callback])
        assert not _is_changed(private)
        _move(private)
        private.evaluate(X, Y, verbose=0, callbacks=[callback])
        assert _is_changed(private)


@pytest.mark.parametrize("how", ["backup", "backup within epochs", "roll back", "from the start"])
def test_callbacks_that_load_what_was_trained_are_no_change(how, tmp_path):
    """What a `fit` loads is moved on by its steps: the next save took that for a change."""
    path = tmp_path / "at.weights.h5"
    kept = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
    every = {"save_freq": 2} if "within" in how else {}
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", **every)

    def stop(epoch, logs):
        if epoch == 2:
            raise KeyboardInterrupt

    def roll_back(epoch, logs):
        if epoch == 1:
            private.load_weights(path)

    def load(logs):
        private.load_weights(path)

    call = keras.callbacks.LambdaCallback
    first, then = {
        "roll back": ([kept], [kept, call(on_epoch_end=roll_back)]),
        "from the start": ([kept], [call(on_train_begin=load), kept]),
    }.get(how, ([backup, call(on_epoch_end=stop)], [backup]))
    private = _model()
    with contextlib.suppress(KeyboardInterrupt):
        _fit(private, epochs=4, callbacks=first)
    private = _model()
    _fit(private, epochs=4, callbacks=then)
    private.save(tmp_path / "model.keras")
    assert not _is_changed(private)
    _move(private)
    assert _is_changed(private)


class _TakesIn(layers.Layer):
    """Keeps a mean of what it is evaluated on."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if not training:
            self.mean.assign(keras.ops.mean(inputs, axis=0))
        return inputs - self.mean


@pytest.mark.parametrize("by", ["validation", "predict", "test", "test with callbacks"])
def test_what_layers_take_in_when_they_are_evaluated_is_noticed(by):
    private = _compiled(
        dp.make_private(keras.Sequential([keras.Input((3,)), _TakesIn(), layers.Dense(1)]))
    )
    predict = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: private.predict(X, verbose=0)
    )
    in_fit = {"validation": {"validation_data": (X, Y)}, "predict": {"callbacks": [predict]}}
    _fit(private, epochs=2, **in_fit.get(by, {}))
    assert _is_changed(private) == (by in in_fit)
    if by not in in_fit:
        given = {"callbacks": [keras.callbacks.Callback()]} if "callbacks" in by else {}
        private.evaluate(X, Y, verbose=0, **given)
        assert _is_changed(private)


def test_an_interrupted_fit_is_no_change():
    private = _model()

    def stop(batch, logs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _fit(private, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=stop)])
    assert not _is_changed(private)


def test_a_statement_during_training_is_no_change():
    private, said = _model(), []
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: said.append(_is_changed(private))
    )
    _fit(private, callbacks=[look])
    _fit(private, callbacks=[look])
    assert said == [False] * 6


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16", "bfloat16", "float64"])
def test_other_types_and_frozen_layers(dtype, tmp_path):
    base = keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4, dtype=dtype, trainable=False),
            layers.Dense(1, dtype="float32"),
        ]
    )
    private = _compiled(dp.make_private(base))
    _fit(private)
    _fit(private)
    assert not _is_changed(private)
    private.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert not _is_changed(again)
    frozen = again.layers[1].kernel
    frozen.assign(-frozen)
    assert _is_changed(again)


def test_lora_that_saving_merges_is_no_change(tmp_path):
    """Keras saves kernel + A·B for the kernel, and zeros for A and B: private all the same."""
    base = _base()
    base.layers[0].enable_lora(2)
    model = _compiled(dp.make_private(base))
    _fit(model)
    assert np.any(base.layers[0].lora_kernel_b)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.ledger.steps == 3 and not _is_changed(again)
    model.save_weights(tmp_path / "model.weights.h5")
    model.load_weights(tmp_path / "model.weights.h5")
    assert not _is_changed(model)
    again.layers[-1].bias.assign([7.0])  # a layer without LoRA is still watched
    assert _is_changed(again)
    _fit(model)
    base.layers[0].lora_kernel_a.assign_add(keras.ops.ones((3, 2)))
    assert _is_changed(model)
    model.save(tmp_path / "changed.keras")
    assert _is_changed(keras.saving.load_model(tmp_path / "changed.keras"))


def test_a_part_that_another_private_model_trains_is_no_change():
    inputs = keras.Input((3,))
    shared = layers.Dense(4)
    first, second = (
        _compiled(dp.DPModel(inputs, layers.Dense(1)(shared(inputs)))) for _ in range(2)
    )
    for model in (first, second, first):
        _fit(model)
        assert not _is_changed(first) and not _is_changed(second)
    second.sampling = SAMPLING
    second.train_on_batch(X[:B], Y[:B])
    assert not _is_changed(first) and not _is_changed(second)


def test_a_checkpoint_restores_the_sums(tmp_path):
    private = _model()
    _fit(private)
    path = tf.train.Checkpoint(model=private).write(str(tmp_path / "checkpoint"))
    _fit(private)
    tf.train.Checkpoint(model=private).restore(path).expect_partial()
    assert not _is_changed(private)
    _move(private)
    assert _is_changed(private)


def test_a_part_of_the_weights_loaded_is_no_change(tmp_path):
    private = _model()
    _fit(private)
    private.save_weights(tmp_path / "private.weights.h5")
    other = dp.make_private(
        keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dropout(0.5), layers.Dense(2)])
    )
    with pytest.warns(UserWarning, match="could not be loaded"):
        other.load_weights(tmp_path / "private.weights.h5", skip_mismatch=True)
    assert other.ledger.steps == 3
    assert not _is_changed(other)


# The sum.


@pytest.mark.parametrize(
    "dtype",
    ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"],
)
def test_the_sum_is_that_of_exact_integers(dtype):
    values = np.random.default_rng(0).integers(0, 2, (5, 7)) * 3 - 1.5
    variable = keras.Variable(tf.cast(values, dtype), dtype=dtype, trainable=False)
    array = np.array(tf.convert_to_tensor(variable)).reshape(-1)
    bits = array.view({1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}[array.dtype.itemsize])

    def split_mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    total = sum(split_mix((int(b) + golden * i) % 2**64) for i, b in enumerate(bits, 1)) % 2**64
    assert checksums.sums_of([variable])[0] % 2**64 == total


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_changes_by_a_pattern_do_not_cancel(dtype):
    """As signs that turn do in a sum that is linear in the bits."""
    values = np.array([1.0, -1.0, -1.0, 1.0, -1.0, 1.0, 1.0, -1.0] * 4)
    several = [keras.Variable(v, dtype=dtype) for v in (values, -values, np.roll(values, 1))]
    assert len(set(checksums.sums_of(several))) == 3


def test_large_variables_are_taken_in_blocks(monkeypatch):
    variable = keras.Variable(np.arange(100, dtype="float32"))
    whole = checksums.sums_of([variable])
    monkeypatch.setattr(checksums, "_BLOCK", 7)
    monkeypatch.setattr(checksums, "_sum", tf.function(checksums._sum.python_function))
    assert checksums.sums_of([variable]) == whole


def test_what_is_known_of_a_variable_dies_with_it():
    variable = keras.Variable([1.0])
    key = id(variable)
    checksums.register([variable])
    assert key in checksums._sums
    del variable
    assert key not in checksums._sums


# An optimizer that is not built yet.


def test_weights_loaded_into_a_model_with_a_fresh_optimizer(tmp_path):
    private = _model(dp.optimizers.DPAdam(0.1, noise_schedule=[1.0] * 8, **PRIVATE))
    _fit(private)
    private.save_weights(tmp_path / "private.weights.h5")
    fresh = _model(dp.optimizers.DPAdam(0.1, noise_schedule=[1.0] * 8, **PRIVATE))
    with pytest.warns(UserWarning, match="starts afresh"):
        fresh.load_weights(tmp_path / "private.weights.h5")
    np.testing.assert_array_equal(fresh.get_weights()[0], private.get_weights()[0])
    assert fresh.ledger.steps == 3 and int(fresh.optimizer.iterations) == 0
    _fit(fresh, epochs=2)
    assert [(s.first_step, s.steps) for s in fresh.ledger.segments] == [(0, 3), (0, 6)]
    assert not _is_changed(fresh)


def test_a_run_of_correlated_noise_begins_anew_with_a_fresh_optimizer(tmp_path):
    def optimizer():
        return dp.optimizers.DPSGD(0.1, noise=dp.noise.TreeAggregation(12), **PRIVATE)

    data = dp.data.assume_sampling(
        tf.data.Dataset.from_tensor_slices((X, Y)).batch(B), Sampling.fixed_order(N, B)
    )
    private, fresh = _model(optimizer()), _model(optimizer())
    private.fit(data, verbose=0)
    private.save_weights(tmp_path / "private.weights.h5")
    # As many variables as an optimizer without momentum has before it is built, or a warning.
    fresh.load_weights(tmp_path / "private.weights.h5")
    fresh.fit(data, epochs=2, verbose=0)
    segments = fresh.ledger.segments
    assert [segment.steps for segment in segments] == [3, 6]
    assert segments[0].run != segments[1].run


def test_a_built_optimizer_that_does_not_fit_is_refused(tmp_path):
    private = _model(dp.optimizers.DPAdam(0.1, **PRIVATE))
    _fit(private)
    private.save_weights(tmp_path / "private.weights.h5")
    built = _model()
    _fit(built)
    with pytest.raises(ValueError, match="belongs to another optimizer"):
        built.load_weights(tmp_path / "private.weights.h5")
