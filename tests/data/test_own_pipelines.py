"""What users do to batches on the way, and how long they say an epoch is."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.accounting import Sampling
from dp_keras_opt.data import RowInfo

N, B, CLIP = 1000, 1, 1.0
X = np.random.default_rng(1).normal(size=(N, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def model(batch_size=B):
    inputs = keras.Input((3,))
    private = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    private.compile(
        dp.optimizers.DPSGD(0.1, clip_norm=CLIP, noise_multiplier=8.0, batch_size=batch_size), "mse"
    )
    return private


def poisson(**kwargs):
    return dp.data.poisson_batches((X, Y), B, steps_per_epoch=3, physical_batch_size=256, **kwargs)


# Rows.

LOSE = {
    "a pair": lambda x, y, rows: (x + 0.1, y),
    "the mask as a weight": lambda x, y, rows: (x, y, rows.mask),
    "a plain tuple": lambda x, y, rows: (x, y, tuple(part for part in rows if part is not None)),
    "x alone": lambda x, y, rows: x,
    "a fourth element": lambda x, y, rows: (x, y, rows, rows.mask),
}


@pytest.mark.parametrize("lose", LOSE)
def test_padded_batches_without_their_rows_are_refused(lose):
    """The padding of a batch is copies of example 0, which moved the sum by 255 C."""
    train = poisson()
    lost = dataclasses.replace(train, dataset=train.dataset.map(LOSE[lose]))
    private = model()
    before = private.get_weights()
    with pytest.raises(ValueError, match=r"(?s)padding.*batches\.map"):
        private.fit(lost, verbose=0)
    assert private.ledger.steps == 0
    assert all(map(np.array_equal, before, private.get_weights()))


def _generator(dataset):
    return ((x, y) for x, y, _ in dataset)


class _Sequence(keras.utils.PyDataset):
    def __init__(self, dataset):
        super().__init__()
        self.batches = [(x.numpy(), y.numpy()) for x, y, _ in dataset]

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


@pytest.mark.parametrize("other", [_generator, _Sequence])
def test_rows_lost_outside_of_tensorflow_are_refused(other):
    train = poisson()
    lost = dataclasses.replace(train, dataset=other(train.dataset))
    private = model()
    before = private.get_weights()
    with pytest.raises(ValueError, match=r"(?s)padding.*batches\.map"):
        private.fit(lost, verbose=0)
    assert all(map(np.array_equal, before, private.get_weights()))


@pytest.mark.parametrize("make", ["poisson", "cyclic", "fixed", "users", "public"])
def test_every_sampler_keeps_its_rows_through_map(make):
    batches = {
        "poisson": poisson,
        "cyclic": lambda: dp.data.cyclic_poisson((X, Y), B, groups=2, steps_per_epoch=2),
        "fixed": lambda: dp.data.fixed_order_epochs((X[:8], Y[:8]), 3),
        "users": lambda: dp.data.poisson_users(
            (X, Y), np.arange(N) // 4, B, 2, examples_per_user=3
        ),
        "public": lambda: dp.data.with_public(poisson(), (X[:5], Y[:5])),
    }[make]()
    mapped = batches.map(lambda x, y: (2 * x[:2], tf.reduce_sum(y)))
    assert mapped.sampling == batches.sampling and len(mapped) == len(batches)
    assert mapped.physical_batch_size == batches.physical_batch_size
    spec, old = mapped.dataset.element_spec, batches.dataset.element_spec
    assert spec[0].shape[1:] == (2,) and spec[1].shape.rank == 1
    assert isinstance(spec[2], RowInfo) and spec[2].mask == old[2].mask
    for x, y, rows in mapped:
        counted = np.ravel(rows.mask) > 0
        np.testing.assert_allclose(y[counted] + 0, np.asarray(y)[counted])
        assert len(x) == len(y) == len(counted)


def test_map_sees_single_examples_of_any_structure():
    x = {"a": np.arange(12.0).reshape(6, 2), "b": np.array([f"word {i}" for i in range(6)])}
    train = dp.data.poisson_batches((x, np.arange(6)), 3, physical_batch_size=6, steps_per_epoch=2)
    shapes = []

    def change(x, y):
        shapes.append((tuple(x["a"].shape), tuple(x["b"].shape), tuple(y.shape)))
        return {"a": x["a"] + 100, "b": tf.strings.upper(x["b"])}, y

    for batch, y, rows in train.map(change):
        own = rows.mask.numpy() > 0
        for a, b, label in zip(batch["a"].numpy()[own], batch["b"].numpy()[own], y.numpy()[own],
                               strict=True):  # fmt: skip
            np.testing.assert_array_equal(a, x["a"][label] + 100)
            assert b.decode() == f"WORD {label}"
    assert set(shapes) == {((2,), (), ())}


# Tests have a global seed, which tf.data would repeat for random numbers of its own.
def _generator():
    generator = tf.random.Generator.from_seed(5)
    return lambda x: x + generator.normal((1,))


def _layer():
    layer = keras.layers.GaussianNoise(1.0)
    return lambda x: layer(x, training=True)


@pytest.mark.parametrize("jitter", [_generator, _layer])
@pytest.mark.parametrize("where", ["of the sampler", "of the batches"])
def test_batches_made_at_the_same_time_have_random_numbers_of_their_own(where, jitter):
    """Keras's layers read and write their seed in two operations."""
    jitter = jitter()
    data = (np.zeros((4000, 1), "float32"), np.arange(4000))

    def function(x, y):
        return jitter(x), y

    if where == "of the sampler":
        train = dp.data.fixed_order_epochs(data, 20, map=function)
    else:
        train = dp.data.fixed_order_epochs(data, 20).map(function)
    values = np.concatenate([x.numpy().ravel() for x, _, _ in train])
    # Of 4000 normals in float32 about 2 are pairs by chance; there were 50 and 100.
    assert len(values) == 4000 and len(np.unique(values)) > 3990


@pytest.mark.parametrize("jitter", [_generator, _layer])
def test_map_is_random_anew_for_each_example_and_epoch(jitter):
    train = dp.data.fixed_order_epochs((np.zeros((6, 1), "float32"), np.arange(6)), 3)
    jitter = jitter()
    mapped = train.map(lambda x, y: (jitter(x), y))
    values = [x.numpy().ravel() for _epoch in range(2) for x, _, _ in mapped]
    assert len(np.unique(values)) == 12


def test_the_sum_after_map_moves_by_no_more_than_the_clip_norm():
    """By hand, an augmentation that shows example 0 in the padding moved it by 255 C."""
    sums = []
    for first in (X[0], -100 * X[0]):
        x = np.concatenate([[first], X[1:]])
        train = dp.data.poisson_batches(
            (x, Y), B, steps_per_epoch=40, physical_batch_size=256, seed=3
        ).map(lambda x, y: (x + 0.1, y))
        private = model()
        private.set_weights([np.zeros((3, 1)), np.zeros(1)])
        totals = []
        for batch in train:
            queries = private.optimizer.queries()
            (total,) = dp.clipping.clipped_sums(private, _as_batch(batch), queries).sums
            totals.append(np.concatenate([np.ravel(part) for part in total]))
        sums.append(np.array(totals))
    moved = np.linalg.norm(sums[0] - sums[1], axis=1)
    assert moved.max() <= 2 * CLIP * (1 + 1e-5)


def _as_batch(batch):
    x, y, rows = batch
    return dp.clipping.Batch(x, y, None, tf.cast(rows.mask, tf.bool))


def test_map_trains_and_evaluates_like_the_batches_it_is_of():
    private = model(100)
    train = dp.data.poisson_batches((X, Y), 100, steps_per_epoch=3)
    augmented = train.map(lambda x, y: (keras.random.normal((3,), seed=1) * 0.01 + x, y))
    private.fit(augmented, epochs=2, verbose=0)
    assert private.ledger.steps == 6
    assert private.ledger.segments[0].sampling == train.sampling


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x, y: x, "must return a tuple"),
        (lambda x, y: (x, y, y), "must return a tuple"),
        (lambda x, y: [x], "must return a tuple"),
        (lambda x: (x, x), "argument"),
    ],
)
def test_functions_that_are_none_of_examples_are_refused(function, words):
    with pytest.raises((TypeError, ValueError), match=words):
        poisson().map(function)


def test_map_of_a_generator_says_where_to_change_examples():
    batches = dp.data.assume_sampling((batch for batch in []), Sampling.full(5))
    with pytest.raises(TypeError, match="where they are made"):
        batches.map(lambda x, y: (x, y))


@pytest.mark.parametrize("how", ["train_on_batch", "assume_sampling"])
def test_rows_lost_on_the_way_to_ones_own_loop_are_refused(how):
    """The sampling that a sampler states is of padded batches, wherever it is used."""
    train, private = poisson(), model()
    before = private.get_weights()
    with pytest.raises(ValueError, match=r"(?s)padding.*batches\.map"):
        if how == "train_on_batch":
            private.sampling = train.sampling
            for x, y, _rows in train:
                private.train_on_batch(x, y)
        else:
            dropped = train.dataset.map(lambda x, y, rows: (x, y))
            private.fit(dp.data.assume_sampling(dropped, train.sampling), verbose=0)
    assert all(map(np.array_equal, before, private.get_weights()))


def test_what_says_that_batches_are_padded_is_no_part_of_the_sampling():
    train = poisson()
    assert train.sampling == Sampling.poisson(N, B) and "is_padded" not in repr(train.sampling)
    again = Sampling.from_config(train.sampling.get_config())
    assert again == train.sampling and not again.is_padded
    private = model()
    private.sampling = train.sampling
    for x, y, rows in train:
        private.train_on_batch(x, y, rows)
    assert private.ledger.steps == 3


# Epochs.

ORDERED = [Sampling.shuffled, Sampling.fixed_order]
SIZE, BATCH = 23, 8  # three batches a pass, of which the last is dropped or not


def examples():
    return tf.data.Dataset.from_tensor_slices((X[:SIZE], Y[:SIZE]))


def in_one_order(data):
    return data.shuffle(SIZE, reshuffle_each_iteration=False)


ENDLESS = {
    "repeat after batch": lambda: examples().batch(BATCH, drop_remainder=True).repeat(),
    "repeat before batch": lambda: in_one_order(examples()).repeat().batch(BATCH, True),
    "repeat before shuffle": lambda: in_one_order(examples().repeat()).batch(BATCH, True),
    "with the rest": lambda: examples().batch(BATCH).repeat(),
}


@pytest.mark.parametrize("steps_per_epoch", [2, 3, 6])
@pytest.mark.parametrize("state", ORDERED)
@pytest.mark.parametrize("case", ENDLESS)
def test_endless_data_under_a_sampling_of_passes_are_refused(case, state, steps_per_epoch):
    """Two batches a pass under a period of three were accounted as 6 releases where it were 9."""
    batches = dp.data.assume_sampling(ENDLESS[case](), state(SIZE, BATCH))
    private = model(BATCH)
    with pytest.raises(ValueError, match=r"(?s)no end.*repeat\(\)"):
        private.fit(batches, steps_per_epoch=steps_per_epoch, epochs=9, verbose=0)
    assert private.ledger.steps == 0


def _endless():
    while True:
        yield from ((x.numpy(), y.numpy()) for x, y in examples().batch(BATCH, drop_remainder=True))


class _Endless(keras.utils.PyDataset):
    num_batches = None

    def __getitem__(self, index):
        start = index % 2 * BATCH
        return X[start : start + BATCH], Y[start : start + BATCH]


@pytest.mark.parametrize(
    "make",
    [
        _endless,
        _Endless,
        lambda: tf.data.Dataset.from_generator(
            _endless, output_signature=examples().batch(BATCH).element_spec
        ),
    ],
)
def test_generators_that_may_begin_a_pass_in_between_are_refused(make):
    batches = dp.data.assume_sampling(make(), Sampling.shuffled(SIZE, BATCH))
    private = model(BATCH)
    with pytest.raises(ValueError, match="than is accounted"):
        private.fit(batches, steps_per_epoch=2, epochs=9, verbose=0)
    assert private.ledger.steps == 0


def test_a_stream_whose_length_is_stated_may_be_cut_into_epochs():
    stream = examples().batch(BATCH).filter(lambda x, y: True)
    stream = stream.apply(tf.data.experimental.assert_cardinality(3))
    private = model(BATCH)
    batches = dp.data.assume_sampling(stream, Sampling.shuffled(SIZE, BATCH))
    private.fit(batches, steps_per_epoch=1, epochs=3, verbose=0)
    assert private.ledger.steps == 3


def test_endless_batches_of_independent_draws_are_taken():
    """Each batch is drawn anew: there are no passes to count."""
    private = model(BATCH)
    draws = examples().batch(SIZE).repeat()
    batches = dp.data.assume_sampling(draws, Sampling.full(SIZE))
    with pytest.raises(ValueError, match="batch_size"):
        private.fit(batches, steps_per_epoch=2, verbose=0)
    private = model(SIZE)
    private.fit(batches, steps_per_epoch=2, epochs=2, verbose=0)
    assert private.ledger.steps == 4
