"""Batch normalization: what `fix` exchanges, what it leaves, and what is said of both."""

import warnings

import keras
import numpy as np
import pytest

import dp_keras_opt as dp

layers, ops = keras.layers, keras.ops
ROWS = 16


def _compile(model):
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=0.5, noise_multiplier=1.0, batch_size=4)
    model.compile(optimizer, "mse")
    return model


def _trains(fixed, shape):
    """Whether a step runs, on a model whose outputs are of each example alone."""
    x = np.random.default_rng(3).normal(size=(ROWS, *shape)).astype("float32")
    y = np.zeros((ROWS, *fixed.output_shape[1:]), "float32")
    private = _compile(dp.make_private(fixed))
    private.fit(dp.data.poisson_batches((x, y), batch_size=4, steps_per_epoch=1), verbose=0)
    return private.ledger.steps == 1


def _kinds(model):
    return [type(layer) for layer in model._flatten_layers()]


def _values(layer):
    return [ops.convert_to_numpy(v) for v in layer.weights]


def _assert_same(these, those):
    for this, that in zip(these, those, strict=True):
        np.testing.assert_array_equal(this, that)


def _functional_with_norm():
    inputs = keras.Input((4, 6))
    hidden = layers.BatchNormalization(name="norm")(layers.Dense(6, name="first")(inputs))
    return keras.Model(inputs, layers.Dense(1, name="last")(layers.Flatten()(hidden)))


def _sequential_with_norm():
    return keras.Sequential(
        [
            keras.Input((4, 6)),
            layers.Dense(6, name="first"),
            layers.BatchNormalization(name="norm", axis=1),
            layers.Flatten(),
            layers.Dense(1, name="last"),
        ]
    )


def _nested_with_norm():
    inputs = keras.Input((4, 6))
    inner = keras.Sequential([keras.Input((4, 6)), layers.Dense(6), layers.BatchNormalization()])
    return keras.Model(inputs, layers.Dense(1)(layers.Flatten()(inner(inputs))))


@pytest.mark.parametrize("make", [_functional_with_norm, _sequential_with_norm, _nested_with_norm])
def test_fix_exchanges_batch_normalization_and_keeps_the_rest(make):
    model = make()
    fixed = dp.clipping.fix(model)
    assert layers.BatchNormalization not in _kinds(fixed)
    assert layers.GroupNormalization in _kinds(fixed)
    dense = [[x for x in m._flatten_layers() if type(x) is layers.Dense] for m in (model, fixed)]
    for old, new in zip(*dense, strict=True):
        assert new.name == old.name
        _assert_same(_values(new), _values(old))
    assert _trains(fixed, (4, 6))


@keras.saving.register_keras_serializable(package="test_fix")
class Residual(layers.Layer):
    """Blocks in a list, a stack and a dict, which its code calls."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.dense = [layers.Dense(units) for _ in range(2)]
        self.norms = [layers.BatchNormalization(name=f"norm_{i}") for i in range(2)]
        inner = layers.BatchNormalization(name="inner_norm")
        self.stack = keras.Sequential([layers.Dense(units), inner])
        self.by_name = {"last": layers.BatchNormalization(center=False, name="last_norm")}

    def build(self, shape):
        for layer in (*self.dense, *self.norms, self.stack, self.by_name["last"]):
            layer.build(shape)

    def call(self, inputs, training=None):
        hidden = inputs
        for dense, norm in zip(self.dense, self.norms, strict=True):
            hidden = hidden + norm(dense(hidden), training=training)
        return self.by_name["last"](self.stack(hidden, training=training), training=training)

    def get_config(self):
        return super().get_config() | {"units": self.units}


@keras.saving.register_keras_serializable(package="test_fix")
class Own(keras.Model):
    """A subclassed model, with a layer of its own and one that is a graph."""

    def __init__(self, units=6, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.residual = Residual(units)
        self.norm = self.same = layers.BatchNormalization(name="own_norm")
        self.branch = _branch("branch")
        self.head = layers.Dense(1)

    def call(self, inputs, training=None):
        hidden = self.branch(self.residual(inputs, training=training), training=training)
        hidden = self.norm(hidden, training=training) + self.same(hidden, training=training)
        return self.head(keras.ops.mean(hidden, axis=1))

    def get_config(self):
        return {"units": self.units, "name": self.name}


def _own():
    model = Own()
    model(np.zeros((2, 4, 6), "float32"))
    return model


def _around_a_layer():
    inputs = keras.Input((4, 6))
    hidden = layers.BatchNormalization(name="outer")(Residual(6, name="residual")(inputs))
    return keras.Model(inputs, layers.Dense(1)(layers.Flatten()(hidden)))


@pytest.mark.parametrize("make, number", [(_own, 6), (_around_a_layer, 5)])
def test_what_code_calls_is_exchanged_too(make, number, tmp_path):
    model = _pretend_trained(make())
    dense = [_values(each) for each in model._flatten_layers() if type(each) is layers.Dense]
    norms = [each for each in model._flatten_layers() if type(each) is layers.BatchNormalization]
    before = model.get_weights()
    with pytest.warns(UserWarning, match="drops the moving mean"):
        fixed = dp.clipping.fix(model)
    _assert_same(model.get_weights(), before)
    assert layers.BatchNormalization not in _kinds(fixed)
    groups = [each for each in fixed._flatten_layers() if type(each) is layers.GroupNormalization]
    assert len(groups) == len(norms) == number
    by_name = {group.name: group for group in groups}
    for norm in norms:  # scale and shift
        group = by_name[norm.name]
        np.testing.assert_array_equal(group.gamma, norm.gamma)
        assert (group.beta is None) == (norm.beta is None)
    same = [_values(each) for each in fixed._flatten_layers() if type(each) is layers.Dense]
    for one, other in zip(dense, same, strict=True):
        _assert_same(one, other)
    x = np.random.default_rng(3).normal(size=(ROWS, 4, 6)).astype("float32")
    alone = [np.asarray(fixed(x[row : row + 1], training=True))[0] for row in range(3)]
    np.testing.assert_allclose(fixed(x, training=True)[:3], alone, rtol=1e-4, atol=1e-5)
    y = np.zeros((ROWS, 1), "float32")
    private = _compile(dp.make_private(fixed))
    private.fit(dp.data.poisson_batches((x, y), batch_size=4, steps_per_epoch=2), verbose=0)
    assert private.ledger.steps == 2
    if make is _around_a_layer:  # what is exchanged within a class's own attributes has no config
        return
    private.save_weights(tmp_path / "w.weights.h5")
    again = dp.make_private(dp.clipping.fix(make()))
    again(x)
    again.load_weights(tmp_path / "w.weights.h5")
    np.testing.assert_allclose(again.predict(x, verbose=0), private.predict(x, verbose=0))


@pytest.mark.parametrize("make", [_own, _around_a_layer, _functional_with_norm])
def test_frozen_the_running_statistics_are_kept(make):
    model = _pretend_trained(make())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fixed = dp.clipping.fix(model, "frozen")
    assert _kinds(fixed) == _kinds(model)
    _assert_same(fixed.get_weights(), model.get_weights())
    x = np.random.default_rng(3).normal(size=(ROWS, 4, 6)).astype("float32")
    np.testing.assert_allclose(fixed(x, training=True), model(x, training=False), rtol=1e-5)
    private = _compile(dp.make_private(fixed))
    batches = dp.data.poisson_batches((x, np.zeros((ROWS, 1))), batch_size=4, steps_per_epoch=1)
    private.fit(batches, verbose=0)
    norms = [each for each in model._flatten_layers() if type(each) is layers.BatchNormalization]
    assert norms[0].trainable  # the original stays as it is


def test_a_model_that_is_not_made_again_is_refused_with_what_to_do():
    class Needs(keras.Model):
        def __init__(self, units):
            super().__init__()
            self.dense = layers.Dense(units)
            self.norm = layers.BatchNormalization()

    with pytest.raises(ValueError, match="cannot copy the model: Needs.*replace BatchNorm.*freeze"):
        dp.clipping.fix(Needs(3))
    with pytest.raises(ValueError, match="must be 'group' or 'frozen'; received 'layer'"):
        dp.clipping.fix(_functional_with_norm(), "layer")


def _pretend_trained(model):
    """Gives every weight a value that no initializer gives."""
    random = np.random.default_rng(0)
    model.set_weights([random.uniform(0.5, 1.5, w.shape) for w in model.get_weights()])
    return model


def _branch(name):
    inputs = keras.Input((4, 6))
    hidden = layers.Dense(6, name="same")(inputs)
    return keras.Model(inputs, layers.BatchNormalization(name="norm")(hidden), name=name)


def test_each_of_equally_named_layers_keeps_its_own_weights():
    inputs = keras.Input((4, 6))
    first, second = _branch("first"), _branch("second")
    model = _pretend_trained(keras.Model(inputs, first(inputs) + second(first(inputs))))
    with pytest.warns(UserWarning, match="drops the moving mean and variance"):
        fixed = dp.clipping.fix(model)
    for branch in (first, second):
        old, new = branch, fixed.get_layer(branch.name)
        _assert_same(_values(new.get_layer("same")), _values(old.get_layer("same")))
        scale_and_shift = _values(old.get_layer("norm"))[:2]
        _assert_same(_values(new.get_layer("norm")), scale_and_shift)
    assert len(fixed.weights) == 8  # the branch that is used twice is one


def test_the_original_and_its_copy_share_no_weights():
    model = _sequential_with_norm()
    fixed = dp.clipping.fix(model)
    before = model.get_weights()
    fixed.set_weights([w + 1 for w in fixed.get_weights()])
    _assert_same(model.get_weights(), before)


class Encoder(layers.Layer):
    """Its configuration does not make it again, as that of some layers of keras_hub."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(units)

    def call(self, inputs):
        return self.dense(inputs)

    def get_config(self):
        return super().get_config() | {"dense": keras.saving.serialize_keras_object(self.dense)}


@keras.saving.register_keras_serializable(package="test_fix")
class Backbone(keras.Model):
    """Functional, and made from a configuration of its own: as the backbones of keras_hub."""

    def __init__(self, units, norm=False, **kwargs):
        inputs = keras.Input((4, 6))
        hidden = Encoder(units, name="encoder")(inputs)
        if norm:
            hidden = layers.BatchNormalization(name="norm")(hidden)
        super().__init__(inputs, hidden, **kwargs)
        self.units, self.norm = units, norm

    def get_config(self):
        return {"units": self.units, "norm": self.norm, "name": self.name}


@pytest.mark.parametrize("norm", [False, True])
def test_a_backbone_whose_layers_are_not_made_again_one_by_one(norm):
    inputs = keras.Input((4, 6))
    backbone = Backbone(6, norm, name="backbone")
    hidden = layers.BatchNormalization()(backbone(inputs))
    model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(hidden)))
    fixed = dp.clipping.fix(model)
    assert layers.BatchNormalization not in _kinds(fixed)
    assert _kinds(fixed).count(layers.GroupNormalization) == 1 + norm
    encoder = fixed.get_layer("backbone").get_layer("encoder")
    np.testing.assert_array_equal(_values(encoder)[0], _values(backbone.get_layer("encoder"))[0])
    assert _trains(fixed, (4, 6))


def test_a_layer_that_cannot_be_copied_is_named():
    inputs = keras.Input((4, 6))
    hidden = layers.BatchNormalization()(Encoder(6, name="my_encoder")(inputs))
    with pytest.raises(ValueError, match="'my_encoder'.*of Encoder .*trainable = False"):
        dp.clipping.fix(keras.Model(inputs, hidden))


def test_functions_in_a_model_are_kept():
    inputs = keras.Input((4, 6))
    hidden = layers.BatchNormalization()(layers.Lambda(lambda x: 2 * x)(inputs))
    assert layers.Lambda in _kinds(dp.clipping.fix(keras.Model(inputs, hidden)))


def test_frozen_normalization_stays_and_frozen_layers_stay_frozen():
    model = _pretend_trained(_functional_with_norm())
    model.get_layer("norm").trainable = False
    model.get_layer("first").trainable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fixed = dp.clipping.fix(model)
    assert type(fixed.get_layer("norm")) is layers.BatchNormalization
    assert [v.path for v in fixed.trainable_variables] == ["last/kernel", "last/bias"]
    x = np.random.default_rng(0).normal(size=(3, 4, 6))
    np.testing.assert_allclose(fixed.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-6)


def test_frozen_parts_that_the_configuration_does_not_know_stay_frozen():
    backbone = Backbone(6, norm=True, name="backbone")
    backbone.get_layer("norm").trainable = False
    inputs = keras.Input((4, 6))
    hidden = layers.BatchNormalization(name="outer")(backbone(inputs))
    fixed = dp.clipping.fix(keras.Model(inputs, hidden))
    assert type(fixed.get_layer("backbone").get_layer("norm")) is layers.BatchNormalization
    dp.clipping.validate(fixed)


def _refusals(model):
    with pytest.raises(ValueError, match="cannot be trained privately") as refused:
        dp.clipping.validate(model)
    return str(refused.value).split("\n- ")[1:]


@pytest.mark.parametrize("make", [_own, _around_a_layer, _functional_with_norm])
@pytest.mark.parametrize("batch_norm", ["group", "frozen"])
def test_what_the_refusal_says_is_true(make, batch_norm):
    (refusal,) = _refusals(dp.make_private(make()))
    assert "dp_keras_opt.clipping.fix(model)" in refusal and "fix(model, 'frozen')" in refusal
    dp.clipping.validate(dp.clipping.fix(make(), batch_norm))


def test_many_layers_make_one_refusal():
    stack = [layers.BatchNormalization(name=f"norm_{n}") for n in range(5)]
    model = keras.Sequential([keras.Input((4, 6)), *stack])
    (refusal,) = _refusals(model)
    assert "'norm_0', 'norm_1', 'norm_2' and 2 more" in refusal


def test_statistics_that_were_trained_are_not_dropped_in_silence():
    model = _functional_with_norm()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dp.clipping.fix(model)  # nothing was trained
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(1.0, 2.0, size=(ROWS, 4, 6))
    model.fit(x, np.zeros((ROWS, 1)), verbose=0)
    with pytest.warns(UserWarning, match="mean and variance of BatchNormalization 'norm'.*freeze"):
        dp.clipping.fix(model)


@pytest.mark.parametrize(
    ("shape", "axis", "groups"),
    [
        ((32,), -1, 1),
        ((2, 2, 16), -1, 4),
        ((2, 2, 6), -1, 1),
        ((128, 2, 2), 1, 32),
        ((3, 40), 2, 10),
    ],
)
def test_every_group_has_numbers_enough(shape, axis, groups):
    """Of a group of one number nothing is left but the shift."""
    model = keras.Sequential([keras.Input(shape), layers.BatchNormalization(axis)])
    fixed = dp.clipping.fix(model)
    assert fixed.layers[0].groups == groups and fixed.layers[0].axis == axis
    outputs = fixed.predict(np.random.default_rng(0).normal(size=(5, *shape)), verbose=0)
    assert np.abs(outputs).min(axis=0).max() > 0.1  # zeros everywhere otherwise


def test_what_the_user_chose_for_the_normalization_is_kept():
    norm = layers.BatchNormalization(
        epsilon=1e-2, center=False, gamma_initializer="zeros", gamma_regularizer="l2",
        gamma_constraint="non_neg", dtype="bfloat16", name="norm",
    )  # fmt: skip
    fixed = dp.clipping.fix(keras.Sequential([keras.Input((2, 8)), norm])).get_layer("norm")
    assert fixed.epsilon == 1e-2 and fixed.beta is None and not np.any(fixed.gamma)
    assert type(fixed.gamma_regularizer) is keras.regularizers.L2
    assert type(fixed.gamma_constraint) is keras.constraints.NonNeg
    assert fixed.dtype_policy.name == "bfloat16"


def test_a_model_that_was_built_by_its_data():
    model = keras.Sequential([layers.Dense(6), layers.BatchNormalization()])
    model(np.ones((2, 4, 3), "float32"))
    fixed = dp.clipping.fix(model)
    np.testing.assert_array_equal(_values(fixed.layers[0])[0], _values(model.layers[0])[0])
    unbuilt = keras.Sequential([layers.Dense(6), layers.BatchNormalization()])
    assert layers.GroupNormalization in _kinds(dp.clipping.fix(unbuilt))


def test_a_network_of_keras_applications():
    model = keras.applications.MobileNet((32, 32, 3), alpha=0.25, weights=None, classes=3)
    fixed = dp.clipping.fix(model)
    assert _kinds(fixed).count(layers.GroupNormalization) == 27
    assert len(fixed.trainable_variables) == len(model.trainable_variables)
    assert (
        np.ptp(fixed.predict(np.random.default_rng(0).normal(size=(3, 32, 32, 3)), verbose=0)) > 0
    )


def test_a_copy_has_what_its_layers_were_adapted_with():
    private = dp.statistics.PrivateData(dp.accounting.Ledger())
    normalization = keras.layers.Normalization()
    x = np.random.default_rng(0).normal(3.0, 1.0, (1000, 2))
    dp.statistics.adapt_privately(normalization, x, private, 2.0, 1e-6, bounds=(0, 6))
    inputs = keras.Input((2,))
    hidden = keras.Sequential([normalization, keras.layers.Dense(4)])(inputs)  # nested, too
    outputs = keras.layers.Dense(1)(keras.layers.BatchNormalization()(hidden))
    fixed = dp.make_private(dp.clipping.fix(keras.Model(inputs, outputs)))
    spent = private.ledger.epsilon(1e-5)
    assert fixed.ledger.epsilon(1e-5) == pytest.approx(spent) and spent > 1.0
    assert "Statistic" in fixed.statement(1e-5)
