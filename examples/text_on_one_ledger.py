"""A text classifier of whose private data nothing is told outside of its ledger.

    python examples/text_on_one_ledger.py              # ε = 3, some minutes
    python examples/text_on_one_ledger.py --epsilon 1
    python examples/text_on_one_ledger.py --quick      # one epoch, to try it out

Of 29,555 sentences of the King James Bible each is from the Old or from the New Testament; the
privacy unit is one sentence. What is computed from sentences, and what each of it may cost of the
budget for those that train:

- the vocabulary of `TextVectorization`, and mean and variance of the length of a sentence: a tenth
  each;
- the training, at a clip norm that finds itself: the rest;
- accuracy and AUC after each epoch, on sentences that do not train and have a budget of their own.
  They stop the training, choose the epoch that is kept, and are the published curve;
- accuracy and AUC of the model that was kept, on further sentences that are used for nothing else.

Which part a sentence is in is drawn for each alone, so that none of them depends on the others.
Writes to output/text_on_one_ledger: curve.png, and the statement.
"""

import argparse
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import matplotlib

matplotlib.use("Agg")
import numpy as np
from example_data import testaments

import dp_keras_opt as dp

DELTA = 1e-6
UNIT = "sentence"
WORDS = 3000  # of the vocabulary, at most
WORDS_PER_SENTENCE = 15  # that a sentence counts for, at most
MOST_LENGTH = 80  # words; what a sentence of usual length has at most


def parts(seed):
    """Sentences to train, to validate and to test with: {name: (texts, labels)}."""
    texts, labels = testaments()
    drawn = np.random.default_rng(seed).random(len(texts))
    chosen = np.searchsorted([0.8, 0.9], drawn)  # each sentence by itself
    return {
        name: (texts[chosen == place], np.float32(labels[chosen == place])[:, None])
        for place, name in enumerate(("train", "validation", "test"))
    }


def lengths(texts):
    """How many words each text has."""
    return np.float32([len(text.split()) for text in texts])[:, None]


def build(texts, private, epsilon):
    """A model whose vocabulary and normalization are released for `epsilon` each."""
    vectorize = keras.layers.TextVectorization(max_tokens=WORDS, output_mode="multi_hot")
    dp.statistics.adapt_privately(
        vectorize, texts, private, epsilon, DELTA / 10, most_per_unit=WORDS_PER_SENTENCE
    )
    normalize = keras.layers.Normalization()
    dp.statistics.adapt_privately(
        normalize, lengths(texts), private, epsilon, DELTA / 10, bounds=(0, MOST_LENGTH)
    )
    text = keras.Input((), dtype="string", name="text")
    length = keras.Input((1,), name="length")
    x = keras.layers.Concatenate()([vectorize(text), normalize(length)])
    output = keras.layers.Dense(1, "sigmoid", kernel_initializer="zeros", name="is_new")(x)
    print(f"{vectorize.vocabulary_size()} words, the first of them: "
          + " ".join(vectorize.get_vocabulary()[1:9]))  # fmt: skip
    return dp.DPModel({"text": text, "length": length}, output)


def features(texts):
    return {"text": texts, "length": lengths(texts)}


def train(model, data, options):
    """Trains within the budget, until the private accuracy rises no more."""
    # The classes are of unequal size, and most sentences of the larger one are soon told: with a
    # lower quantile C would follow their gradients down to nothing.
    optimizer = dp.optimizers.DPSGD(
        options.learning_rate, momentum=0.9, clip_norm=dp.clipping.Quantile(0.9)
    )
    model.compile(optimizer, "binary_crossentropy")
    texts, labels = data["train"]
    batches = dp.data.poisson_batches(
        (features(texts), labels), options.batch_size, len(texts) // options.batch_size, unit=UNIT
    )
    texts, labels = data["validation"]
    validation = dp.callbacks.PrivateValidation(
        (features(texts), labels), ["accuracy", "auc"], options.epsilon, DELTA,
        disjoint_from_training=True,
    )  # fmt: skip
    return validation, fit(model, batches, validation, "private_accuracy", "max", options)


def fit(model, batches, validation, monitor, mode, options):
    """Trains until the budget is spent or a private score gets no better; returns the report."""
    report = dp.callbacks.PrivacyReport(DELTA)
    stop = keras.callbacks.EarlyStopping(monitor, mode=mode, patience=3, restore_best_weights=True)
    budget = dp.callbacks.PrivacyBudget(options.epsilon, DELTA)
    callbacks = [budget, report, validation, stop]
    model.fit(batches, epochs=options.epochs, callbacks=callbacks, verbose=2)
    return report


def publish(scores, validation, report, output):
    """Prints the scores of the test data, and writes the curve and the statement."""
    for name, score in scores.items():
        print(f"test {name}: {score.value:.4f} ± {score.noise_std:.4f}")
    curve = dp.plots.training_curve(validation)
    curve.figure.savefig(output / "curve.png", dpi=150)
    statement = report.statement()
    (output / "statement.txt").write_text(statement, encoding="utf-8")
    print("\n" + statement)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=3.0, help="of each part of the data")
    parser.add_argument("--epochs", type=int, default=20, help="at most (default 20)")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=0.3)
    parser.add_argument("--quick", action="store_true", help="one epoch, to try it out")
    parser.add_argument("--seed", type=int, default=0, help="of the parts and the first weights")
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("output", "text_on_one_ledger")
    )
    options = parser.parse_args()
    if options.quick:
        options.epochs = 1
    return options


def main():
    options = arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(options.seed)  # the noise stays unpredictable
    data = parts(options.seed)
    print({name: len(texts) for name, (texts, _) in data.items()})

    ledger = dp.accounting.Ledger()
    private = dp.statistics.PrivateData(ledger, unit=UNIT)
    model = build(data["train"][0], private, options.epsilon / 10)
    model.ledger = ledger
    validation, report = train(model, data, options)

    texts, labels = data["test"]
    tested = dp.statistics.PrivateData(model.ledger, unit=UNIT, data_set="test")
    scores = dp.statistics.evaluate(
        model, (features(texts), labels), ["accuracy", "auc"], tested, options.epsilon, DELTA
    )
    publish(scores, validation, report, options.output)


if __name__ == "__main__":
    main()
