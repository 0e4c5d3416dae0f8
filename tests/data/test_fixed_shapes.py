"""Draws of one static shape: Poisson batches that are cut, and subsets of a fixed size.

Statistical tests run on a fixed seed, so they do not flake. Their thresholds are such that a
correct sampler fails each of them for at most one seed in 1,000.
"""

import keras
import numpy as np
import pytest
import scipy.stats

import dp_keras_opt as dp
from dp_keras_opt.accounting import Sampling
from dp_keras_opt.data import poisson_batches, sampled, without_replacement_batches

N, BATCH, CAP, STEPS = 30, 6, 8, 3000
DATA = np.arange(N), 10 * np.arange(N)


def seeded(make, *args, **kwargs):
    with pytest.warns(UserWarning, match="seed=7: whoever knows"):
        return make(DATA, *args, seed=7, **kwargs)


def draws(batches):
    """The examples in each batch of one iteration, in the order of the rows."""
    return [x.numpy()[rows.mask.numpy() == 1] for x, _, rows in batches]


def table_of(batches):
    """[steps, N]: is example i in the batch of step t?"""
    return np.stack([np.bincount(members, minlength=N) for members in draws(batches)])


@pytest.fixture(scope="module")
def cut():
    return table_of(seeded(poisson_batches, BATCH, STEPS, max_batch_size=CAP))


@pytest.fixture(scope="module")
def subsets():
    return table_of(seeded(without_replacement_batches, BATCH, STEPS))


def assert_uniform(table, share):
    """All examples, and all pairs, come equally often, if each subset of a size does.

    By the squared deviations of the counts, which of subsets of one size are chi-square with one
    degree of freedom less; false alarms: 1e-3 each.
    """
    variance = len(table) * share * (1 - share)
    counts = table.sum(axis=0)
    z = (N - 1) / N * np.sum((counts - counts.mean()) ** 2) / variance
    assert 1e-3 / 2 < scipy.stats.chi2(N - 1).sf(z) < 1 - 1e-3 / 2
    pairs = (table.T @ table)[np.triu_indices(N, k=1)]
    both = pairs.mean() / len(table)
    largest = abs(pairs - pairs.mean()).max() / np.sqrt(len(table) * both * (1 - both))
    assert largest < scipy.stats.norm.isf(1e-3 / 2 / len(pairs))


def test_sizes_of_cut_draws_are_binomial_up_to_the_cap(cut):
    """Chi-square; false alarms: 1e-3. And no example is twice in a batch."""
    assert cut.max() == 1
    sizes, binomial = cut.sum(axis=1), scipy.stats.binom(N, BATCH / N)
    inner = np.arange(3, CAP)
    expected = [binomial.cdf(2), *binomial.pmf(inner), binomial.sf(CAP - 1)]
    observed = [(sizes < 3).sum(), *((sizes == k).sum() for k in inner), (sizes == CAP).sum()]
    assert sum(observed) == STEPS
    assert scipy.stats.chisquare(observed, STEPS * np.array(expected)).pvalue > 1e-3


def test_what_is_kept_of_a_draw_is_any_of_it(cut):
    full = cut[cut.sum(axis=1) == CAP]  # of 3,000 draws 715 are expected to be cut or full
    assert len(full) > 600
    assert_uniform(full, CAP / N)


def test_each_example_is_kept_as_often_as_is_accounted(cut):
    """E min(size, M) / n, over all examples; false alarms: 1e-3."""
    sizes = np.arange(N + 1)
    kept = np.minimum(sizes, CAP)
    chance = scipy.stats.binom.pmf(sizes, N, BATCH / N)
    mean = chance @ kept
    deviation = np.sqrt((chance @ kept**2 - mean**2) / STEPS)
    assert abs(cut.sum(axis=1).mean() - mean) < scipy.stats.norm.isf(1e-3 / 2) * deviation


def test_subsets_are_uniform_and_of_one_size(subsets):
    assert subsets.max() == 1 and set(subsets.sum(axis=1)) == {BATCH}
    assert_uniform(subsets, BATCH / N)


def test_subsets_do_not_remember_the_step_before(subsets):
    """An epoch would: its batches share nobody. False alarms: 1e-3."""
    shared = np.sum(subsets[:-1] * subsets[1:], axis=1)
    hypergeometric = scipy.stats.hypergeom(N, BATCH, BATCH)
    z = (shared.mean() - hypergeometric.mean()) / (hypergeometric.std() / np.sqrt(len(shared)))
    assert abs(z) < scipy.stats.norm.isf(1e-3 / 2)


@pytest.mark.parametrize(
    "make", [lambda: poisson_batches(DATA, 6, 4, max_batch_size=8),
             lambda: without_replacement_batches(DATA, 6, 4)]
)  # fmt: skip
def test_each_iteration_draws_anew_whatever_the_global_seeds(make):
    found = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        batches = make()
        found += [str(np.stack([x for x, *_ in batches])) for _ in range(2)]
    assert len(set(found)) == 4


@pytest.mark.parametrize(
    "physical, rows", [(None, CAP), (3, 9), (8, 8), (20, 20)]
)  # fmt: skip
def test_one_static_shape_whatever_was_drawn(physical, rows):
    batches = seeded(poisson_batches, BATCH, 60, max_batch_size=CAP, physical_batch_size=physical)
    assert batches.physical_batch_size == (physical or CAP)
    for leaf in batches.dataset.element_spec[:2]:
        assert leaf.shape.as_list() == [rows]
    sizes = {int(info.mask.numpy().sum()) for _, _, info in batches}
    assert max(sizes) == CAP and len(sizes) > 3
    subsets = seeded(without_replacement_batches, BATCH, 3, physical_batch_size=physical)
    padded = -(-BATCH // (physical or BATCH)) * (physical or BATCH)
    assert subsets.dataset.element_spec[0].shape.as_list() == [padded]


def test_a_cap_above_all_examples_cuts_nothing():
    batches = seeded(poisson_batches, N, 2, max_batch_size=40, physical_batch_size=16)
    assert batches.dataset.element_spec[0].shape.as_list() == [48]
    assert all(sorted(members) == list(range(N)) for members in draws(batches))


def test_they_state_their_sampling():
    batches = poisson_batches(DATA, BATCH, max_batch_size=CAP, unit="rating")
    assert batches.sampling == Sampling.truncated_poisson(N, BATCH, CAP, unit="rating")
    assert batches.sampling.is_padded and len(batches) == 5
    subsets = without_replacement_batches(DATA, BATCH, adjacency="zero_out")
    assert subsets.sampling == Sampling.without_replacement(N, BATCH, "zero_out")
    assert poisson_batches(DATA, BATCH).sampling == Sampling.poisson(N, BATCH)


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: poisson_batches(DATA, 6, max_batch_size=5), "below the expected"),
        (lambda: poisson_batches(DATA, 6, max_batch_size=8.0), "max_batch_size must be an int"),
        (
            lambda: poisson_batches(DATA, 6, max_batch_size=8, adjacency="add_or_remove_one"),
            "number of units",
        ),
        (lambda: without_replacement_batches(DATA, 31), "batch_size must be"),
        (lambda: without_replacement_batches(DATA, 6, adjacency="add_or_remove_one"), "displaces"),
    ],
)
def test_refuses(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize(
    "make", [lambda: poisson_batches(DATA, 6, max_batch_size=8),
             lambda: without_replacement_batches(DATA, 6)]
)  # fmt: skip
def test_several_workers_are_refused(make, monkeypatch):
    """Each would draw from its own examples: a subset of another size, or cut by another rule."""
    monkeypatch.setattr(sampled, "place", lambda: (1, 2))
    with pytest.raises(ValueError, match="all examples together.*2 workers"):
        make()


@pytest.mark.parametrize("kind", ["truncated_poisson", "without_replacement"])
def test_training_records_the_sampling(kind):
    x = np.linspace(-1, 1, 2 * N, dtype="float32").reshape(N, 2)
    y = x.sum(axis=1, keepdims=True)
    if kind == "truncated_poisson":
        batches = poisson_batches((x, y), BATCH, 3, max_batch_size=CAP, physical_batch_size=4)
    else:
        batches = without_replacement_batches((x, y), BATCH, 3, physical_batch_size=4)
    inputs = keras.Input((2,))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    model.compile(dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0), "mse")
    model.fit(batches, verbose=0)
    (segment,) = model.ledger.segments
    assert segment.sampling == batches.sampling and segment.steps == 3
    assert segment.sampling.kind == kind
