"""Vocabularies: who counts for which word, which words show, and how often a secret one does."""

import collections

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import dp_keras_opt as dp
from dp_keras_opt.noise import numbers
from dp_keras_opt.noise.thresholded import FailureDpEvent, ThresholdedGaussian
from dp_keras_opt.statistics.contributions import Units
from dp_keras_opt.statistics.vocabulary import word_counts

TEXTS = ["a b a c", "b", "", "c d e f g", "a a a"]


def split(rows):
    return tf.strings.split(rows)


def by_hand(texts, users=None):
    owned = collections.defaultdict(set)
    for number, text in enumerate(texts):
        owned[number if users is None else users[number]] |= set(text.split())
    return collections.Counter(word for words in owned.values() for word in words)


@pytest.mark.parametrize("users", [None, [0, 1, 1, 0, 1]])
def test_each_unit_counts_once_for_a_word(users):
    units = Units(None if users is None else np.array(users))
    words, counts = word_counts([np.array(TEXTS)], units, 100, split=split)
    found = dict(zip(words, counts, strict=True))
    assert found == dict(by_hand(TEXTS, users))


def test_chunks_make_no_difference():
    whole = word_counts([np.array(TEXTS)], Units(np.array([0, 1, 1, 0, 1])), 100, split=split)
    parts = [np.array(TEXTS[:3]), np.array(TEXTS[3:])]
    cut = word_counts(parts, Units(np.array([0, 1, 1, 0, 1])), 100, split=split)
    assert dict(zip(*whole, strict=True)) == dict(zip(*cut, strict=True))


def test_no_unit_counts_for_more_words_than_allowed_and_each_word_has_a_chance():
    rows, seen = np.array([[f"w{i}" for i in range(6)]]), collections.Counter()
    for _ in range(300):
        words, counts = word_counts([rows], Units(), 2)
        assert list(counts) == [1, 1]  # no word is named that nobody counts for
        seen.update(words)
    # Each with probability 1/3: 100 of 300, with a deviation of 8.2.
    assert len(seen) == 6 and all(50 < times < 150 for times in seen.values())


def test_what_is_left_out_does_not_take_a_place():
    rows = np.array([["", "[UNK]", "x"]])
    words, counts = word_counts([rows], Units(), 1, without=["", "[UNK]", None])
    assert dict(zip(words, counts, strict=True)) == {"x": 1.0}


def test_words_of_bytes_text_and_integers():
    assert word_counts([np.array([b"x\xff", b"y"])], Units(), 1)[0] == ["x\ufffd", "y"]
    assert word_counts([np.array([[3, 1], [3, 3]])], Units(), 5)[0] == [1, 3]
    ragged = tf.RaggedTensor.from_row_lengths(["a", "b", "b"], [2, 0, 1])
    words, counts = word_counts([ragged], Units(), 5)
    assert dict(zip(words, counts, strict=True)) == {"a": 1.0, "b": 2.0}


def test_the_order_is_that_of_noisy_counts(monkeypatch):
    noise = {"x": 0.0, "y": 30.0, "z": 0.0}
    monkeypatch.setattr(
        numbers, "released", lambda total, *terms: total + np.array(list(noise.values()))
    )
    values = np.array(["x"] * 120 + ["y"] * 100 + ["z"] * 3)
    data = dp.statistics.PrivateData(dp.accounting.Ledger())
    found = data.vocabulary(values, 1, 1.0, 1e-6)
    assert found.words == ["y", "x"] and found.num_units == 223
    assert data.vocabulary(values, 1, 1.0, 1e-6, size=1).words == ["y"]


# The threshold, and its price.


@pytest.mark.parametrize("most", [1, 7])
def test_a_word_of_one_unit_alone_shows_with_the_probability_that_is_stated(most):
    mechanism = ThresholdedGaussian(0.1)
    threshold = mechanism.threshold(3.0, most)
    each = stats.norm.sf((threshold - 1) / 3.0)
    assert 1 - (1 - each) ** most == pytest.approx(0.1)


def test_secret_words_show_as_rarely_as_is_claimed_and_a_lower_threshold_is_caught():
    """In 2,000 runs: 2.5% are claimed (half of δ = 0.05). Above 4.3% by chance in 1 of 10⁶."""

    def share(lowered):
        shown = 0
        for _ in range(2000):
            ledger = dp.accounting.Ledger()
            data = dp.statistics.PrivateData(ledger)
            found = data.vocabulary(values, 2, 2.0, 0.05)
            level = found.threshold - lowered * found.noise_std
            shown += (
                any(word.startswith("secret") for word in found.words)
                if not lowered
                else (drawn.normal(1, found.noise_std, 2).max() > level)
            )
        return shown / 2000

    drawn = np.random.default_rng(0)
    values = np.array([["usual", "usual"]] * 300 + [["secret1", "secret2"]])
    limit = 0.043
    assert share(0.0) < limit
    assert share(1.0) > limit


def test_a_unit_of_very_many_words_shows_none_of_them_more_often():
    """In 400 runs: 2.5% are claimed. Above 6% by chance in 1 of 10⁴; of 2,000 chances, in most."""
    values = tf.ragged.constant([["usual"]] * 300 + [[f"secret{i}" for i in range(2000)]])
    shown = 0
    for _ in range(400):
        data = dp.statistics.PrivateData(dp.accounting.Ledger())
        found = data.vocabulary(values, 1, 2.0, 0.05)
        shown += any(word.startswith("secret") for word in found.words)
    assert shown < 24


@pytest.mark.parametrize("adjacency", ["add_or_remove_one", "replace_one"])
def test_the_price_is_that_of_the_noise_and_of_a_failure(adjacency):
    ledger = dp.accounting.Ledger()
    data = dp.statistics.PrivateData(ledger, adjacency=adjacency)
    data.vocabulary(np.array(["x"] * 500), 1, 1.0, 1e-5)
    (release,) = ledger.segments[0].releases
    assert release.mechanism == ThresholdedGaussian(5e-6)
    sigma = release.multiplier / (2 if adjacency == "replace_one" else 1)
    oracle = dp_accounting.pld.PLDAccountant().compose(dp_accounting.GaussianDpEvent(sigma))
    alone = oracle.get_epsilon((1e-5 - 5e-6) / (1 - 5e-6))
    assert ledger.epsilon(1e-5) == pytest.approx(alone, rel=1e-3)
    assert ledger.epsilon(1e-5) <= 1.0
    assert np.isinf(ledger.epsilon(4e-6))  # below what the failure alone has


def test_failures_add_up():
    from dp_keras_opt.accounting.loss_distributions import LossDistributionAccountant

    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = LossDistributionAccountant(relation).compose(FailureDpEvent(1e-3), 3)
    accountant.compose(FailureDpEvent(1e-2))
    total = 1 - (1 - 1e-3) ** 3 * (1 - 1e-2)
    assert accountant.get_delta(0.0) == pytest.approx(total)
    assert accountant.get_epsilon(total * 1.001) == 0.0
    assert np.isinf(accountant.get_epsilon(total * 0.999))


def test_other_accountants_say_that_they_cannot_price_a_vocabulary():
    ledger = dp.accounting.Ledger()
    dp.statistics.PrivateData(ledger).vocabulary(np.array(["x"] * 500), 1, 1.0, 1e-5)
    with pytest.raises(ValueError, match="cannot price"):
        ledger.epsilon(1e-5, "rdp")
    assert ledger.statement(1e-5, group_size=2)
