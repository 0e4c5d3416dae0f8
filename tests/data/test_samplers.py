"""Sampling, padding and inputs of `dp_keras_opt.data`.

Statistical tests run on a fixed seed, so they do not flake. Their thresholds are such that a
correct sampler fails each of them for at most one seed in 1,000.
"""

import dataclasses
import warnings

import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.accounting.sampling import Sampling
from dp_keras_opt.data import Batches, RowInfo, assume_sampling, poisson_batches

N, BATCH, STEPS = 40, 8, 3000


def ids_and_targets(n):
    """Data whose values name the example: x = its index, y = 10 times that."""
    return np.arange(n), 10 * np.arange(n)


def seeded(*args, seed=1, **kwargs):
    with pytest.warns(UserWarning, match="seed"):
        return poisson_batches(*args, seed=seed, **kwargs)


def draws(batches):
    """The examples in each batch of one iteration, in the order of the rows."""
    return [x.numpy()[rows.mask.numpy() == 1].tolist() for x, _, rows in batches]


@pytest.fixture(scope="module")
def membership():
    """[STEPS, N]: is example i in the batch of step t?"""
    table = np.zeros([STEPS, N], int)
    for step, members in enumerate(draws(seeded(ids_and_targets(N), BATCH, STEPS, seed=7))):
        np.add.at(table[step], members, 1)
    return table


# --- the distribution of draws


def test_no_example_is_twice_in_a_batch(membership):
    assert membership.max() == 1


def test_batch_sizes_are_binomial(membership):
    """Chi-square against the exact distribution; false alarms: 1e-3."""
    sizes = membership.sum(axis=1)
    binomial = scipy.stats.binom(N, BATCH / N)
    inner = np.arange(4, 14)  # each expected more than 20 times; the tails are two more cells
    expected = [binomial.cdf(3), *binomial.pmf(inner), binomial.sf(13)]
    observed = [(sizes < 4).sum(), *((sizes == k).sum() for k in inner), (sizes > 13).sum()]
    assert scipy.stats.chisquare(observed, STEPS * np.array(expected)).pvalue > 1e-3


def test_batch_sizes_have_the_mean_and_variance_of_poisson_sampling(membership):
    """A sampler of fixed-size batches has variance 0; false alarms: 1e-3 in all."""
    sizes, q = membership.sum(axis=1), BATCH / N
    variance = N * q * (1 - q)
    z = scipy.stats.norm.isf(1e-3 / 4)
    assert abs(sizes.mean() - BATCH) < z * np.sqrt(variance / STEPS)
    assert abs(sizes.var() / variance - 1) < z * np.sqrt(2 / STEPS)


def test_each_example_is_included_equally_often(membership):
    """The squared deviations of the counts are chi-square with N degrees; false alarms: 1e-3."""
    q = BATCH / N
    z = (membership.sum(axis=0) - STEPS * q) / np.sqrt(STEPS * q * (1 - q))
    assert 1e-3 / 2 < scipy.stats.chi2(N).sf(np.sum(z**2)) < 1 - 1e-3 / 2


def test_inclusions_of_two_examples_are_independent(membership):
    """All pairs, which batches of a fixed size would correlate by -1/(N-1); false alarms: 1e-3."""
    correlations = np.corrcoef(membership.T)[np.triu_indices(N, k=1)]
    pairs = len(correlations)
    assert abs(correlations * np.sqrt(STEPS)).max() < scipy.stats.norm.isf(1e-3 / 4 / pairs)
    assert abs(correlations.mean()) < scipy.stats.norm.isf(1e-3 / 4) / np.sqrt(STEPS * pairs)


def test_steps_are_independent(membership):
    """No memory as in an epoch without replacement; false alarms: 1e-3."""
    now, later = membership[:-1].ravel(), membership[1:].ravel()
    z = np.corrcoef(now, later)[0, 1] * np.sqrt(now.size)
    assert abs(z) < scipy.stats.norm.isf(1e-3 / 2)


# --- randomness


def test_no_epoch_repeats_an_earlier_one():
    unseeded = poisson_batches(ids_and_targets(1000), 50, 4)
    for batches in (unseeded, seeded(ids_and_targets(1000), 50, 4)):
        epochs = [draws(batches) for _ in range(3)]
        assert len({str(members) for epoch in epochs for members in epoch}) == 12


def test_repeat_and_prefetch_draw_afresh():
    dataset = poisson_batches(ids_and_targets(1000), 50, 2).dataset.repeat(3).prefetch(4)
    assert len({str(members) for members in draws(dataset)}) == 6


def test_default_randomness_ignores_global_seeds():
    found = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        found.append(draws(poisson_batches(ids_and_targets(1000), 50, 2)))
    assert found[0] != found[1]


def test_a_seed_gives_the_same_epochs_and_another_seed_others():
    first, second, other = (seeded(ids_and_targets(1000), 50, 3, seed=s) for s in (1, 1, 2))
    for _ in range(2):
        epoch = draws(first)
        assert draws(second) == epoch
        assert draws(other) != epoch


def test_abandoning_an_iteration_does_not_change_the_next_one():
    """Keras abandons one to build a model; how much of it was prefetched is a matter of timing."""
    first, second = (seeded(ids_and_targets(1000), 50, 20) for _ in range(2))
    next(iter(first))
    draws(second)
    assert draws(first) == draws(second)


# --- padding


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_batches_have_the_promised_shape_and_padding(data):
    n = data.draw(st.integers(1, 30), label="n")
    batch_size = data.draw(st.integers(1, n), label="batch_size")
    block = data.draw(st.none() | st.integers(1, 40), label="physical_batch_size")
    inner = tuple(data.draw(st.lists(st.integers(1, 3), max_size=2), label="inner shape"))
    x = np.arange(1, n + 1).reshape([n] + [1] * len(inner)) * np.ones(inner, int)
    batches = seeded((x, np.arange(n)), batch_size, 4, physical_batch_size=block)
    block = batches.physical_batch_size
    spec = batches.dataset.element_spec
    assert spec[0].shape.as_list() == [block if block >= n else None, *inner]
    for batch_x, batch_y, (mask, weight, public) in batches:
        members = int(mask.numpy().sum())
        assert len(mask) == block * max(1, -(-members // block))
        assert weight is None and public is None and mask.dtype == tf.float32
        np.testing.assert_array_equal(mask, np.arange(len(mask)) < members)
        indices = batch_y.numpy()
        assert len(set(indices[:members])) == members
        assert (indices[members:] == 0).all()
        np.testing.assert_array_equal(batch_x, x[indices])


def test_empty_draws_are_one_block_of_padding():
    batches = seeded(ids_and_targets(50), 1, 60, physical_batch_size=4)
    empty = [batch for batch in batches if not batch[2].mask.numpy().any()]
    assert 5 < len(empty) < 45  # 22 expected; outside for fewer than 1 seed in 10,000
    assert all(batch[0].numpy().tolist() == [0] * 4 for batch in empty)


def test_oversize_draws_lose_nothing():
    batches = poisson_batches(ids_and_targets(30), 30, 3, physical_batch_size=8)
    for x, y, rows in batches:  # q = 1: each draw holds all examples
        assert x.shape == [32]
        assert sorted(x.numpy()[rows.mask.numpy() == 1]) == list(range(30))
        np.testing.assert_array_equal(y, 10 * x)


@pytest.mark.parametrize(
    "n, batch_size, physical", [(10_000, 64, 80), (10_000, 1, 8), (50, 40, 56), (1, 1, 8)]
)
def test_default_physical_batch_size(n, batch_size, physical):
    batches = poisson_batches(ids_and_targets(n), batch_size)
    assert batches.physical_batch_size == physical
    leading = batches.dataset.element_spec[0].shape[0]
    assert leading == (physical if physical >= n else None)


# --- inputs


def test_nested_inputs_keep_structure_and_rows():
    n = 20
    index = np.arange(n)
    x = {"a": index, "b": (index[:, None] * [1.0, 2.0], [index + 1, index + 2])}
    y = [index * 3, {"c": index * 4}]
    batches = poisson_batches((x, y), 6)
    for batch_x, batch_y, _ in batches:
        i = batch_x["a"].numpy()
        np.testing.assert_array_equal(batch_x["b"][0], i[:, None] * [1.0, 2.0])
        np.testing.assert_array_equal(batch_x["b"][1][1], i + 2)
        np.testing.assert_array_equal(batch_y[0], i * 3)
        np.testing.assert_array_equal(batch_y[1]["c"], i * 4)


@pytest.mark.parametrize(
    "given, expected",
    [
        (np.float64, "float32"),
        (np.float16, "float32"),
        (np.int64, "int64"),
        (np.uint8, "uint8"),
        (bool, "bool"),
    ],
)
def test_dtypes_are_those_of_keras(given, expected):
    batches = poisson_batches((np.ones(5, given), np.ones([5, 2], given)), 2)
    assert [spec.dtype.name for spec in batches.dataset.element_spec[:2]] == [expected] * 2


def test_text_and_tensors():
    text = ["a", "bb", "ccc"]
    for x in (np.array(text), np.array(text, object), tf.constant(text)):
        for batch_x, batch_y, _ in poisson_batches((x, tf.constant([1, 2, 3])), 2):
            assert tf.strings.length(batch_x).numpy().tolist() == batch_y.numpy().tolist()


def test_sample_weight_follows_its_example_and_is_zero_on_padding():
    n = 30
    weight = np.arange(n) + 0.5
    for data_weight in (weight, {"a": weight, "b": 2 * weight}):
        for x, _, rows in poisson_batches((*ids_and_targets(n), data_weight), 5, 10):
            expected = (x.numpy() + 0.5) * rows.mask.numpy()
            if isinstance(data_weight, dict):
                np.testing.assert_array_equal(rows.sample_weight["b"], 2 * expected)
            else:
                np.testing.assert_array_equal(rows.sample_weight, expected)
                assert rows.sample_weight.dtype == tf.float32


@pytest.mark.parametrize(
    "labels_as",
    [lambda c: c, lambda c: c[:, None], lambda c: c.astype(float), lambda c: np.eye(3)[c]],
    ids=["int", "column", "float", "one-hot"],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_class_weight(labels_as, weighted):
    n = 30
    classes = np.arange(n) % 3
    weight = np.arange(n) + 0.5 if weighted else np.ones(n)
    data = (np.arange(n), labels_as(classes)) + ((weight,) if weighted else ())
    expected = np.array([2.0, 0.25, 1.0])[classes] * weight  # class 2 is left out
    for x, _, rows in poisson_batches(data, 5, 10, class_weight={0: 2.0, 1: 0.25}):
        np.testing.assert_array_equal(rows.sample_weight, expected[x] * rows.mask)


def weighted_examples(n):
    rng = np.random.default_rng(0)
    x = {"ids": rng.integers(0, 9, [n, 4]), "f": rng.normal(size=[n, 2])}
    return x, rng.normal(size=n), rng.uniform(size=n)


@pytest.mark.parametrize("elements", [2, 3])
def test_a_dataset_gives_the_same_batches_as_arrays(elements):
    arrays = weighted_examples(300)[:elements]  # more than are read at a time
    dataset = tf.data.Dataset.from_tensor_slices(arrays)
    unknown = dataset.filter(lambda *_: True)
    expected = list(seeded(arrays, 20, 3))
    for data in (dataset, unknown):
        batches = seeded(data, 20, 3)
        assert batches.sampling.num_examples == 300
        for batch, expected_batch in zip(batches, expected, strict=True):
            tf.nest.map_structure(
                lambda a, b: b is None or np.testing.assert_array_equal(a, b), batch, expected_batch
            )


def test_known_data_is_refused_before_it_is_read():
    read = []

    def examples():
        for i in range(10_000):
            read.append(i)
            yield np.zeros(25, np.float32), np.float32(0)

    signature = (tf.TensorSpec([25], tf.float32), tf.TensorSpec([], tf.float32))
    unknown = tf.data.Dataset.from_generator(examples, output_signature=signature)
    known = unknown.apply(tf.data.experimental.assert_cardinality(10_000))
    limit = 500 * 26 * 4
    for data, most in ((known, 128), (unknown, 640)):
        read.clear()
        with pytest.raises(ValueError, match=f"max_bytes={limit:,}.*dp.data.write"):
            poisson_batches(data, 8, max_bytes=limit)
        assert len(read) <= 2 * most  # of 10,000; TensorFlow may read a little ahead
    assert len(poisson_batches(unknown.take(500), 8, max_bytes=limit)) == 63


def test_max_bytes_of_arrays_counts_all_of_them():
    data = (np.zeros([10, 4], np.float32), np.zeros(10, np.int64), np.zeros(10, np.float32))
    poisson_batches(data, 2, max_bytes=280)
    with pytest.raises(ValueError, match="280 bytes, but max_bytes=279"):
        poisson_batches(data, 2, max_bytes=279)
    text = (np.array(["x" * 1000], object), np.zeros(1))
    with pytest.raises(ValueError, match="max_bytes=1,000"):
        poisson_batches(text, 1, max_bytes=1000)


# --- Batches


def test_poisson_batches_state_their_sampling():
    batches = poisson_batches(ids_and_targets(100), 7, adjacency="zero_out", unit="patient")
    assert batches.sampling == Sampling.poisson(100, 7, adjacency="zero_out", unit="patient")
    assert len(batches) == batches.steps_per_epoch == len(batches.dataset) == 15
    assert len(list(batches)) == 15
    assert "Poisson(" in repr(batches) and "steps_per_epoch=15" in repr(batches)


def test_replacing_the_dataset_keeps_the_statement():
    batches = poisson_batches(ids_and_targets(100), 7, 3, physical_batch_size=4)
    mapped = dataclasses.replace(batches, dataset=batches.dataset.map(lambda *b: b).prefetch(2))
    assert mapped.sampling == batches.sampling and mapped.physical_batch_size == 4
    assert isinstance(mapped.dataset.element_spec[2], RowInfo)


def test_keras_takes_the_dataset_and_knows_its_length():
    class Counter(keras.Model):
        def train_step(self, data):
            x, _, rows = data
            assert isinstance(rows, RowInfo) and x.shape[0] is None
            return {"examples": tf.reduce_sum(rows.mask)}

    inputs = keras.Input([1])
    model = Counter(inputs, keras.layers.Dense(1)(inputs))
    model.compile(optimizer="sgd")
    batches = poisson_batches((np.zeros([40, 1]), np.zeros(40)), 40, 3, physical_batch_size=8)
    seen = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(batch)
    )
    history = model.fit(batches.dataset, epochs=2, verbose=0, callbacks=[record])
    assert seen == [0, 1, 2] * 2 and history.params["steps"] == 3
    assert history.history["examples"] == [40, 40]


class TwoBatches(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.zeros([4, 1]), np.zeros(4)


def test_assume_sampling_takes_what_fit_takes():
    sampling = Sampling.shuffled(8, 4)
    dataset = tf.data.Dataset.from_tensor_slices(ids_and_targets(8)).batch(4, drop_remainder=True)
    generator = ((np.zeros([4, 1]), np.zeros(4)) for _ in range(2))
    known, unknown = (dataset, TwoBatches()), (generator, dataset.repeat())
    for data, steps in [(data, 2) for data in known] + [(data, None) for data in unknown]:
        batches = assume_sampling(data, sampling)
        assert batches.dataset is data and bool(batches)
        assert batches.sampling == sampling and batches.sampling.is_stated
        assert batches.steps_per_epoch == steps and batches.physical_batch_size is None
        if steps is None:
            with pytest.raises(TypeError, match="not known"):
                len(batches)


def test_assume_sampling_doubts_poisson_batches_of_a_fixed_size():
    dataset = tf.data.Dataset.from_tensor_slices(ids_and_targets(8))
    sampling = Sampling.poisson(8, 4)
    with pytest.warns(UserWarning, match="exactly 4 rows"):
        assume_sampling(dataset.batch(4, drop_remainder=True), sampling)
    padded = poisson_batches(ids_and_targets(8), 4, physical_batch_size=8)
    assert padded.dataset.element_spec[0].shape == [8]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assume_sampling(dataset.batch(4), sampling)
        assume_sampling(padded.dataset.map(lambda *batch: batch), padded.sampling)


def test_assume_sampling_refuses_a_batch_size_that_is_not_there():
    dataset = tf.data.Dataset.from_tensor_slices(ids_and_targets(8)).batch(4, drop_remainder=True)
    with pytest.raises(ValueError, match="states batches of 2 examples.*have 4"):
        assume_sampling(dataset, Sampling.without_replacement(8, 2))


# --- errors: each names the argument, what was received, and what to do


@pytest.mark.parametrize("value", [0, -1, 11, True, 2.0, float("nan"), "4", None])
def test_batch_size_errors(value):
    with pytest.raises(ValueError, match=f"batch_size must be an integer from 1 to 10.*{value}"):
        poisson_batches(ids_and_targets(10), value)


@pytest.mark.parametrize("name", ["steps_per_epoch", "physical_batch_size", "max_bytes"])
@pytest.mark.parametrize("value", [0, -1, True, 2.5, "4"])
def test_count_errors(name, value):
    with pytest.raises(ValueError, match=f"{name} must be an integer >= 1.*{value}"):
        poisson_batches(ids_and_targets(10), 4, **{name: value})


def test_numpy_integers_are_integers():
    batches = poisson_batches(ids_and_targets(10), np.int64(4), physical_batch_size=np.int32(4))
    assert batches.sampling == Sampling.poisson(10, 4)
    assert len(list(batches)) == 3


A = np.zeros(10)
EXAMPLES = tf.data.Dataset.from_tensor_slices((A, A))


@pytest.mark.parametrize(
    "data, error, match",
    [
        (A, TypeError, r"`data` must be a tuple.*Received: ndarray"),
        ([A, A], TypeError, r"`data` must be a tuple.*Received: list"),
        ((A,), TypeError, r"`data` must be a tuple.*1 elements.*\(x, None\).*\(x, x\)"),
        ((None, A), TypeError, r"`x` must be.*Received: NoneType"),
        ((A, 3.0), TypeError, r"`y` must be.*Received: float"),
        (({"a": A, "b": 1}, A), TypeError, r"`x` must be.*Received: int"),
        ((np.array([[1], [1, 2]], object), A[:2]), TypeError, r"`x` must be a dense array"),
        ((tf.ragged.constant([[1], [1, 2]]), A[:2]), TypeError, r"`x` must be a dense array"),
        ((A, A[:9]), ValueError, r"equal length.*'x': \[10\], 'y': \[9\]"),
        (({"a": A, "b": A[:9]}, A), ValueError, r"equal length.*'x': \[10, 9\]"),
        ((A, A, A[:9]), ValueError, r"equal length.*'sample_weight': \[9\]"),
        ((A[:0], A[:0]), ValueError, r"`data` is empty"),
        (({}, A), ValueError, r"`data` is empty"),
        ((A, A, A[:, None]), ValueError, r"`sample_weight`.*\(10, 1\)"),
        ((A, A, A * np.nan), ValueError, r"`sample_weight`.*10 are not finite"),
        (EXAMPLES.repeat(), ValueError, r"infinite.*Remove `repeat\(\)`"),
        (EXAMPLES.take(0), ValueError, r"`data` is empty"),
        (EXAMPLES.batch(4), ValueError, r"looks like batches.*unbatch"),
        (EXAMPLES.map(lambda x, y: x), TypeError, r"`data` must be a tuple.*TensorSpec"),
        (EXAMPLES.map(lambda x, y: {"x": x}), TypeError, r"`data` must be a tuple.*dict"),
        (
            EXAMPLES.enumerate().map(lambda i, e: (tf.range(i), e[1])),
            ValueError,
            r"equal shape: pad them",
        ),
        (
            EXAMPLES.map(lambda x, y: (tf.RaggedTensor.from_row_lengths([x], [1]), y)),
            TypeError,
            r"dense examples: pad them",
        ),
    ],
)
def test_data_errors(data, error, match):
    with pytest.raises(error, match=match):
        poisson_batches(data, 1)


@pytest.mark.parametrize(
    "y, class_weight, error, match",
    [
        (A, [1.0, 2.0], TypeError, r"`class_weight` must be a dict.*\[1.0, 2.0\]"),
        (A, {0: np.nan}, TypeError, r"`class_weight` must be a dict.*nan"),
        (A, {0: "1"}, TypeError, r"`class_weight` must be a dict.*'1'"),
        ({"a": A, "b": A}, {0: 1.0}, ValueError, r"`class_weight` needs one output"),
        (np.zeros([10, 2, 2]), {0: 1.0}, ValueError, r"`class_weight`.*\(10, 2, 2\)"),
        (np.array(["a"] * 10), {0: 1.0}, ValueError, r"`class_weight`.*string"),
    ],
)
def test_class_weight_errors(y, class_weight, error, match):
    with pytest.raises(error, match=match):
        poisson_batches((A, y), 1, class_weight=class_weight)


def test_class_weight_refuses_weights_for_several_outputs():
    with pytest.raises(ValueError, match="one array of weights"):
        poisson_batches((A, A, {"a": A}), 1, class_weight={0: 1.0})


@pytest.mark.parametrize("sampling", [None, "poisson", 0.1])
def test_assume_sampling_needs_a_sampling(sampling):
    with pytest.raises(TypeError, match=r"`sampling` must be a dp.accounting.Sampling.*Received"):
        assume_sampling(EXAMPLES.batch(2), sampling)


@pytest.mark.parametrize("data", [A, (A, A), [(A, A)], {"x": A}, "path", 3, tf.constant(A)])
def test_assume_sampling_needs_batches(data):
    with pytest.raises(TypeError, match=rf"`data` must be batches.*{type(data).__name__}"):
        assume_sampling(data, Sampling.poisson(10, 2))


def test_assume_sampling_refuses_a_second_statement():
    batches = poisson_batches((A, A), 2)
    assert isinstance(batches, Batches)
    with pytest.raises(TypeError, match="states its sampling already"):
        assume_sampling(batches, Sampling.shuffled(10, 2))


# --- names of before


def test_the_old_name_of_what_tells_padding_from_data():
    with pytest.warns(FutureWarning, match="RowInfo"):
        assert dp.data.Rows is dp.data.RowInfo
    with pytest.raises(AttributeError, match="Columns"):
        dp.data.Columns  # noqa: B018


@pytest.mark.parametrize(
    "make",
    [
        lambda **seed: dp.data.fixed_order_epochs(ids_and_targets(12), 4, **seed),
        lambda **seed: dp.data.cyclic_poisson(
            ids_and_targets(12), 2, 3, adjacency="zero_out", **seed
        ),
    ],
)
def test_the_old_name_of_the_order(make):
    with pytest.warns(FutureWarning, match="order_seed"):
        old = make(arrangement=7)
    assert old.order_seed == make(order_seed=7).order_seed == 7
    with pytest.warns(FutureWarning, match="order_seed"):
        assert old.arrangement == 7
    with pytest.warns(FutureWarning, match="order_seed"):
        again = Batches(old.dataset, old.sampling, arrangement=3)
    assert again.order_seed == 3 and dataclasses.replace(again, workers=2).order_seed == 3
    with pytest.raises(TypeError, match="received order_seed twice"):
        make(arrangement=7, order_seed=8)
