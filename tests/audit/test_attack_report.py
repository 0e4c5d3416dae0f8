"""Attack reports: figures by hand and by scikit-learn, coverage of the intervals, whole models."""

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats
from sklearn import metrics

import dp_keras_opt as dp
from dp_keras_opt import audit


def of_scores(members, others, **options):
    """The report on given scores: no model is asked."""
    examples = None, None
    return audit.attack_report(None, *examples, scores={"mine": (members, others)}, **options)


# Figures.


def test_figures_by_hand():
    # Ten others 0…9; a rate of 0.2 allows two above, 8 and 9, so that the threshold is 7.
    members, others = [6.5, 7.0, 7.5, 20.0], np.arange(10.0)
    (found,) = of_scores(members, others, false_positive_rates=(0.2, 0.1)).results
    rate = found.rates[0]
    assert (rate.threshold, rate.false_positives, rate.true_positives) == (7.0, 2, 2)
    assert rate.true_positive_rate == 0.5
    # Clopper and Pearson for 2 of 4: the p where P[X ≥ 2] and P[X ≤ 2] are 0.025.
    low, high = rate.interval
    assert stats.binom.sf(1, 4, low) == pytest.approx(0.025)
    assert stats.binom.cdf(2, 4, high) == pytest.approx(0.025)
    # The true rate of false positives: P[Binomial(10, limit) ≤ 2] = 0.05.
    assert stats.binom.cdf(2, 10, rate.false_positive_limit) == pytest.approx(0.05)
    assert found.rates[1].threshold == 8.0
    # Pairs won: 7 of 10, 7.5 (a tie with 7.0), 8, 10.
    assert found.auc == pytest.approx((7 + 7.5 + 8 + 10) / 40)
    # "≥ 6.5" finds all members, and 3 of the ten others.
    assert found.advantage == pytest.approx(0.7)
    assert (found.members, found.others, found.score, found.slice) == (4, 10, "mine", "all")


def test_ties_never_exceed_the_rate():
    others, members = np.repeat([0.0, 1.0], [90, 10]), np.repeat([0.0, 1.0], [50, 50])
    (found,) = of_scores(members, others, false_positive_rates=(0.05, 0.1)).results
    assert [rate.false_positives for rate in found.rates] == [0, 10]
    assert [rate.true_positive_rate for rate in found.rates] == [0.0, 0.5]
    # 0.1 · 30 is not 3 in floating point, and three are allowed.
    (found,) = of_scores(np.arange(30), np.arange(30), false_positive_rates=(0.1,)).results
    assert found.rates[0].false_positives == 3


def test_curve_area_and_advantage_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    members, others = rng.normal(0.5, 1, 300).round(1), rng.normal(0, 1, 200).round(1)
    (found,) = of_scores(members, others, false_positive_rates=(0.1,)).results
    truth = np.repeat([1, 0], [300, 200])
    false, true, _ = metrics.roc_curve(
        truth, np.concatenate([members, others]), drop_intermediate=False
    )
    np.testing.assert_allclose(found.roc[0], false)
    np.testing.assert_allclose(found.roc[1], true)
    assert found.auc == pytest.approx(metrics.auc(false, true))
    assert found.advantage == pytest.approx(np.max(true - false))
    assert found.advantage == pytest.approx(
        stats.ks_2samp(members, others, alternative="less").statistic
    )


@pytest.mark.parametrize("kind", ["shift", "few are memorised", "blind", "all are found"])
@pytest.mark.parametrize("sizes", [(60, 60), (30, 300)])
def test_intervals_cover_as_often_as_they_say(kind, sizes):
    rng, repetitions = np.random.default_rng(0), 400

    def draw(n):
        z = rng.normal(size=n)
        return {
            "shift": z + 1,
            "few are memorised": np.where(rng.random(n) < 0.2, z + 8, z),
            "blind": z,
            "all are found": z + 9,
        }[kind]

    auc = {"shift": stats.norm.cdf(1 / math.sqrt(2)), "few are memorised": 0.8 * 0.5 + 0.2,
           "blind": 0.5, "all are found": 1.0}[kind]  # fmt: skip
    advantage = {"shift": 2 * stats.norm.cdf(0.5) - 1, "few are memorised": 0.2, "blind": 0.0,
                 "all are found": 1.0}[kind]  # fmt: skip
    missed = np.zeros(4, int)
    for _ in range(repetitions):
        (found,) = of_scores(draw(sizes[0]), rng.normal(size=sizes[1]),
                             false_positive_rates=(0.1,)).results  # fmt: skip
        (rate,) = found.rates
        above = stats.norm.sf(rate.threshold - np.array([0.0, 1.0, 8.0, 9.0]))
        true = {"shift": above[1], "few are memorised": 0.8 * above[0] + 0.2 * above[2],
                "blind": above[0], "all are found": above[3]}[kind]  # fmt: skip
        missed += [
            not found.auc_interval[0] <= auc + 1e-6 or auc - 1e-6 > found.auc_interval[1],
            not found.advantage_interval[0] - 1e-4 <= advantage <= found.advantage_interval[1],
            not rate.interval[0] <= true <= rate.interval[1] + 1e-12,
            above[0] > rate.false_positive_limit,
        ]
    # Each misses in at most 5%, 20 of 400: 35 and more come once in a thousand tests.
    assert (missed < 35).all(), missed
    if kind == "shift" and sizes == (60, 60):  # the limit on false alarms is exact
        assert missed[3] > 5


# Models.


def overfitted(x, y, private=False, epochs=60):
    """A classifier that learns random labels by heart, or its private twin."""
    inputs = keras.Input((20,))
    outputs = keras.layers.Dense(3)(keras.layers.Dense(64, activation="relu")(inputs))
    if private:
        model = dp.DPModel(inputs, outputs)
        optimizer = dp.optimizers.DPAdam(
            1e-2, clip_norm=1.0, noise_multiplier=8.0, batch_size=100, seed=0
        )
    else:
        model, optimizer = keras.Model(inputs, outputs), keras.optimizers.Adam(1e-2)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    if private:
        model.fit(dp.data.poisson_batches((x, y), 100, 4, seed=0), epochs=10, verbose=0)
    else:
        model.fit(x, y, epochs=epochs, verbose=0)
    return model


@pytest.fixture(scope="module")
def halves():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(800, 20)).astype("float32"), rng.integers(0, 3, 800)
    return (x[:400], y[:400]), (x[400:], y[400:])


@pytest.fixture(scope="module")
def learned(halves):
    keras.utils.set_random_seed(0)
    return overfitted(*halves[0])


@pytest.mark.filterwarnings("ignore:A noise seed", "ignore:poisson_batches got seed")
def test_a_model_that_overfits_leaks_and_its_private_twin_does_not(halves, learned):
    keras.utils.set_random_seed(0)
    private = overfitted(*halves[0], private=True)
    scores = ["loss", "confidence"]
    leak = audit.attack_report(learned, *halves, scores=scores, false_positive_rates=(0.01, 0.1))
    safe = audit.attack_report(
        private, *halves, scores=[*scores, "gradient_norm"], false_positive_rates=(0.01, 0.1)
    )
    for found in leak.results:
        assert found.auc_interval[0] > 0.8 and found.advantage_interval[0] > 0.5
        assert found.rates[1].interval[0] > 1.5 * found.rates[1].false_positive_limit
    assert leak.results[0].auc == pytest.approx(leak.results[1].auc, abs=1e-3)
    for found in safe.results:
        assert found.auc_interval[0] < 0.5 < found.auc_interval[1]
        assert found.rates[0].interval[0] < found.rates[0].false_positive_limit
        # No attack on one example exceeds what the ledger allows all of them.
        most = private.ledger.risk().true_positive_rate(found.rates[1].false_positive_limit)
        assert found.rates[1].interval[0] < most


def test_scores_are_those_of_keras(halves, learned):
    x, y = (part[:7] for part in halves[1])
    given = {}

    def mine(model, x, y):
        given["rows"] = given.get("rows", 0) + len(x)
        return -keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)

    report = audit.attack_report(
        learned, halves[0], (x, y), scores={"loss": "loss", "mine": mine},
        false_positive_rates=(0.5,), batch_size=3,
    )  # fmt: skip
    assert given["rows"] == 407
    thresholds = [found.rates[0].threshold for found in report.results]
    logits = learned.predict(x, verbose=0).astype(float)
    true = np.take_along_axis(logits, y[:, None], 1)[:, 0]
    losses = np.log(np.exp(logits).sum(axis=1)) - true
    np.testing.assert_allclose(thresholds, np.sort(-losses)[3], rtol=1e-4)  # 3 of 7 lie above


def test_slices_show_who_is_exposed(halves, learned):
    (x, y), others = halves
    known = np.arange(400) < 100
    # Members of one group were never trained on.
    mixed = np.where(known[:, None], others[0], x), np.where(known, others[1], y)
    fresh = others[0][::-1], others[1][::-1]
    groups = np.where(known, "left out", "learned")
    report = audit.attack_report(
        learned, mixed, fresh, slices={"group": (groups, groups)}, false_positive_rates=(0.005, 0.1)
    )
    everyone, learned_, left_out = report.results
    assert [found.slice for found in report.results] == [
        "all", "group=learned", "group=left out"
    ]  # fmt: skip
    assert (learned_.members, left_out.others) == (300, 100)
    assert learned_.auc > 0.85 and left_out.auc_interval[0] < 0.5 < left_out.auc_interval[1]
    assert left_out.auc < everyone.auc < learned_.auc
    assert len(everyone.rates) == 2 and len(left_out.rates) == 1
    assert "needs 200 others" in str(report)


@pytest.mark.parametrize("shape", ["numbers", "column", "one-hot"])
def test_slices_by_class(halves, learned, shape):
    def as_targets(y):
        return {"numbers": y, "column": y[:, None].astype("float32"), "one-hot": np.eye(3)[y]}[
            shape
        ]

    sides = [(x, as_targets(y)) for x, y in halves]
    report = audit.attack_report(
        learned, *sides, scores="confidence", slices="class", false_positive_rates=(0.1,)
    )
    assert [found.slice for found in report.results] == ["all", *(f"class={c}" for c in range(3))]
    assert [found.members for found in report.results[1:]] == np.bincount(halves[0][1]).tolist()
    assert report.results[1].auc > 0.8


def test_a_reference_takes_away_what_is_easy_for_every_model():
    rng = np.random.default_rng(0)
    easy = rng.normal(size=600) * 10  # of examples, whoever learned them
    learned_ = np.arange(600) < 300
    x = np.stack([easy, np.where(learned_, 1.0, 0.0) + 0.1 * rng.normal(size=600)], axis=1)

    class Sum(keras.Model):
        def __init__(self, weights):
            super().__init__()
            self.of = weights

        def call(self, x):
            return tf.reduce_sum(x * self.of, axis=1, keepdims=True)

    model, reference = Sum([1.0, 1.0]), Sum([1.0, 0.0])

    def output(model, x, y):
        return model(x)[:, 0]

    sides = [(x[mask], np.zeros(300)) for mask in (learned_, ~learned_)]
    options = {"scores": output, "false_positive_rates": (0.1,)}
    alone = audit.attack_report(model, *sides, **options).results[0]
    beside = audit.attack_report(model, *sides, reference=reference, **options).results[0]
    assert alone.auc < 0.6 and beside.auc > 0.99


def test_a_loaded_model_and_batches_from_a_data_set(halves, learned, tmp_path):
    learned.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    sides = [tf.data.Dataset.from_tensor_slices(half).batch(64) for half in halves]
    options = {"scores": ["loss", "confidence"], "false_positive_rates": (0.1,), "slices": "class"}
    expected = audit.attack_report(learned, *halves, **options)
    assert audit.attack_report(loaded, *sides, **options) == expected

    class InTwo(keras.utils.PyDataset):
        def __init__(self, half):
            super().__init__()
            self.half = half

        num_batches = 2

        def __getitem__(self, i):
            return tuple(part[200 * (i % 2) :][:200] for part in self.half)

    assert audit.attack_report(loaded, *map(InTwo, halves), **options) == expected


def test_strings_as_inputs_several_outputs_and_sequences():
    words = np.array(["a b", "b c", "c a", "a a"] * 10)
    vectorize = keras.layers.TextVectorization(output_sequence_length=2, vocabulary=["a", "b", "c"])
    inputs = keras.Input((), dtype="string")
    tokens = keras.layers.Embedding(6, 4, mask_zero=True)(vectorize(inputs))
    next_ = keras.layers.Dense(6, activation="softmax", name="next")(
        keras.layers.LSTM(4, return_sequences=True)(tokens)
    )
    size = keras.layers.Dense(1, name="size")(keras.layers.LSTM(3)(tokens))
    model = keras.Model(inputs, {"next": next_, "size": size})
    model.compile(
        loss={"next": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"next": 1.0, "size": 2.0},
    )
    y = {"next": np.tile([[2, 3]], (40, 1)), "size": np.ones((40, 1))}
    half = tf.nest.map_structure(lambda part: part[:20], y)
    report = audit.attack_report(
        model, (words[:20], half), (words[20:], half), false_positive_rates=(0.5,), batch_size=8
    )
    outputs = model.predict(tf.constant(words[:4]), verbose=0)
    # All of the words are known, so that nothing is masked.
    expected = [
        -np.log(outputs["next"][i, [0, 1], [2, 3]]).mean() + 2 * (outputs["size"][i, 0] - 1) ** 2
        for i in range(4)
    ]
    # 20 others, five of each kind; ten may lie above: the third smallest loss, or a tie with it.
    assert report.results[0].rates[0].threshold == pytest.approx(-np.sort(expected)[2], rel=1e-4)
    assert report.results[0].auc == 0.5


def test_the_loss_of_an_objective_without_targets():
    def far(inputs, targets, outputs, intermediates):
        return tf.reduce_sum((inputs - outputs) ** 2, axis=1) + intermediates["code"][:, 0]

    inputs = keras.Input((4,))
    code = keras.layers.Dense(2, name="code")(inputs)
    model = dp.DPModel(inputs, keras.layers.Dense(4)(code))
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=5)
    model.compile(optimizer, dp.Objective(far, intermediates=["code"]))
    x = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
    report = audit.attack_report(
        model, (x[:5], None), (x[5:], None), false_positive_rates=(0.2,), batch_size=3
    )
    expected = [
        ((row - model(row[None])[0]) ** 2).numpy().sum() + model.get_layer("code")(row[None])[0, 0]
        for row in x[5:]
    ]
    # One of five may lie above: the threshold is that of the second smallest loss.
    threshold = report.results[0].rates[0].threshold
    assert threshold == pytest.approx(-float(np.sort(expected)[1]), rel=1e-4)


def test_confidence_of_classifiers():
    p = np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [1.0, 0.0, 0.0]])
    expected = [math.log(0.2 / 0.8), math.log(0.8 / 0.2)]

    class Given(keras.Model):
        def call(self, x):
            return x

    def found(outputs, y, loss=None):
        model = Given()
        if loss:
            model.compile(loss=loss)
        return audit.attack_report(
            model, (outputs, y), (outputs, y), scores="confidence", false_positive_rates=(0.5,)
        ).results[0].rates[0].threshold  # fmt: skip

    for i, (row, label) in enumerate([(p[0], 1), (p[1], 2)]):
        two = [[row, row], [label, label]]
        assert found(*map(np.array, two)) == pytest.approx(expected[i], rel=1e-5)
        logits = np.log(np.array([row, row])) + 3.0
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        assert found(logits, np.array([label, label]), loss) == pytest.approx(expected[i], rel=1e-4)
    # Certainty is finite, and above all else; so is a probability of 0, below.
    assert 50 < found(p[[2, 2]], np.array([0, 0])) < math.inf
    assert -math.inf < found(p[[2, 2]], np.array([1, 1])) < -50
    # Two classes, one output.
    one = np.array([[0.9], [0.9]])
    assert found(one, np.array([1, 1])) == pytest.approx(math.log(9), rel=1e-5)
    assert found(one, np.array([0, 0])) == pytest.approx(-math.log(9), rel=1e-5)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    assert found(np.array([[1.5], [1.5]]), np.array([[0], [0]]), loss) == pytest.approx(-1.5)
    # Not classifiers, and logits that nobody called so.
    for outputs, y in ((np.zeros((2, 3, 4)), [0, 1]), (p[:2], [0, 7]), (p[:2], [[1, 1, 0]] * 2)):
        with pytest.raises(ValueError, match="for a classifier"):
            found(outputs, np.array(y))
    with pytest.raises(ValueError, match="from_logits=True"):
        found(np.array([[3.0, -1.0], [2.0, 0.5]]), np.array([0, 1]))


# Reports.


def test_the_report_says_what_it_is(halves, learned):
    report = audit.attack_report(
        learned, *halves, slices="class", false_positive_rates=(0.005, 0.1), confidence=0.9
    )
    text, card = str(report), report.to_markdown()
    for shown in (text, card):
        assert shown.startswith("Attack result: proves no ε.") and "0.9" in shown
        assert "class=2" in shown and "TPR at FPR 0.005" in shown and "without noise" in shown
    assert card.count("\n|") == 2 + 4  # head, rule, four slices
    content = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert content["what"] == "Attack result: proves no ε."
    assert content["results"][0]["rates"][1]["interval"] == list(
        report.results[0].rates[1].interval
    )
    assert "roc" not in content["results"][0]
    infinite = of_scores([1.0, math.inf], [-math.inf] * 4, false_positive_rates=(0.25,))
    assert json.loads(json.dumps(infinite.to_dict(), allow_nan=False))["results"][0]["auc"] == 1.0
    assert (
        "a\\|b=1"
        in of_scores(
            [1, 2], [1, 2], slices={"a|b": ([1, 1], [1, 1])}, false_positive_rates=(0.5,)
        ).to_markdown()
    )


def test_the_picture(halves, learned):
    report = audit.attack_report(learned, *halves, slices="class", false_positive_rates=(0.1,))
    axes = report.plot()
    curve, blind = axes.lines
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert curve.get_label() == "loss" and blind.get_label() == "blind guess"
    np.testing.assert_allclose(curve.get_ydata()[-1], 1.0)
    np.testing.assert_array_equal(blind.get_xdata(), blind.get_ydata())
    labels = [line.get_label() for line in report.plot(["class=0", "class=1"]).lines]
    assert labels == ["loss, class=0", "loss, class=1", "blind guess"]
    with pytest.raises(ValueError, match="class=7"):
        report.plot(["class=7"])
    with pytest.raises(ValueError, match="nothing to draw"):
        dp.plots.roc({})


# What is refused.


@pytest.mark.parametrize(
    "options, message",
    [
        ({"scores": {"a": (np.ones(5), np.ones(9)), "b": (np.ones(5), np.ones(8))}}, "same mem"),
        ({"scores": {"a": (np.zeros((5, 1)), np.zeros(9))}}, r"shape \(5, 1\)"),
        ({"scores": {"a": (np.zeros(0), np.zeros(9))}}, "at least one"),
        ({"scores": {"a": (np.array([0, np.nan]), np.zeros(9))}}, "NaN for 1 of the members"),
        ({"scores": {"a": (np.array(["x", "y"]), np.zeros(9))}}, "real numbers"),
        ({"scores": {"a": 3.0}}, "neither a name"),
        ({"scores": {}}, "nothing to attack"),
        ({"scores": "accuracy"}, "no score 'accuracy'"),
        ({"scores": "loss"}, "need a model"),
        ({"false_positive_rates": (0.1, 0.001)}, "0.001 needs at least 1000 others; there are 20"),
        ({"false_positive_rates": (0.0,)}, "between 0 and 1"),
        ({"confidence": 1.0}, "between 0 and 1"),
        ({"slices": {"g": ([0] * 9 + [1], [0] * 20)}}, "g=1 has 1 members and 0 others"),
        ({"slices": {"g": ([0] * 9, [0] * 20)}}, "one value for each of the 10 members"),
        ({"slices": {"g": [0] * 9}}, "pair of arrays"),
    ],
)  # fmt: skip
def test_what_cannot_be_reported_is_refused(options, message):
    given = {"scores": {"mine": (np.arange(10), np.arange(20))}, "false_positive_rates": (0.1,)}
    with pytest.raises(ValueError, match=message):
        audit.attack_report(None, None, None, **(given | options))


def test_models_that_cannot_be_attacked_so_are_refused(halves, learned):
    inputs = keras.Input((20,))
    bare = keras.Model(inputs, keras.layers.Dense(3)(inputs))
    rates = {"false_positive_rates": (0.1,)}
    with pytest.raises(ValueError, match=r"model.compile\(loss="):
        audit.attack_report(bare, *halves, **rates)
    with pytest.raises(TypeError, match="make_private"):
        audit.attack_report(learned, *halves, scores="gradient_norm", **rates)
    with pytest.raises(ValueError, match=r"one number per example, \(256,\)"):
        audit.attack_report(learned, *halves, scores=lambda model, x, y: model(x), **rates)
    with pytest.raises(ValueError, match="same number of rows"):
        audit.attack_report(learned, (halves[0][0], halves[0][1][:5]), halves[1], **rates)
    with pytest.raises(ValueError, match="iterable of such batches"):
        audit.attack_report(learned, halves[0][0], halves[1], **rates)
    with pytest.raises(ValueError, match="the examples themselves"):
        audit.attack_report(learned, dp.data.poisson_batches(halves[0], 10), halves[1], **rates)
    with pytest.raises(ValueError, match="gave no batch"):
        audit.attack_report(learned, halves[0], [], **rates)
    with pytest.raises(ValueError, match="one class per example"):
        audit.attack_report(
            learned, *[(x, np.tile(y[:, None], (1, 2))) for x, y in halves],
            scores=lambda model, x, y: x[:, 0], slices="class", **rates,
        )  # fmt: skip
