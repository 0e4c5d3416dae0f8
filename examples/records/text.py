"""Definitions of 82,115 nouns: which of 26 topics is each of? A private linear classifier.

    python examples/records/text.py            # goes on where it was interrupted
    python examples/records/text.py --quick    # a minute, to try it out

The definitions are those of WordNet, without their examples; a fifth of them, drawn by seed 0,
tests, and 6,000 of the others are public. One unit of privacy is a definition. See `records.py`
for the rule by which settings are chosen.

A definition is a bag of words. Words are hashed into 16,384 places, so that there is no vocabulary
that could tell of private texts; a word weighs less the more of the *public* definitions have it,
and every bag has length 1, whatever its number of words. The classifier is linear. It begins at
zero, or at what scikit-learn makes of the public definitions alone.

Writes results.csv (all runs), trials.csv, references.csv, text.md and records_text.png.
"""

import functools
import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import records
import results
from example_data import nouns
from scipy import sparse
from sklearn.feature_extraction.text import HashingVectorizer, TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import normalize

import dp_keras_opt as dp

EPSILONS = [0.5, 1.0, 2.0, 3.0, 4.0, 8.0]
COMPARED = (1, 3, 8)  # at which other methods are trained, too
DELTA = 1e-5
PUBLIC, FOLDS = 6_000, 4
TOPICS, PLACES, WORDS = 26, 2**14, 32  # of a definition's words, the first 32 in order of place
STEPS, GROUPS = 60, 4  # each definition is in every fourth batch: at a fixed ε, large batches pay
SPACE = {"learning_rate": (10.0, 200.0), "clip_norm": (0.1, 1.0), "power": (0.2, 0.5)}
BEGUN = f"{records.OURS}, begun at the public model"
TEXTBOOK = "DPSGD, lots of 1,024, 5 epochs, rate 1, C = 1"
MAJORITY = "the most frequent topic of the public definitions"
PUBLIC_ALONE = "scikit-learn, public definitions alone"
ALL, ALL_PAIRS = "scikit-learn, all, words", "scikit-learn, all, words and pairs"
TOKENS = {"token_pattern": r"\b\w+\b"}


class Bags:
    """Bags of words in the form that an `Embedding` takes: places, and weights.

    Args:
        texts: all definitions.
        public: those of them that say how common a word is.
    """

    def __init__(self, texts, public):
        hashing = HashingVectorizer(
            n_features=PLACES, alternate_sign=False, norm=None, binary=True, **TOKENS
        )
        self._counts = hashing.transform(texts)
        public = hashing.transform(public)
        self._frequency = np.asarray(public.mean(axis=0)).ravel() + 1 / public.shape[0]

    @functools.lru_cache(maxsize=1)  # noqa: B019 (there is one instance)
    def weighted(self, power):
        """A sparse matrix of rows of length 1."""
        return normalize(self._counts @ sparse.diags_array(self._frequency**-power)).tocsr()

    def padded(self, power, rows):
        """{"places": int32, "weights": float32}, both (len(rows), WORDS)."""
        bags = self.weighted(power)[rows]
        row = np.repeat(np.arange(len(rows)), np.diff(bags.indptr))
        rank = np.arange(bags.nnz) - bags.indptr[row]
        kept = rank < WORDS
        places, weights = (np.zeros((len(rows), WORDS), kind) for kind in ("int32", "float32"))
        places[row[kept], rank[kept]] = bags.indices[kept]
        weights[row[kept], rank[kept]] = bags.data[kept]
        return {"places": places, "weights": weights}


def load(path, quick=False):
    """(texts, topics), and the places of the test, public and private definitions."""
    texts, topics = nouns(path)
    order = np.random.default_rng(0).permutation(len(texts))
    if quick:
        order = order[: 5 * PUBLIC]
    test, train = np.split(order, [len(order) // 5])
    public, private = records.public_and_private(len(train), min(PUBLIC, len(train) // 2))
    return texts, topics, {"test": test, "public": train[public], "private": train[private]}


@functools.cache
def noise(rows, epsilon):
    """The noise multiplier of the private training."""
    sampling = dp.accounting.Sampling.cyclic_poisson(rows, rows // GROUPS, GROUPS)
    optimizer = planned(1.0, 1.0, None, rows)
    return dp.accounting.calibrate(optimizer, sampling, STEPS, epsilon, DELTA)


def planned(rate, clip_norm, noise_multiplier, rows):
    """Momentum with correlated noise, and the average of the second half of the steps."""
    return dp.optimizers.DPSGD(
        rate / clip_norm,  # so the rate hardly depends on C
        momentum=0.9,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        noise=dp.noise.Planned(horizon=STEPS / 8),
        batch_size=rows // GROUPS,
        average_from=STEPS // 2,
    )


def classifier():
    """A linear one that begins at zero."""
    inputs = {
        "places": keras.Input((WORDS,), dtype="int32", name="places"),
        "weights": keras.Input((WORDS,), name="weights"),
    }
    rows = keras.layers.Embedding(PLACES, TOPICS, embeddings_initializer="zeros")
    return dp.DPModel(inputs, keras.layers.Dot(1)([inputs["weights"], rows(inputs["places"])]))


def public_weights(bags, y):
    """(PLACES, TOPICS) of a classifier that has seen public definitions only."""
    model = LogisticRegression(C=10.0, tol=1e-3, max_iter=200, fit_intercept=False).fit(bags, y)
    weights = np.full((TOPICS, PLACES), model.coef_.min(axis=0))  # topics that it has not seen
    weights[model.classes_] = model.coef_
    return weights.T


def accuracy(logits, y):
    """In percent."""
    return 100 * float(np.mean(np.argmax(logits, axis=1) == y))


def trained(data, train, test, epsilon, values, seed, private_rows, method=records.OURS):
    """The accuracy of one private training, and the ε that it has spent.

    Args:
        data: (bags, topics, places of the public definitions).
        train, test: places of definitions.
        epsilon: of a training on `private_rows` definitions; on fewer, the noise relative to the
            batch is as there.
        values: learning rate times clip norm, clip norm, and power of the word weights.
        seed: of Keras; the noise and the batches stay unpredictable.
        method: which of those in the table.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    bags, topics, public = data
    x = bags.padded(values["power"], train), topics[train]
    model = classifier()
    if method == BEGUN:
        start = public_weights(bags.weighted(values["power"])[public], topics[public])
        model.set_weights([start])
    if method == TEXTBOOK:
        size, steps = 1_024, 5 * len(train) // 1_024
        batches = dp.data.poisson_batches(x, size, steps, unit="definition")
        optimizer = dp.optimizers.DPSGD(1.0, clip_norm=1.0, batch_size=size)
        dp.accounting.calibrate(optimizer, batches, epochs=1, epsilon=epsilon, delta=DELTA)
    else:
        size = len(train) // GROUPS
        batches = dp.data.cyclic_poisson(x, size, GROUPS, STEPS, unit="definition")
        sigma = noise(private_rows, epsilon) * size / (private_rows // GROUPS)
        optimizer = planned(values["learning_rate"], values["clip_norm"], sigma, len(train))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(batches, verbose=0)
    (weights,) = model.get_weights()
    found = {"score": accuracy(bags.weighted(values["power"])[test] @ weights, topics[test])}
    if len(train) == private_rows:
        found["spent"] = model.ledger.epsilon(DELTA)
    return found


def reference(texts, topics, parts, method):
    """The accuracy of what has no privacy, or needs none."""
    test = parts["test"]
    if method == MAJORITY:
        topic = np.bincount(topics[parts["public"]]).argmax()
        return {"score": 100 * float(np.mean(topics[test] == topic))}
    train, ngrams = parts["public"], 1
    if method != PUBLIC_ALONE:
        train, ngrams = np.concatenate([parts["public"], parts["private"]]), 2 - (method == ALL)
    tf_idf = TfidfVectorizer(ngram_range=(1, ngrams), min_df=ngrams, sublinear_tf=True, **TOKENS)
    x = tf_idf.fit_transform(texts[train])
    model = LogisticRegression(C=10.0, tol=1e-3, max_iter=200).fit(x, topics[train])
    return {"score": 100 * model.score(tf_idf.transform(texts[test]), topics[test])}


def references_table(rows):
    """A row a reference."""
    lines = ["| not private | accuracy, % |", "| --- | --- |"]
    lines += [f"| {row['method']} | {float(row['score']):.1f} |" for row in rows]
    return "\n".join(lines) + "\n"


def main():
    parser = records.options(__doc__, "text", EPSILONS)
    parser.set_defaults(trials=8 * len(SPACE))
    parser.add_argument("--data", help="WordNet's data.noun")
    options = parser.parse_args()
    if options.quick:
        options.epsilons, options.trials, options.seeds = [3.0], 1, 2
        options.output = options.output / "quick"
    texts, topics, parts = load(options.data, options.quick)
    data = Bags(texts, texts[parts["public"]]), topics, parts["public"]
    every = np.concatenate([parts["public"], parts["private"]])

    def trial(epsilon, values, fold):
        train, test = records.fold_of(parts["public"], fold, FOLDS)
        return trained(data, train, test, epsilon, values, fold, len(parts["private"]))["score"]

    def on_test(epsilon, values, fold):
        return trained(data, every, parts["test"], epsilon, values, fold, len(every))["score"]

    settings = dp.tuning.Candidate("text", dp.optimizers.DPSGD, SPACE).draw(options.trials)
    by_public = records.chosen(
        options.output / "trials.csv", trial, options.epsilons, settings, FOLDS
    )
    compared = [epsilon for epsilon in options.epsilons if epsilon in COMPARED]
    by_test = records.chosen(options.output / "trials-on-test.csv", on_test, compared, settings, 1)

    def run(method, epsilon, seed):
        values = (by_test if method == records.BY_TEST else by_public)[epsilon]
        if method == TEXTBOOK:
            values = {"power": 0.0}
        train = every if method == records.BY_TEST else parts["private"]
        found = trained(data, train, parts["test"], epsilon, values, seed, len(train), method)
        return {"values": json.dumps(values)} | found

    keys = [(method, epsilon, seed)
            for method in (records.OURS, BEGUN, TEXTBOOK, records.BY_TEST)
            for epsilon in (options.epsilons if method in (records.OURS, BEGUN) else compared)
            for seed in range(options.seeds)]  # fmt: skip
    rows = results.completed(
        options.output / "results.csv", ("method", "epsilon", "seed"), keys, run
    )
    known = results.completed(
        options.output / "references.csv", ("method",),
        [(method,) for method in (MAJORITY, PUBLIC_ALONE, ALL, ALL_PAIRS)],
        lambda method: reference(texts, topics, parts, method),
    )  # fmt: skip
    page = f"{records.table(rows)}\n{references_table(known)}"
    (options.output / "text.md").write_text(page, encoding="utf-8")
    records.picture(
        rows, "text", "accuracy on test definitions, %", options.output / "records_text.png",
        "Topics of 82,115 nouns by their definitions",
    )  # fmt: skip
    print(page)


if __name__ == "__main__":
    main()
