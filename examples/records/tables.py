"""Four real tables of persons: private logistic regression beside what else there is.

    pip install diffprivlib==0.6.6 scikit-learn==1.7.2  # does not import with 1.9
    python examples/records/tables.py                          # goes on if it was interrupted
    python examples/records/tables.py --quick                  # a minute or two, to try it out

Adult (whose income is above 50,000 dollars), TV16 (who voted for Trump), Fertility (which mothers
of two or more have three or more) and the RAND health insurance experiment (in which person-years
a doctor was seen more than twice). See `records.py` for the rule by which settings are chosen.

Columns are encoded by what is known without these people's data: the range of each number and the
list of each category, from the documentation of the census or survey, are constants below. A
number becomes hat functions at fixed knots, that is, its effect is piecewise linear; a category
becomes indicators; what is missing has an indicator of its own. Each column so has length at most
1, and each row, over the root of their number, too.

Writes results.csv (all runs), trials-*.csv, tables.md and records_tables.png.
"""

import dataclasses
import json
import os
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import matplotlib.pyplot as plt
import numpy as np
import records
import results
from example_data import adult, health_insurance, mothers, trump_voters
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import dp_keras_opt as dp

EPSILONS = [0.5, 1.0, 3.0, 8.0]
RATE, STEPS = 0.5, 80  # each row is in every other batch: at a fixed ε, large batches cost least
FOLDS = 3
DIFFPRIVLIB = "diffprivlib 0.6.6, δ = 0"
BOOSTING, LOGISTIC = "boosting, not private", "logistic regression, not private"

ADULT_CATEGORIES = {
    "workclass": "Private, Self-emp-not-inc, Self-emp-inc, Federal-gov, Local-gov, State-gov, "
    "Without-pay, Never-worked",
    "education": "Preschool, 1st-4th, 5th-6th, 7th-8th, 9th, 10th, 11th, 12th, HS-grad, "
    "Some-college, Assoc-voc, Assoc-acdm, Bachelors, Masters, Prof-school, Doctorate",
    "marital-status": "Married-civ-spouse, Divorced, Never-married, Separated, Widowed, "
    "Married-spouse-absent, Married-AF-spouse",
    "occupation": "Tech-support, Craft-repair, Other-service, Sales, Exec-managerial, "
    "Prof-specialty, Handlers-cleaners, Machine-op-inspct, Adm-clerical, Farming-fishing, "
    "Transport-moving, Priv-house-serv, Protective-serv, Armed-Forces",
    "relationship": "Wife, Own-child, Husband, Not-in-family, Other-relative, Unmarried",
    "race": "White, Asian-Pac-Islander, Amer-Indian-Eskimo, Other, Black",
    "sex": "Female, Male",
    "native-country": "United-States, Cambodia, England, Puerto-Rico, Canada, Germany, "
    "Outlying-US(Guam-USVI-etc), India, Japan, Greece, South, China, Cuba, Iran, Honduras, "
    "Philippines, Italy, Poland, Jamaica, Vietnam, Mexico, Portugal, Ireland, France, "
    "Dominican-Republic, Laos, Ecuador, Taiwan, Haiti, Columbia, Hungary, Guatemala, Nicaragua, "
    "Scotland, Thailand, Yugoslavia, El-Salvador, Trinadad&Tobago, Peru, Hong, Holand-Netherlands",
}
STATES = (
    "Alabama, Alaska, Arizona, Arkansas, California, Colorado, Connecticut, Delaware, "
    "District of Columbia, Florida, Georgia, Hawaii, Idaho, Illinois, Indiana, Iowa, Kansas, "
    "Kentucky, Louisiana, Maine, Maryland, Massachusetts, Michigan, Minnesota, Mississippi, "
    "Missouri, Montana, Nebraska, Nevada, New Hampshire, New Jersey, New Mexico, New York, "
    "North Carolina, North Dakota, Ohio, Oklahoma, Oregon, Pennsylvania, Rhode Island, "
    "South Carolina, South Dakota, Tennessee, Texas, Utah, Vermont, Virginia, Washington, "
    "West Virginia, Wisconsin, Wyoming"
)
THOUSANDS = [*range(0, 10_001, 1_000), 12_500, 15_000, 20_000, 30_000, 50_000, 99_999]
SCALES = {"ideo": 5, "pid7na": 7, "famincr": 12, "religimp": 4, "churchatd": 6, "prayerfreq": 7,
          "angryracism": 5, "whiteadv": 5, "fearraces": 5, "racerare": 5}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Table:
    """What is known of a table beforehand.

    Attributes:
        load: function that returns (columns, y), or two of these, to train and to test with.
        numbers: the knots of each number, the first and last of which are its range.
        categories: the values of each category, in one string.
        delta: of the guarantees, below one over the number of private rows.
        unit: whose row it is.
        published_at: budgets at which others have reported, with δ one over the rows squared.
    """

    load: Callable
    numbers: dict
    categories: dict
    delta: float = 1e-5
    unit: str = "person"
    published_at: tuple = ()

    def delta_at(self, epsilon, rows):
        return rows**-2.0 if epsilon in self.published_at else self.delta


def doctor_visits():
    """The RAND experiment in the form of the other tables."""
    names = ("lncoins", "idp", "lpi", "fmde", "physlm", "disea", "hlthg", "hlthf", "hlthp")
    x, visits = health_insurance()
    return dict(zip(names, x.T, strict=True)), np.int32(visits > 2)


TABLES = {
    # Ages and hours of two digits, money of five, and the lists of adult.names. Left out: the
    # weight of the sample, and the number of years that stands for education.
    "adult": Table(
        adult,
        {
            "age": range(15, 91, 5),
            "hours-per-week": [*range(0, 65, 5), 70, 80, 99],
            "capital-gain": THOUSANDS,
            "capital-loss": [0, *range(1_000, 3_001, 250), 4_000, 5_000],
        },
        ADULT_CATEGORIES,
        published_at=(0.1,),
    ),
    # Voters are 18 or older; the answers are on scales of so many points.
    "tv16": Table(
        trump_voters,
        {
            "age": range(15, 101, 5),
            **{name: range(1, points + 1) for name, points in SCALES.items()},
            **{name: (0, 1) for name in ("female", "collegeed", "bornagain")},
        },
        {
            "state": STATES,
            "racef": "White, Black, Hispanic, Asian, Mixed, Other, Native American, Middle Eastern",
        },
    ),
    # Mothers from 21 to 35, and the weeks of a year.
    "fertility": Table(
        mothers,
        {"age": range(21, 36), "work": [0, 1, 10, 20, 30, 40, 51, 52]},
        {"gender1": "male, female", "gender2": "male, female"}
        | {name: "no, yes" for name in ("afam", "hispanic", "other")},
        delta=1e-6,
        unit="mother",
    ),
    # Logarithms of 1 + a share in percent, of dollars; coinsurance was 0, 25, 50 or 95%.
    "health": Table(
        doctor_visits,
        {
            "lncoins": np.log1p([0, 25, 50, 95, 100]),
            "lpi": [0, 4, 5, 5.5, 6, 6.5, 7.2],
            "fmde": [0, 4, 5, 6, 7, 8.3],
            "disea": [0, 2.5, 5, 7.5, 10, 12.5, 15, 20, 25, 30, 40, 60],
            **{name: (0, 1) for name in ("idp", "physlm", "hlthg", "hlthf", "hlthp")},
        },
        {},
        unit="person-year",
    ),
}


def encoded(columns, numbers, categories):
    """Rows of length at most 1."""
    parts = [_hats(columns[name], knots) for name, knots in numbers.items()]
    parts += [_indicators(columns[name], values) for name, values in categories.items()]
    return np.float32(np.concatenate(parts, axis=1) / len(parts) ** 0.5)


def _hats(values, knots):
    """At each knot the share of it, linear in between; in the last column, what is missing."""
    missing = np.isnan(values)
    shares = [np.interp(values, list(knots), hat) for hat in np.eye(len(knots))]
    return np.stack([*np.where(missing, 0, shares), missing], axis=1)


def _indicators(values, known):
    """Which of the values it is; in the last column, none of them."""
    places = values[:, None] == np.array(known.split(", "))
    return np.concatenate([places, ~places.any(axis=1, keepdims=True)], axis=1)


def codes(columns, numbers, categories):
    """Numbers as they are, and places in the lists of categories: what boosting takes."""
    places = [_indicators(columns[name], values).argmax(1) for name, values in categories.items()]
    return np.stack([*(columns[name] for name in numbers), *places], axis=1)


def encodings(columns, y, table):
    """What the methods take, and the answers: a dict of arrays with a row for each person."""
    ends = {name: (knots[0], knots[-1]) for name, knots in table.numbers.items()}
    return {
        "splines": encoded(columns, table.numbers, table.categories),
        "lines": encoded(columns, ends, table.categories),
        "codes": codes(columns, table.numbers, table.categories),
        "y": y,
    }


def parts(table):
    """Public, private and test rows: a fifth to test with, if nobody said which."""
    loaded = table.load()
    if isinstance(loaded[0], dict):
        every = encodings(*loaded, table)
        order = np.random.default_rng(1).permutation(len(every["y"]))
        cut = len(order) // 5
        train, test = records.at(every, order[cut:]), records.at(every, order[:cut])
    else:
        train, test = (encodings(*part, table) for part in loaded)
    count = len(train["y"])
    public, private = records.public_and_private(count, min(count // 10, 5_000))
    return records.at(train, public), records.at(train, private), test


def scores(logits, y):
    """In percent."""
    return {"score": 100 * roc_auc_score(y, logits), "accuracy": 100 * np.mean((logits > 0) == y)}


def ours(table, train, test, epsilon, values, seed, rows):
    """Private logistic regression by bias-corrected Adam, and the average of its weights.

    Args:
        table: the `Table`.
        train, test: rows, as `encodings` has them.
        epsilon: of a training on so many rows; on fewer, the noise relative to the batch is as
            there.
        values: learning rate and clip norm.
        seed: of Keras; the noise and the batches stay unpredictable.
        rows: of the private training.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    x, y = train["splines"], train["y"][:, None]
    size, delta = int(RATE * len(y)), table.delta_at(epsilon, rows)
    optimizer = dp.optimizers.DPAdam(
        **values,
        beta_2=0.99,
        second_moment=dp.optimizers.moments.BiasCorrected(floor=1.0),
        noise_multiplier=records.noise(rows, int(RATE * rows), STEPS, epsilon, delta)
        * size
        / int(RATE * rows),
        batch_size=size,
        average_from=STEPS // 2,
    )
    # The hats of a number add up to a constant, so there is a bias in it.
    inputs = keras.Input((x.shape[1],))
    logit = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(inputs)
    model = dp.DPModel(inputs, logit)
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
    model.fit(dp.data.poisson_batches((x, y), size, STEPS, unit=table.unit), verbose=0)
    (kernel,) = model.get_weights()
    spent = {"spent": model.ledger.epsilon(delta)} if len(y) == rows else {}
    return scores(test["splines"] @ kernel[:, 0], test["y"]) | spent


def diffprivlib(table, train, test, epsilon, values, seed, rows):
    """Objective perturbation with δ = 0.

    On fewer rows than those of the private training, they are repeated until they are as many: so
    the noise and the penalty weigh as much as there.
    """
    try:
        from diffprivlib import models
    except ImportError as error:
        raise ImportError("pip install diffprivlib==0.6.6 scikit-learn==1.7.2") from error
    x, y = train[values["encoding"]], train["y"]
    repeated = np.resize(np.arange(len(y)), rows)
    model = models.LogisticRegression(
        epsilon=epsilon, data_norm=1.0, C=values["C"], fit_intercept=False, random_state=seed
    )
    # float64, or a row can be longer than 1 by what was rounded off, and be clipped.
    model.fit(np.float64(x[repeated]), y[repeated])
    logits = test[values["encoding"]] @ model.coef_[0]
    return scores(logits, test["y"]) | {"spent": epsilon}


def boosting(table, train, test, seed):
    is_category = [False] * len(table.numbers) + [True] * len(table.categories)
    model = HistGradientBoostingClassifier(categorical_features=is_category, random_state=seed)
    model.fit(train["codes"], train["y"])
    return scores(model.decision_function(test["codes"]), test["y"])


def logistic(table, train, test, seed):
    model = LogisticRegression(C=100.0, max_iter=1_000).fit(train["splines"], train["y"])
    return scores(model.decision_function(test["splines"]), test["y"])


PRIVATE = {records.OURS: ours, DIFFPRIVLIB: diffprivlib}
NOT_PRIVATE = {BOOSTING: boosting, LOGISTIC: logistic}


def settings_of(method, trials):
    """What is tried: twice as many of the rival."""
    if method == records.OURS:
        space = {"learning_rate": (0.1, 3.0), "clip_norm": (0.1, 1.0)}
        return dp.tuning.candidate("logistic", "DPAdam", space=space).draw(trials)
    strengths = np.geomspace(1e-4, 10, trials)
    return [{"C": float(f"{c:.3g}"), "encoding": encoding}
            for c in strengths for encoding in ("splines", "lines")]  # fmt: skip


def runs_of(name, options):
    """All runs on one table: rows of results.csv."""
    table = TABLES[name]
    public, private, test = parts(table)
    rows = len(private["y"])
    epsilons = [*table.published_at, *options.epsilons]
    chosen = {}
    for method, train in PRIVATE.items():

        def trial(epsilon, values, fold, train=train):
            of_fold = records.fold_of(public, fold, FOLDS)
            return train(table, *of_fold, epsilon, values, fold, rows)["score"]

        path = options.output / f"trials-{name}-{method.split()[0]}.csv"
        settings = settings_of(method, options.trials)
        chosen[method] = records.chosen(path, trial, epsilons, settings, FOLDS)

    def run(method, epsilon, seed):
        if method in NOT_PRIVATE:
            values, delta = {}, 0.0
            found = NOT_PRIVATE[method](table, private, test, seed) | {"spent": np.inf}
        else:
            values = chosen[method][epsilon]
            delta = table.delta_at(epsilon, rows) if method == records.OURS else 0.0
            found = PRIVATE[method](table, private, test, epsilon, values, seed, rows)
        return {"delta": delta, "values": json.dumps(values)} | found

    keys = [(method, epsilon, seed) for method in PRIVATE for epsilon in epsilons
            for seed in range(options.seeds)]  # fmt: skip
    keys += [(method, np.inf, seed) for method in NOT_PRIVATE for seed in range(options.seeds)]
    found = results.completed(
        options.output / f"results-{name}.csv", ("method", "epsilon", "seed"), keys, run
    )
    return [row | {"table": name} for row in found]


def text(name, rows):
    """Both scores of a table's runs."""
    accuracy = [row | {"score": row["accuracy"]} for row in rows]
    return (
        f"{name}: area under the ROC curve, in percent\n\n{records.table(rows, 2)}\n"
        f"{name}: accuracy, in percent\n\n{records.table(accuracy, 1)}"
    )


def picture(rows, path):
    """A panel a table: the area under the curve against ε, beside boosting without privacy."""
    figure, axes = plt.subplots(2, 2, figsize=(8, 6), layout="constrained")
    for panel, name in zip(axes.flat, dict.fromkeys(row["table"] for row in rows), strict=False):
        styles = iter(("--", ":"))
        for method, epsilon, mean, error in records.curves(
            [row for row in rows if row["table"] == name]
        ):
            if method in PRIVATE:
                panel.errorbar(epsilon, mean, 2 * error, marker="o", markersize=4, label=method)
                left = min(epsilon)
            else:
                panel.axhline(mean[0], color="gray", linestyle=next(styles), label=method)
        panel.set_xscale("log")
        panel.set_xticks([0.1, 0.5, 1, 3, 8], labels=["0.1", "0.5", "1", "3", "8"])
        panel.set_xlim(0.4 if left > 0.4 else 0.08, 10)
        panel.minorticks_off()
        panel.set_title(name)
        panel.set_xlabel("ε")
        panel.set_ylabel("area under the ROC curve, %")
        panel.grid(alpha=0.3)
    axes.flat[0].legend(fontsize="small")
    figure.savefig(path, dpi=80)


def main():
    parser = records.options(__doc__, "tables", EPSILONS)
    parser.set_defaults(trials=8)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    options = parser.parse_args()
    if options.quick:
        options.epsilons, options.trials, options.seeds = [3.0], 2, 2
        options.output = options.output / "quick"
    rows = {name: runs_of(name, options) for name in options.tables}
    page = "\n".join(text(name, found) for name, found in rows.items())
    (options.output / "tables.md").write_text(page, encoding="utf-8")
    picture([row for found in rows.values() for row in found],
            options.output / "records_tables.png")  # fmt: skip
    print(page)


if __name__ == "__main__":
    main()
