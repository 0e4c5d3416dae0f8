"""Fashion-MNIST: a private linear classifier on features that no data was needed for.

    python examples/records/fashion.py           # about an hour; goes on if it was interrupted
    python examples/records/fashion.py --quick   # some minutes, most for the features

The features are fixed before any picture of clothes is seen. A scattering transform and a bank of
random band-pass filters, each of a picture and of its mirror image, averaged; group-normalized.
What they have in common is taken out by a whitening that is computed from *drawn* pictures, random
shapes on black: gradient descent then goes in all directions alike, which under noise is what
counts, since every step costs. At last each picture's features have length 1. A linear layer on
them is trained by `DPSGD` with momentum, normalized or nearly so by a small clip norm, with
Poisson batches, and the average of the weights of the second half is taken.

See `records.py` for the rule by which learning rate, clip norm and steps are chosen. The features
of all pictures are computed once and kept in the output folder (0.2 to 0.6 GB for each kind).

Writes results.csv (all runs), trials.csv, fashion.md, records_fashion.png and served/, the exported
model, which takes pictures.
"""

import functools
import itertools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import records
import results
import scipy.linalg
from example_data import fashion

import dp_keras_opt as dp

DELTA = 1e-5
EPSILONS = [0.5, 1.0, 2.0, 2.7, 4.0, 8.0]
TESTED = [1.0, 2.7, 8.0]  # budgets of the second column, and of the ablation the middle one
RATE = 0.07  # the probability of each picture to be in a batch
PUBLIC, FOLDS = 5_000, 3
SPACE = {"learning_rate": (4.0, 30.0), "clip_norm": (0.01, 0.1), "steps": (200, 1600)}
FEATURES, FILTERS, DRAWN, DAMPING = 2_500, 128, 12_000, 0.3

#: What is left out of the features, or changed in the training, and nothing else.
ABLATIONS = {
    "without the filters": {"features": "scattering"},
    "without the scattering": {"features": "filters"},
    "without mirror images": {"features": "not mirrored"},
    "without the whitening": {"features": "not whitened"},
    "without the average": {"average": False},
    "without momentum": {"momentum": 0.0},
    "noise by RDP": {"accountant": "rdp"},
    "normalized, not clipped": {"normalize": True},
}


def drawn(count, seed=0, size=28):
    """Pictures of a few rectangles and ellipses of random shade and stripes, on black."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size]
    pictures = np.zeros((count, size, size, 1), np.float32)
    for picture in pictures[..., 0]:
        for _ in range(generator.integers(2, 12)):
            (left, top), angle = generator.uniform(0, size, 2), generator.uniform(0, np.pi)
            along = (x - left) * np.cos(angle) + (y - top) * np.sin(angle)
            across = (y - top) * np.cos(angle) - (x - left) * np.sin(angle)
            length, width = np.exp(generator.uniform(np.log(1.5), np.log(14), 2))
            power = generator.choice([1, 2, 8])  # from a rhombus to a rectangle
            inside = np.abs(along / length) ** power + np.abs(across / width) ** power < 1
            shade = generator.uniform() * (generator.uniform() > 0.25)
            stripes = 1 + 0.3 * generator.uniform() * np.sin(generator.uniform(0.3, 2.5) * along)
            picture[inside] = np.clip(shade * stripes, 0, 1)[inside]
    return pictures


def filter_bank(count, size=5, seed=0):
    """Random filters of mean zero, less of what neighbouring pixels have in common.

    Their covariance is the inverse, damped, of one that falls off exponentially with the distance.
    """
    places = np.stack(np.mgrid[:size, :size], -1).reshape(-1, 2)
    distance = np.linalg.norm(places[:, None] - places, axis=-1)
    covariance = np.exp(-distance / 3)
    values, vectors = np.linalg.eigh(covariance)
    root = (vectors / np.sqrt(values + 0.3 * values.mean())) @ vectors.T
    filters = root @ np.random.default_rng(seed).standard_normal((size**2, count))
    filters -= filters.mean(axis=0)
    filters /= np.sqrt(np.sum(filters * (covariance @ filters), axis=0))
    return np.float32(filters).reshape(size, size, 1, count)


def raw_features(kind="all"):
    """A model from pictures to features, before they are whitened."""
    layers, ops = keras.layers, keras.ops
    scattering = dp.layers.Scattering2D()
    bank = layers.Conv2D(FILTERS, 5, padding="same", use_bias=False)
    bank.build((None, 28, 28, 1))
    bank.set_weights([filter_bank(FILTERS)])
    blocks = {
        "filters": (lambda x: ops.sqrt(layers.AveragePooling2D(8, 5)(ops.abs(bank(x)))), 1),
        "scattering": (scattering, 27),
    }
    pictures = keras.Input((28, 28, 1))
    views = [pictures] if kind == "not mirrored" else [pictures, ops.flip(pictures, axis=2)]
    found = []
    for block, groups in [blocks[kind]] if kind in blocks else blocks.values():
        features = sum(block(view) for view in views) / len(views)
        normal = layers.GroupNormalization(groups, center=False, scale=False, epsilon=1e-5)
        found.append(layers.Flatten()(normal(features)))
    return keras.Model(pictures, ops.concatenate(found, axis=-1))


def whitening(of_drawn):
    """A matrix and a shift that make the largest components of these features alike in size."""
    mean = of_drawn.mean(axis=0)
    centred = of_drawn - mean
    covariance = centred.T @ centred / len(centred)
    size = len(covariance)
    largest = (max(size - FEATURES, 0), size - 1)
    values, vectors = scipy.linalg.eigh(covariance, subset_by_index=largest, overwrite_a=True)
    matrix = vectors / np.sqrt(values + DAMPING * values.mean())
    return matrix, -mean @ matrix


@functools.cache
def features(kind):
    """The model from pictures to what the classifier takes, of which nothing is trained."""
    raw = raw_features(kind)
    parts = [raw]
    if kind != "not whitened":
        weights = whitening(raw.predict(drawn(DRAWN), batch_size=500, verbose=0))
        dense = keras.layers.Dense(weights[1].shape[0])
        dense.build(raw.output_shape)
        dense.set_weights(weights)
        parts.append(dense)
    model = keras.Sequential([keras.Input((28, 28, 1)), *parts, keras.layers.UnitNormalization()])
    model.trainable = False
    return model


@functools.lru_cache(maxsize=1)
def pictures_as_features(kind, folder):
    """(features, labels) of the training and the test set; computed once, kept in the folder."""
    (x, y), (x_test, y_test) = fashion()
    path = folder / f"features-{kind.replace(' ', '-')}.npz"
    if not path.exists():
        print(f"{path.name}: computing the features, some minutes", flush=True)
        model = features(kind)
        found = [np.float16(model.predict(part, batch_size=500, verbose=0)) for part in (x, x_test)]
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, train=found[0], test=found[1])
    with np.load(path) as kept:
        return (np.float32(kept["train"]), y), (np.float32(kept["test"]), y_test)


def batch_size(rows):
    return round(RATE * rows)


def train(rows, epsilon, values, seed, stands_for=None, average=True, accountant="auto", **changes):
    """A private linear classifier.

    Args:
        rows: (features, labels).
        epsilon: of a training on as many rows as these stand for.
        values: steps, clip norm, and learning rate in units of it.
        seed: of Keras; noise and batches stay unpredictable.
        stands_for: how many rows the private training has, if these are fewer and public: the
            noise relative to the batch is as there.
        average: whether the weights of the second half are averaged.
        accountant: by which the noise is found.
        **changes: other arguments of the optimizer.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    count, steps = len(rows[1]), values["steps"]
    private = stands_for or count
    optimizer = dp.optimizers.DPSGD(
        values["learning_rate"] / values["clip_norm"],
        clip_norm=values["clip_norm"],
        batch_size=batch_size(count),
        noise_multiplier=records.noise(
            private, batch_size(private), steps, epsilon, DELTA, accountant
        )
        * batch_size(count) / batch_size(private),
        average_from=steps // 2 if average else None,
        **{"momentum": 0.9} | changes,
    )  # fmt: skip
    inputs = keras.Input(rows[0].shape[1:])
    model = dp.DPModel(inputs, keras.layers.Dense(10, kernel_initializer="zeros")(inputs))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batches = dp.data.poisson_batches(rows, batch_size(count), steps, unit="picture")
    model.fit(batches, verbose=0)
    return model


def settings(trials):
    """What is tried."""
    drawn = dp.tuning.candidate("linear", "DPSGD", space=SPACE).draw(trials)
    return [values | {"steps": int(values["steps"])} for values in drawn]


def main():
    parser = records.options(__doc__, "fashion", EPSILONS)
    parser.set_defaults(trials=12)
    options = parser.parse_args()
    load = functools.partial(pictures_as_features, folder=options.output)
    tested, tried = [e for e in TESTED if e in options.epsilons], settings(options.trials)
    if options.quick:
        options.epsilons, options.seeds, tested = [2.7], 2, []
        options.output /= "quick"
        tried = [values | {"steps": 100} for values in tried[:2]]
    every, test = load("all")
    public, private = records.public_and_private(len(every[1]), PUBLIC)

    def trial(epsilon, values, fold):
        rows, left_out = records.fold_of(records.at(every, public), fold, FOLDS)
        return records.accuracy(train(rows, epsilon, values, fold, len(private)), left_out)

    def trial_by_test(epsilon, values, fold):
        return records.accuracy(train(every, epsilon, values, fold), test)

    def run(values, method, epsilon, seed):
        changes = dict(ABLATIONS.get(method, {}))
        rows, judged = load(changes.pop("features", "all"))
        rows = rows if method == records.BY_TEST else records.at(rows, private)
        model = train(rows, epsilon, values[epsilon], seed, **changes)
        spent = model.ledger.epsilon(DELTA)
        return values[epsilon] | {"spent": spent, "score": records.accuracy(model, judged)}

    def completed(values, methods, epsilons):
        keys = itertools.product(methods, epsilons, range(options.seeds))
        path = options.output / "results.csv"
        return results.completed(
            path, ("method", "epsilon", "seed"), keys, functools.partial(run, values)
        )

    path = options.output / "trials.csv"
    chosen = records.chosen(path, trial, options.epsilons, tried, FOLDS)
    rows = completed(chosen, [records.OURS], options.epsilons)
    if tested:
        path = options.output / "trials-test.csv"
        by_test = records.chosen(path, trial_by_test, tested, tried, 1)
        rows += completed(by_test, [records.BY_TEST], tested)
    records.picture(rows, "fashion", "test accuracy, %",
                    options.output / "records_fashion.png", "Fashion-MNIST, δ = 1e-5")  # fmt: skip
    text = records.table(rows, 2)
    if 2.7 in tested:
        text += "\n" + ablation(rows + completed(chosen, ABLATIONS, [2.7]))
    (options.output / "fashion.md").write_text(text, encoding="utf-8")
    print(text)
    last = options.epsilons[-1]
    serve(train(records.at(every, private), last, chosen[last], 0), options.output / "served")


def ablation(rows):
    """The accuracy at ε = 2.7 of each change, and its difference from all at once."""
    found = {name: figures for (name, epsilon), figures in records.summary(rows).items()
             if epsilon == 2.7 and name != records.BY_TEST}  # fmt: skip
    whole, error, _ = found.pop(records.OURS, (np.nan, np.nan, 0))
    lines = ["| at ε = 2.7 | accuracy | difference |", "|---" * 3 + "|",
             f"| {records.OURS} | {whole:.2f} ± {error:.2f} | |"]  # fmt: skip
    lines += [
        f"| {name} | {mean:.2f} ± {of_mean:.2f} | {mean - whole:+.2f} ± "
        f"{np.hypot(error, of_mean):.2f} |"
        for name, (mean, of_mean, _) in found.items()
    ]
    return "\n".join(lines) + "\n"


def serve(model, path):
    """Exports the classifier with its features."""
    whole = keras.Sequential([features("all"), *model.layers[1:]])
    whole.export(path, verbose=False)
    print(f"The exported model in {path} takes pictures.")


if __name__ == "__main__":
    main()
