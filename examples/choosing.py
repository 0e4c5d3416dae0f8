"""Which optimizer? Ten of them on ten tasks, at three budgets: the evidence of a page.

    python examples/choosing.py                          # everything; hours, goes on if interrupted
    python examples/choosing.py --tasks tabular --epsilons 3
    python examples/choosing.py --quick                  # a minute, to try it out

The tasks: ratings of films (MovieLens-100k, matrix factorization), pictures of clothes
(Fashion-MNIST, a small convolutional network), English prose (a Transformer that predicts the next
character), and visits to a doctor (the RAND health insurance experiment, a table), each in 120 to
200 steps and in 1,000 or more. Then two for which nothing was designed: definitions of nouns
(WordNet, a bag of words) and incomes (Adult, a linear model). 1% of the training examples of the
first four are declared public, for optimizers that need such data, and are in no private batch of
any. See `dp_keras_opt.tuning.compare` for the protocol: settings are searched for at each ε, by as
many trials for each hyper-parameter, and a learning rate that is best at an end of its range is
followed further.

Writes results-TASK.csv (every run), TASK.md (a table) and TASK.png to output/choosing.
"""

import argparse
import dataclasses
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import matplotlib

matplotlib.use("Agg")
import numpy as np
from example_data import fashion, health_insurance, movielens_100k, nouns, prose

import dp_keras_opt as dp

for folder in ("papers", "records"):
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / folder))

DELTA = 1e-6
EPSILONS = (1.0, 3.0, 8.0)
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def parts(x, y, sizes, seed=0):
    """Disjoint random parts of the examples, of these sizes; None stands for what is left."""
    count = len(y)
    order = np.random.default_rng(seed).permutation(count)
    left = count - sum(size for size in sizes if size is not None)
    cuts = np.cumsum([left if size is None else size for size in sizes])[:-1]

    def rows(places):
        return keras.tree.map_structure(lambda values: values[places], (x, y))

    return [rows(places) for places in np.split(order, cuts)]


def ratings():
    """Films: a user's factors times a film's, with biases; mean squared error."""
    users, items, stars = movielens_100k()
    x = {"user": users, "item": items}
    train, public, validation, test = parts(x, stars, [None, 800, 8_000, 16_000])
    counts = {"user": int(users.max()) + 1, "item": int(items.max()) + 1}

    def build():
        ids = {name: keras.Input((), dtype="int32", name=name) for name in counts}

        def embed(name, size, std):
            initializer = keras.initializers.RandomNormal(stddev=std)
            return keras.layers.Embedding(counts[name], size, embeddings_initializer=initializer)(
                ids[name]
            )

        match = keras.layers.Dot(-1)([embed(name, 16, 0.1) for name in counts])
        biases = [embed(name, 1, 1e-3) for name in counts]
        stars = keras.layers.Add()([match, *biases])
        return keras.Model(ids, keras.layers.Rescaling(1.0, offset=3.5)(stars))

    return dp.tuning.Task(
        build, train, validation, "mse", batch_size=1500, steps=200, test=test, public=public,
        unit="rating",
    )  # fmt: skip


def clothes():
    """Pictures: two convolutions and two dense layers; accuracy."""
    (x, y), test = fashion()
    train, public, validation = parts(x, y, [None, 540, 6_000])
    layers = keras.layers

    def build():
        return keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                layers.AveragePooling2D(2),
                layers.Conv2D(8, 5, strides=2, padding="same", activation="tanh"),
                layers.Conv2D(16, 5, strides=2, padding="same", activation="tanh"),
                layers.MaxPool2D(2),
                layers.Flatten(),
                layers.Dense(32, activation="tanh"),
                layers.Dense(10),
            ]
        )

    return dp.tuning.Task(
        build, train, validation, LOGITS, batch_size=256, steps=160, test=test, public=public,
        score="accuracy", higher_is_better=True, unit="picture",
    )  # fmt: skip


def text():
    """Prose: a small Transformer that predicts the next character; cross-entropy in nats."""
    import language_model

    def sample(rows, count):
        chosen = np.random.default_rng(0).permutation(len(rows))[:count]
        return language_model.xy(rows[chosen])

    rows = language_model.sequences(prose())
    train, public = (part for part in (rows[0][:-1000], rows[0][-1000:]))
    return dp.tuning.Task(
        _transformer, language_model.xy(train), sample(rows[1], 1000), LOGITS, batch_size=128,
        steps=120, test=sample(rows[2], 2000), public=sample(public, 128), unit="sequence",
    )  # fmt: skip


def _transformer():
    """One pre-norm block of width 32."""
    import language_model

    layers, width = keras.layers, 32
    tokens = keras.Input((language_model.LENGTH,), dtype="int32")
    places = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(language_model.VOCABULARY, width)(tokens)
    x = x + layers.Embedding(language_model.LENGTH, width)(places)
    normal = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(4, width // 4)(normal, normal, use_causal_mask=True)
    hidden = layers.Dense(2 * width, activation="gelu")(layers.LayerNormalization()(x))
    x = x + layers.Dense(width)(hidden)
    return keras.Model(tokens, layers.Dense(language_model.VOCABULARY)(x))


def tabular():
    """Visits to a doctor: more than two a year, or not; area under the ROC curve."""
    x, visits = health_insurance()
    # Ranges from the experiment's description, not from these people's data.
    x = 2 * x / np.float32([4.7, 1, 7.2, 8.3, 1, 60, 1, 1, 1]) - 1
    y = np.float32(visits > 2)
    train, public, validation, test = parts(x, y, [None, 200, 2_500, 5_000])

    def build():
        dense = [keras.layers.Dense(64, activation="relu") for _ in range(2)]
        return keras.Sequential([keras.Input((9,)), *dense, keras.layers.Dense(1)])

    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return dp.tuning.Task(
        build, train, validation, loss, batch_size=256, steps=200, test=test, public=public,
        score=keras.metrics.AUC(from_logits=True, name="auc"), higher_is_better=True,
        unit="person-year", steps_per_execution=20,
    )  # fmt: skip


def definitions():
    """Nouns: which of 26 topics? Linear in hashed words, 426,000 weights; accuracy."""
    import text as bags

    texts, topics = nouns()
    words = bags.Bags(texts, texts[:1]).padded(0.0, np.arange(len(texts)))  # all weigh the same
    train, validation, test = parts(words, topics, [None, 8_000, 16_000])
    return dp.tuning.Task(
        bags.classifier, train, validation, LOGITS, batch_size=1024, steps=600, test=test,
        score="accuracy", higher_is_better=True, unit="definition",
    )  # fmt: skip


def incomes():
    """Adult: above 50,000 dollars? Linear in hat functions; area under the ROC curve."""
    import tables

    table = tables.TABLES["adult"]
    rows, tested = (tables.encodings(*part, table) for part in table.load())
    train, validation = parts(rows["splines"], np.float32(rows["y"]), [None, 4_000])

    def build():
        return keras.Sequential([keras.Input(train[0].shape[1:]), keras.layers.Dense(1)])

    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return dp.tuning.Task(
        build, train, validation, loss, batch_size=256, steps=1_000,
        test=(tested["splines"], np.float32(tested["y"])),
        score=keras.metrics.AUC(from_logits=True, name="auc"), higher_is_better=True,
        unit="person",
    )  # fmt: skip


def in_steps(task, steps):
    """The task, with a training as long as this."""
    return lambda: dataclasses.replace(task(), steps=steps)


TASKS = {"ratings": ratings, "clothes": clothes, "text": text, "tabular": tabular}
LONG = {"ratings": 1_000, "clothes": 1_200, "text": 1_000, "tabular": 2_000}
EVERY = (
    TASKS
    | {f"{name}-long": in_steps(TASKS[name], steps) for name, steps in LONG.items()}
    | {"definitions": definitions, "incomes": incomes}
)
CANDIDATES = [
    "DPSGD, momentum",
    "DPSGD, momentum, average",
    "DPSGD, momentum, balls in bins",
    "DPSGD, momentum, planned noise",
    "DPSGD, momentum, planned noise, average",
    "DPNesterov, planned noise",
    "DPAdam, bias-corrected",
    "DPAdam, bias-corrected, planned noise",
    "DPAdam, scale-then-privatize, planned noise",
    "DPGaLore",
]


def compared(name, options, candidates, epsilons, **how):
    """The comparison on one task, whose runs and table are written to files."""
    task = EVERY[name]()
    if options.quick:
        task = dataclasses.replace(task, steps=8)
        options.trials, options.seeds = 1, 1
    if candidates is not None:  # without those whose epochs are longer than a run
        candidates = [each for each in candidates if task.takes(dp.tuning.get(each))]
    comparison = dp.tuning.compare(
        task, candidates, epsilons, DELTA, trials=options.trials, seeds=options.seeds, name=name,
        results=options.output / f"results-{name}{'-quick' * options.quick}.csv", **how,
    )  # fmt: skip
    table = comparison.markdown()
    (options.output / f"{name}.md").write_text(table, encoding="utf-8")
    print(f"\n{name}\n\n{table}")
    return comparison


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=EVERY, default=list(EVERY))
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    parser.add_argument(
        "--candidates", nargs="+", default=CANDIDATES,
        help="names, as in dp.tuning.CANDIDATES, or `all` of them",
    )  # fmt: skip
    parser.add_argument("--trials", type=int, default=8, help="settings for each hyper-parameter")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--search-at", type=float, help="the one ε to search at; else each")
    parser.add_argument("--quick", action="store_true", help="little of everything, to try it out")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("output/choosing"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    candidates = None if options.candidates == ["all"] else options.candidates
    for name in options.tasks:
        comparison = compared(
            name, options, candidates, options.epsilons, search_at=options.search_at
        )
        comparison.plot().figure.savefig(options.output / f"{name}.png", dpi=130)


if __name__ == "__main__":
    main()
