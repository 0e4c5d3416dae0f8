"""A recommender of whose private data nothing is told outside of its ledger.

    python examples/recommender_on_one_ledger.py              # ε = 3, some minutes
    python examples/recommender_on_one_ledger.py --epsilon 8
    python examples/recommender_on_one_ledger.py --quick      # one epoch, to try it out

MovieLens-100k; the privacy unit is one rating. Public are the accounts, numbered from 1 to 943, and
the scale from 1 to 5. What is computed from ratings, and what each of it may cost of the budget for
those that train:

- which films there are, by `IntegerLookup`: films that few rated are one of their own to the model;
  and the mean rating, from which the model starts: a tenth each;
- the training, at a clip norm that finds itself: the rest;
- the mean absolute error after each epoch, on ratings that do not train and have a budget of their
  own. It stops the training, chooses the epoch that is kept, and is the published curve;
- that of the model that was kept, on further ratings that are used for nothing else.

Which part a rating is in is drawn for each alone, so that none of them depends on the others.
Writes to output/recommender_on_one_ledger: curve.png and the statement.
"""

import argparse
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import matplotlib

matplotlib.use("Agg")
import numpy as np
from example_data import movielens_100k
from text_on_one_ledger import DELTA, fit, publish

import dp_keras_opt as dp

UNIT = "rating"
ACCOUNTS = 943
SCALE = (1.0, 5.0)
ERROR = dp.statistics.metrics.Mean(keras.losses.mean_absolute_error, (0.0, 4.0), "mae")


def parts(path, seed):
    """Ratings to train, to validate and to test with: {name: ({"user", "item"}, stars)}."""
    users, items, stars = movielens_100k(path)
    drawn = np.random.default_rng(seed).random(len(stars))
    chosen = np.searchsorted([0.7, 0.8], drawn)  # each rating by itself
    return {
        name: (
            {"user": users[chosen == place], "item": items[chosen == place]},
            stars[chosen == place][:, None],
        )
        for place, name in enumerate(("train", "validation", "test"))
    }


def build(data, private, epsilon, size=32):
    """Factorization, whose films and mean are released for `epsilon` each."""
    x, stars = data
    films = keras.layers.IntegerLookup()
    dp.statistics.adapt_privately(films, x["item"], private, epsilon, DELTA / 10, most_per_unit=1)
    mean = private.mean(stars[:, 0], SCALE, epsilon, DELTA / 10, purpose="the mean rating")
    print(f"{films.vocabulary_size() - 1} films, rated {mean.value:.2f} ± {mean.noise_std:.2f}")

    user = keras.Input((), dtype="int32", name="user")
    item = keras.Input((), dtype="int64", name="item")

    def embed(ids, count, width, std, name):
        initializer = keras.initializers.RandomNormal(stddev=std)
        return keras.layers.Embedding(count, width, embeddings_initializer=initializer, name=name)(
            ids
        )

    film, number = films(item), films.vocabulary_size()
    match = keras.layers.Dot(-1)(
        [
            embed(user, ACCOUNTS + 1, size, 0.05, "user_factors"),
            embed(film, number, size, 0.05, "film_factors"),
        ]
    )
    rating = keras.layers.Add()(
        [
            match,
            embed(user, ACCOUNTS + 1, 1, 1e-3, "user_bias"),
            embed(film, number, 1, 1e-3, "film_bias"),
        ]
    )
    rating = keras.layers.Rescaling(1.0, offset=mean.value, name="rating")(rating)
    return dp.DPModel({"user": user, "item": item}, rating)


def train(model, data, options):
    """Trains within the budget, until the private error falls no more."""
    optimizer = dp.optimizers.DPAdam(
        options.learning_rate, clip_norm=dp.clipping.Quantile(0.5, initial=1.0)
    )
    model.compile(optimizer, "mse")
    x, stars = data["train"]
    batches = dp.data.poisson_batches(
        (x, stars), options.batch_size, len(stars) // options.batch_size, unit=UNIT
    )
    validation = dp.callbacks.PrivateValidation(
        data["validation"], [ERROR], options.epsilon, DELTA, disjoint_from_training=True,
        batch_size=4096,
    )  # fmt: skip
    return validation, fit(model, batches, validation, "private_mae", "min", options)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=3.0, help="of each part of the data")
    parser.add_argument("--epochs", type=int, default=20, help="at most (default 20)")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=0.002)
    parser.add_argument("--quick", action="store_true", help="one epoch, to try it out")
    parser.add_argument("--data", help="tab-separated file of user, item, rating, time")
    parser.add_argument("--seed", type=int, default=0, help="of the parts and the first weights")
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("output", "recommender_on_one_ledger")
    )
    options = parser.parse_args()
    if options.quick:
        options.epochs = 1
    return options


def main():
    options = arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(options.seed)  # the noise stays unpredictable
    data = parts(options.data, options.seed)
    print({name: len(stars) for name, (_, stars) in data.items()})

    ledger = dp.accounting.Ledger()
    private = dp.statistics.PrivateData(ledger, unit=UNIT)
    model = build(data["train"], private, options.epsilon / 10)
    model.ledger = ledger
    validation, report = train(model, data, options)

    tested = dp.statistics.PrivateData(model.ledger, unit=UNIT, data_set="test")
    scores = dp.statistics.evaluate(
        model, data["test"], [ERROR], tested, options.epsilon, DELTA, batch_size=4096
    )
    publish(scores, validation, report, options.output)


if __name__ == "__main__":
    main()
