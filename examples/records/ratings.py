"""MovieLens-100k: the error of private ratings, where a rating is protected, or a person.

    python examples/records/ratings.py                   # goes on where it was interrupted
    python examples/records/ratings.py --levels ratings  # or users
    python examples/records/ratings.py --quick           # a minute, to try it out

Settings are chosen on other ratings altogether, of MovieLens-latest-small, which are declared
public, cut to as many films: they are trained at the same ε, have a fifth held out, and are never
trained on for what is tested. A few thousand public ratings of MovieLens-100k itself could not
choose: they are three or four a person, of which no bias or factor can be learned, whatever the
setting. All 80,000 ratings that train are private.

Protected rating by rating: a rating is 3.5 and a bias of the person and of the film, with
or without factors. Protected person by person: the ratings of each are taken relative to their own
mean, pulled to 3.5, which needs nobody else; how much more or less each film is liked is
learned privately and released; and each person, who sees that and their own ratings, computes
their own bias at home. What one person sees is so private to all others (joint differential
privacy).

Each seed draws the fifth that tests anew. Writes results-LEVEL.csv (all runs), trials-*.csv,
references.csv, LEVEL.md, and records_ratings.png.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import matplotlib.pyplot as plt
import numpy as np
import records
import results
from example_data import movielens_100k, movielens_latest

import dp_keras_opt as dp

EPSILONS = {"ratings": [0.5, 1.0, 3.0, 4.3, 8.0, 11.4, 23.4], "users": [1.0, 3.0, 8.0]}
COMPARED = (1, 3, 8)  # at which other methods are trained, too
DELTA = {"ratings": 1e-6, "users": 1e-5}  # there are 943 persons: below 1/943 by two orders
COUNTS = 943, 1682  # persons and films of MovieLens-100k: public
MIDDLE = 3.5  # of the scale, and not of the data
GROUPS = 4  # each rating, or person, is in every fourth batch
AT_MOST = 100  # ratings that a person takes part with
BIASES, FACTORS = f"{records.OURS}, biases", f"{records.OURS}, factorization"
TEXTBOOK = "DPSGD, factorization, lots of 1,024, 5 epochs, rate 0.3, C = 1"
KINDS = {
    "score": "mean squared error",
    "rmse": "root mean squared error",
    "mae": "mean absolute error",
}
USERS = f"{records.OURS}, films privately, persons at home"


@dataclasses.dataclass(frozen=True)
class Ratings:
    """Who rated what, and how: arrays of one length; ids start at 1."""

    user: np.ndarray
    item: np.ndarray
    stars: np.ndarray

    def part(self, rows):
        """Those of these rows."""
        return Ratings(self.user[rows], self.item[rows], self.stars[rows])

    @property
    def xy(self):
        """As Keras takes them."""
        return {"user": self.user, "item": self.item}, self.stars


def split(ratings, seed):
    """Four fifths to train with, one to test."""
    order = np.random.default_rng(seed).permutation(len(ratings.stars))
    test, train = np.split(order, [len(order) // 5])
    return ratings.part(train), ratings.part(test)


def errors(predicted, stars):
    """Predictions are cut to the scale."""
    difference = np.clip(predicted, 1, 5) - stars
    mse = float(np.mean(difference**2))
    return {"score": mse, "rmse": mse**0.5, "mae": float(np.mean(np.abs(difference)))}


def network(counts, rank, users=True):
    """A rating as the middle of the scale, biases, and the product of factors."""
    ids = {
        name: keras.Input((), dtype="int32", name=name) for name in ("user", "item")[not users :]
    }
    counts = dict(zip(("user", "item"), counts, strict=True))

    def embed(name, size, std):
        initializer = keras.initializers.RandomNormal(stddev=std) if std else "zeros"
        layer = keras.layers.Embedding(
            counts[name] + 1, size, embeddings_initializer=initializer, name=f"{name}_{size}"
        )
        return layer(ids[name])

    parts = [embed(name, 1, 0.0) for name in ids]
    if rank:
        parts.append(keras.layers.Dot(-1)([embed(name, rank, 0.1) for name in ids]))
    stars = keras.layers.Add()(parts) if len(parts) > 1 else parts[0]
    offset = MIDDLE if users else 0.0
    return dp.DPModel(ids, keras.layers.Rescaling(1.0, offset=offset)(stars))


def planned(optimizer, values, batch_size, steps, **own):
    """With planned noise, and the average of the last quarter of the weights."""
    return optimizer(
        values["learning_rate"],
        clip_norm=values["clip_norm"],
        noise=dp.noise.Planned(horizon=steps / 8),
        batch_size=batch_size,
        average_from=steps * 3 // 4,
        **own,
    )


def momentum(*run):
    return planned(dp.optimizers.DPSGD, *run, momentum=0.9)


def adam(*run):
    second_moment = dp.optimizers.moments.BiasCorrected(floor=1.0)
    return planned(dp.optimizers.DPAdam, *run, beta_2=0.99, second_moment=second_moment)


@dataclasses.dataclass(frozen=True)
class Family:
    """A model and a rule, and the settings that are tried.

    Attributes:
        optimizer: function of settings, batch size and steps.
        space: from names to (low, high).
        steps: of a run.
        rank: of the factors.
        per_person: whether the learning rate is for a mean over 1,000 persons. A person's part of a
            mean gradient is one over their number, so that two data sets want different rates.
    """

    optimizer: Callable
    space: Mapping
    steps: int
    rank: int = 0
    per_person: bool = True

    def settings(self, trials):
        return dp.tuning.Candidate("", self.optimizer, self.space).draw(trials)

    def make(self, values, persons, batch_size):
        values = dict(values)
        if self.per_person:
            values["learning_rate"] *= persons / 1_000
        return self.optimizer(values, batch_size, self.steps)


FAMILIES = {
    BIASES: Family(momentum, {"learning_rate": (2.0, 30.0), "clip_norm": (1.0, 4.0)}, 60),
    FACTORS: Family(
        adam, {"learning_rate": (3e-3, 3e-2), "clip_norm": (1.0, 4.0)}, 120, 8, per_person=False
    ),
    USERS: Family(
        momentum,
        {"learning_rate": (0.1, 4.0), "clip_norm": (0.1, 1.0), "shrink": (1.0, 10.0)},
        40,
    ),
}


def of_ratings(method, train, test, counts, epsilon, values, seed):
    """One training that protects a rating."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)  # initial weights; noise and batches stay unpredictable
    if method == TEXTBOOK:
        size, steps, model = 1_024, 5 * len(train.stars) // 1_024, network(counts, 16)
        batches = dp.data.poisson_batches(train.xy, size, steps, unit="rating")
        optimizer = dp.optimizers.DPSGD(0.3, clip_norm=1.0, batch_size=size)
    else:
        family = FAMILIES[method]
        size, model = len(train.stars) // GROUPS, network(counts, family.rank)
        batches = dp.data.cyclic_poisson(train.xy, size, GROUPS, family.steps, unit="rating")
        optimizer = family.make(values, counts[0], size)
    fit(model, optimizer, batches, epsilon, DELTA["ratings"])
    predicted = model.predict(test.xy[0], batch_size=8_192, verbose=0)[:, 0]
    return errors(predicted, test.stars) | {"spent": model.ledger.epsilon(DELTA["ratings"])}


def fit(model, optimizer, batches, epsilon, delta):
    dp.accounting.calibrate(optimizer, batches, epochs=1, epsilon=epsilon, delta=delta)
    model.compile(optimizer, "mse")
    model.fit(batches, verbose=0)


def pulled_means(ids, values, highest, penalty):
    """What the values of each id are on average, pulled to 0: from its own alone."""
    sums, counts = (np.bincount(ids, weights, highest + 1) for weights in (values, None))
    return sums / (counts + penalty)


def own_bias(ratings, residuals, persons, shrink):
    """What each person's residuals are on average, pulled to 0: from their own ratings alone."""
    return np.float32(pulled_means(ratings.user, residuals, persons, shrink))


def of_users(method, train, test, counts, epsilon, values, seed):
    """One training that protects a person: films privately, the rest by each person alone."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    shrink = values["shrink"]
    relative = train.stars - MIDDLE
    relative = relative - own_bias(train, relative, counts[0], shrink)[train.user]
    size, family = len(np.unique(train.user)) // GROUPS, FAMILIES[method]
    batches = dp.data.cyclic_poisson(
        ({"item": train.item}, relative), size, GROUPS, family.steps, users=train.user,
        examples_per_user=AT_MOST, unit="person",
    )  # fmt: skip
    model = network(counts, 0, users=False)
    fit(model, family.make(values, counts[0], size), batches, epsilon, DELTA["users"])
    (films,) = model.get_weights()
    return at_home(films[:, 0], train, test, counts, shrink) | {
        "spent": model.ledger.epsilon(DELTA["users"])
    }


def at_home(films, train, test, counts, shrink):
    """The error when each person adds their own bias to that of the films."""
    persons = own_bias(train, train.stars - MIDDLE - films[train.item], counts[0], shrink)
    return errors(MIDDLE + films[test.item] + persons[test.user], test.stars)


TRAINED = {"ratings": of_ratings, "users": of_users}


def ridge(train, counts, penalty=5.0, sweeps=10):
    """Biases of persons and films, without privacy, by turns."""
    biases = {"user": np.zeros(counts[0] + 1), "item": np.zeros(counts[1] + 1)}
    for _ in range(sweeps):
        for name, other in (("user", "item"), ("item", "user")):
            ids = getattr(train, name)
            left = train.stars - MIDDLE - biases[other][getattr(train, other)]
            biases[name] = pulled_means(ids, left, len(biases[name]) - 1, penalty)
    return biases["user"], biases["item"]


def factorized(train, counts, rank=10, penalty=10.0, sweeps=10):
    """Biases, then factors of what they leave, by alternating least squares without privacy."""
    of_user, of_item = ridge(train, counts)
    left = train.stars - MIDDLE - of_user[train.user] - of_item[train.item]
    generator = np.random.default_rng(0)
    factors = [0.1 * generator.normal(size=(count + 1, rank)) for count in counts]
    for _ in range(sweeps):
        for place, ids, others in ((0, train.user, train.item), (1, train.item, train.user)):
            for each in np.unique(ids):
                rows = ids == each
                x = factors[1 - place][others[rows]]
                factors[place][each] = np.linalg.solve(
                    x.T @ x + penalty * np.eye(rank), x.T @ left[rows]
                )
    return of_user, of_item, *factors


def reference(method, seed, ratings):
    """The error of what is not private."""
    train, test = split(ratings, seed)
    if method == "3.5 for every rating":
        return errors(np.full(len(test.stars), MIDDLE), test.stars)
    if method == "the mean rating":
        return errors(np.full(len(test.stars), train.stars.mean()), test.stars)
    if method == "each person's own mean, at home":
        return at_home(np.zeros(COUNTS[1] + 1), train, test, COUNTS, 5.0)
    user, item, *factors = (ridge if method == "biases" else factorized)(train, COUNTS)
    predicted = MIDDLE + user[test.user] + item[test.item]
    if factors:
        predicted += np.sum(factors[0][test.user] * factors[1][test.item], axis=1)
    return errors(predicted, test.stars)


REFERENCES = (
    "3.5 for every rating", "the mean rating", "each person's own mean, at home", "biases",
    "factorization, alternating least squares",
)  # fmt: skip


def runs_of(level, options, ratings, others):
    """All runs that protect a rating, or a person: rows of results."""
    train_one = TRAINED[level]
    families = [USERS] if level == "users" else [BIASES, FACTORS]
    epsilons = options.epsilons or EPSILONS[level]
    compared = [epsilon for epsilon in epsilons if epsilon in COMPARED]
    most_films = int(others.item.max())
    persons = int(others.user.max())
    chosen = {}
    for family in families:
        settings = FAMILIES[family].settings(options.trials)
        path = f"{level}-{family.split(', ')[1].split()[0]}.csv"

        def on_public(epsilon, values, fold, family=family):
            counts = persons, most_films
            return train_one(family, *split(others, fold), counts, epsilon, values, fold)["score"]

        def on_test(epsilon, values, fold, family=family):
            seed = 100 + fold  # a split that is none of those of the results
            return train_one(family, *split(ratings, seed), COUNTS, epsilon, values, seed)["score"]

        tried = [("public", on_public, epsilons)]
        if family == families[0]:
            tried.append(("test", on_test, compared))
        for by, run, budgets in tried:
            chosen[family, by] = records.chosen(
                options.output / f"trials-{by}-{path}", run, budgets, settings, 1, min
            )

    def run(method, epsilon, seed):
        by = "test" if method.startswith(records.BY_TEST) else "public"
        family = method.replace(records.BY_TEST, records.OURS)
        values = {} if method == TEXTBOOK else chosen[family, by][epsilon]
        found = train_one(family, *split(ratings, seed), COUNTS, epsilon, values, seed)
        return {"delta": DELTA[level], "values": json.dumps(values)} | found

    by_test = [families[0].replace(records.OURS, records.BY_TEST)]
    keys = [(method, epsilon, seed) for method in families for epsilon in epsilons
            for seed in range(options.seeds)]  # fmt: skip
    keys += [(method, epsilon, seed) for method in by_test + [TEXTBOOK] * (level == "ratings")
             for epsilon in compared for seed in range(options.seeds)]  # fmt: skip
    rows = results.completed(
        options.output / f"results-{level}.csv", ("method", "epsilon", "seed"), keys, run
    )
    known = [(method, seed) for method in REFERENCES for seed in range(options.seeds)]
    return rows, results.completed(
        options.output / "references.csv", ("method", "seed"), known,
        functools.partial(reference, ratings=ratings),
    )  # fmt: skip


def page(level, rows):
    """A table of each kind of error."""
    return "\n".join(
        f"{level}: {name}\n\n{records.table([row | {'score': row[key]} for row in rows], 3)}"
        for key, name in KINDS.items()
    )


def references_table(rows):
    """A row a reference, means over the splits."""
    lines = ["| not private | " + " | ".join(KINDS.values()) + " |", "| --- " * 4 + "|"]
    for method in dict.fromkeys(row["method"] for row in rows):
        of_method = [row for row in rows if row["method"] == method]
        means = [np.mean([float(row[key]) for row in of_method]) for key in KINDS]
        lines.append(" | ".join([f"| {method}", *(f"{mean:.3f}" for mean in means)]) + " |")
    return "\n".join(lines) + "\n"


def picture(found, references, path):
    """Test error against ε: beside what is published, closer, and where a person is protected."""
    figure, panels = plt.subplots(1, 3, figsize=(11, 5), layout="constrained")
    levels = ("ratings", "ratings", "users")
    titles = ("a rating protected, and published", "a rating protected", "a person protected")
    known, colors = {}, {}
    for row in references:
        known.setdefault(row["method"], []).append(float(row["score"]))
    for level, title, panel in zip(levels, titles, panels, strict=True):
        for method, epsilon, mean, error in records.curves(found.get(level, [])):
            color = colors.setdefault(method, f"C{len(colors)}")
            panel.errorbar(
                epsilon, mean, 2 * error, marker="o", markersize=3, label=method, color=color
            )
        for method, line in (("the mean rating", "-."), ("biases", "--")):
            label = f"{method}, not private"
            panel.axhline(np.mean(known[method]), color="gray", linestyle=line, label=label)
        panel.set(title=title, xlabel="ε", ylabel="test error (MSE)", xscale="log")
        ticks = [0.5, 1, 3, 8, 23]
        panel.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    for method, epsilon, score in records.published_curves("ratings"):
        color = colors.setdefault(method, f"C{len(colors)}")
        panels[0].plot(epsilon, score, marker="x", linestyle=":", label=method, color=color)
    panels[1].set_ylim(top=1.3)
    lines = {
        label: line
        for panel in panels
        for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=2, fontsize="small"
    )
    figure.savefig(path, dpi=70)


def main():
    parser = records.options(__doc__, "ratings", None)
    parser.set_defaults(trials=6)
    parser.add_argument("--levels", nargs="+", choices=TRAINED, default=list(TRAINED))
    parser.add_argument("--data", help="ratings of MovieLens-100k: user, item, rating, time")
    parser.add_argument("--public", help="dslabs/movielens of Rdatasets, as CSV")
    options = parser.parse_args()
    ratings = Ratings(*movielens_100k(options.data))
    others = Ratings(*movielens_latest(COUNTS[1], options.public))
    if options.quick:
        options.epsilons, options.trials, options.seeds = [3.0], 1, 2
        options.output = options.output / "quick"
        ratings, others = (split(every, 0)[1] for every in (ratings, others))
    found = {}
    for level in options.levels:
        found[level], references = runs_of(level, options, ratings, others)
    for level, rows in found.items():
        text = f"{page(level, rows)}\n{references_table(references)}"
        (options.output / f"{level}.md").write_text(text, encoding="utf-8")
        print(text)
    picture(found, references, options.output / "records_ratings.png")


if __name__ == "__main__":
    main()
