"""Matrix factorization of MovieLens-100k under differential privacy, from data to served model.

    python examples/movielens.py                    # DP-Adam and DP-SGD at ε = 3
    python examples/movielens.py --epsilon 8
    python examples/movielens.py --full             # 50 epochs of batches of 64
    python examples/movielens.py --users --epsilon 8  # protects users, not ratings
    python examples/movielens.py --data u.data      # your own copy of the ratings

The unit of privacy is one rating. A user has 106 ratings on average, so what a user's whole history
reveals is bounded far more weakly: see the group guarantee in the printed statement. With --users
the unit is one user with all their ratings. The model then has no factors, only how much each film
is liked: factors of a user could be learned from that user alone, who is to be hidden.

Writes to output/movielens, or output/movielens-users: error.png (test error against ε spent),
history.csv, the privacy statement, and the exported model, which is loaded back and asked for a
prediction.
"""

import argparse
import csv
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from example_data import movielens_100k

import dp_keras_opt as dp

DELTA = 1e-6
EMBEDDING_SIZE = 100
MIDDLE_RATING = 3.5  # of the scale from 1 to 5, and not of the data
RATINGS_PER_USER = 50  # that take part at most, with --users


def factorization(num_users, num_items):
    """A rating as user factors · item factors + user bias + item bias."""
    user = keras.Input((), dtype="int32", name="user")
    item = keras.Input((), dtype="int32", name="item")

    def embed(ids, count, size, std, name):
        initializer = keras.initializers.RandomNormal(stddev=std)
        layer = keras.layers.Embedding(count, size, embeddings_initializer=initializer, name=name)
        return layer(ids)

    match = keras.layers.Dot(-1)(
        [
            embed(user, num_users, EMBEDDING_SIZE, 0.05, "user_factors"),
            embed(item, num_items, EMBEDDING_SIZE, 0.05, "item_factors"),
        ]
    )
    rating = keras.layers.Add()(
        [
            match,
            embed(user, num_users, 1, 1e-3, "user_bias"),
            embed(item, num_items, 1, 1e-3, "item_bias"),
        ]
    )
    rating = keras.layers.Rescaling(1.0, offset=MIDDLE_RATING, name="rating")(rating)
    return dp.DPModel({"user": user, "item": item}, rating)


def popularity(num_users, num_items):
    """A rating as what the item gets from everybody."""
    user = keras.Input((), dtype="int32", name="user")
    item = keras.Input((), dtype="int32", name="item")
    liked = keras.layers.Embedding(num_items, 1, embeddings_initializer="zeros", name="item_bias")
    rating = keras.layers.Rescaling(1.0, offset=MIDDLE_RATING, name="rating")(liked(item))
    return dp.DPModel({"user": user, "item": item}, rating)


def train_and_test(path=None, seed=0):
    """The ratings, shuffled by `seed`: 80% to train and 20% to test on.

    Returns:
        ((x, y) to train, (x, y) to test, numbers of users and items with the unused id 0).
    """
    users, items, ratings = movielens_100k(path)
    order = np.random.default_rng(seed).permutation(len(ratings))
    cut = len(order) * 8 // 10
    parts = (
        ({"user": users[rows], "item": items[rows]}, ratings[rows])
        for rows in (order[:cut], order[cut:])
    )
    # Ids start at 1. How many users and items there are (943 and 1682) counts as public.
    return *parts, (int(users.max()) + 1, int(items.max()) + 1)


def optimizers(batch_size, full, users=False):
    """The optimizers that are compared, noise to be calibrated."""
    if users:
        bounds = {"clip_norm": 0.3, "batch_size": batch_size}
        return {
            "DP-Adam": dp.optimizers.DPAdam(0.03, **bounds),
            "DP-SGD": dp.optimizers.DPSGD(3.0, momentum=0.9, **bounds),
        }
    return {
        "DP-Adam": dp.optimizers.DPAdam(
            5e-4 if full else 2e-3, clip_norm=1.0, batch_size=batch_size
        ),
        "DP-SGD": dp.optimizers.DPSGD(
            0.02 if full else 0.3, momentum=0.9, clip_norm=1.0, batch_size=batch_size
        ),
    }


def train(name, optimizer, data, sizes, options):
    """Trains at the chosen ε and returns (model, report, history)."""
    (x_train, y_train), test = data
    batch_size = optimizer.batch_size
    if options.users:
        batches = dp.data.poisson_users(
            (x_train, y_train), x_train["user"], batch_size, examples_per_user=RATINGS_PER_USER
        )
    else:
        batches = dp.data.poisson_batches(
            (x_train, y_train), batch_size, len(y_train) // batch_size, unit="rating"
        )
    steps_per_epoch = len(batches)
    noise_multiplier = dp.accounting.calibrate(
        optimizer,
        batches.sampling,
        steps=options.epochs * steps_per_epoch,
        epsilon=options.epsilon,
        delta=DELTA,
    )
    print(f"\n{name}: noise multiplier {noise_multiplier:.3f} for ε = {options.epsilon:g}, "
          f"{options.epochs} epochs of {steps_per_epoch} steps")  # fmt: skip
    keras.utils.set_random_seed(options.seed)  # initial weights; the noise stays unpredictable
    model = (popularity if options.users else factorization)(*sizes)
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
    report = dp.callbacks.PrivacyReport(delta=DELTA)
    budget = dp.callbacks.PrivacyBudget(epsilon=options.epsilon, delta=DELTA)
    history = model.fit(
        batches,
        epochs=options.epochs,
        validation_data=test,
        validation_batch_size=4096,
        callbacks=[report, budget],
        verbose=1,
    ).history
    print(f"{name}: test MSE {history['val_loss'][-1]:.4f}, MAE {history['val_mae'][-1]:.4f} "
          f"at ε = {report.epsilon:.3f}")  # fmt: skip
    return model, report, history


def plot(histories, path, unit="rating"):
    """Test error against the ε spent to reach it."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, history in histories.items():
        axes.plot(history["epsilon"], history["val_loss"], marker="o", markersize=3, label=name)
    axes.set_xlabel(f"ε spent, at δ = {DELTA:g} (one {unit})")
    axes.set_ylabel("test error (MSE)")
    axes.set_title("MovieLens-100k, matrix factorization")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def write_history(histories, path):
    """One row per optimizer and epoch."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["optimizer", "epoch", "epsilon", "test_mse", "test_mae"])
        for name, history in histories.items():
            rows = zip(history["epsilon"], history["val_loss"], history["val_mae"], strict=True)
            writer.writerows([name, epoch, *row] for epoch, row in enumerate(rows, 1))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=3.0, help="privacy budget (default 3)")
    parser.add_argument("--users", action="store_true", help="protect users, not ratings")
    parser.add_argument(
        "--epochs", type=int, help="default 20, 50 with --full, 25 with --users, 1 with --quick"
    )
    parser.add_argument(
        "--batch-size", type=int, help="default 1024, 64 with --full, 236 (users) with --users"
    )
    parser.add_argument("--full", action="store_true", help="50 epochs of batches of 64")
    parser.add_argument("--quick", action="store_true", help="one epoch, to try it out")
    parser.add_argument("--data", help="tab-separated file of user, item, rating, time")
    parser.add_argument(
        "--output", type=pathlib.Path, help="default output/movielens, or output/movielens-users"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the split and initial weights")
    options = parser.parse_args()
    options.epochs = options.epochs or (
        50 if options.full else 1 if options.quick else 25 if options.users else 20
    )
    options.batch_size = options.batch_size or (
        236 if options.users else 64 if options.full else 1024
    )
    folder = "movielens-users" if options.users else "movielens"
    options.output = options.output or pathlib.Path("output", folder)
    return options


def main():
    options = arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    train_data, test_data, sizes = train_and_test(options.data, options.seed)
    print(f"{len(train_data[1])} ratings for training, {len(test_data[1])} for testing")

    histories, results = {}, {}
    for name, optimizer in optimizers(options.batch_size, options.full, options.users).items():
        *results[name], histories[name] = train(
            name, optimizer, (train_data, test_data), sizes, options
        )
    plot(histories, options.output / "error.png", "user" if options.users else "rating")
    write_history(histories, options.output / "history.csv")

    model, report = results["DP-Adam"]
    statement = report.statement(group_size=2 if options.users else 10)
    (options.output / "statement.txt").write_text(statement + "\n", encoding="utf-8")
    print("\n" + statement + "\n")

    served = options.output / "served" / "1"
    dp.serving.export(model, served, report)
    predict = tf.saved_model.load(served).signatures["serving_default"]
    asked = {"user": tf.constant([196]), "item": tf.constant([242])}
    (prediction,) = predict(**asked).values()
    print(f"The exported model in {served} predicts {np.ravel(prediction)[0]:.2f} "
          "for user 196 and item 242.")  # fmt: skip
    print(f"Wrote error.png, history.csv and statement.txt to {options.output}.")


if __name__ == "__main__":
    main()
