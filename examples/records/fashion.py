"""Fashion-MNIST: a private linear classifier on features that no data was needed for.

    python examples/records/fashion.py               # three to four hours; goes on if interrupted
    python examples/records/fashion.py --ablations   # also what each part brings: five hours more
    python examples/records/fashion.py --quick       # some minutes, most for the features

The features are fixed before any picture of clothes is seen. A scattering transform; a bank of
random band-pass filters; and two layers of each of two small convolutional networks that were
trained, without privacy, on *drawings* alone: one tells a thousand things that do not exist and the
characters of fonts apart (`drawings.py`), the other also ten kinds of drawn clothes
(`drawn_clothes.py`). Each of a picture and of its mirror image, averaged; group-normalized. What
they have in common is taken out by a whitening that is computed from drawn clothes, too: gradient
descent then goes in all directions alike, which under noise is what counts, since every step costs.
At last each picture's features have length 1. A linear layer on them is trained by `DPSGD` with
momentum, nearly normalized by a small clip norm, on balls in bins: each picture is in one of 14
batches of an epoch, drawn anew.

See `records.py` for the rule by which the learning rate is chosen. A classifier of a few thousand
public pictures overfits sooner than one of all private pictures and wants a lower rate; so of the
rates within one standard error of the best the highest is taken.

The weights of the networks, and the features of all pictures, are computed once and kept in the
output folder (0.3 GB for each kind).

Writes results.csv (all runs), trials.csv, fashion.md, records_fashion.png, drawn_clothes.png and
served/, the exported model, which takes pictures.
"""

import functools
import itertools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import drawings
import drawn_clothes
import keras
import numpy as np
import records
import results
import scipy.linalg
from example_data import fashion
from PIL import Image

import dp_keras_opt as dp

DELTA = 1e-5
EPSILONS = [0.5, 1.0, 2.0, 2.7, 4.0, 8.0]
TESTED = [1.0, 2.7, 8.0]  # budgets of the second column, and of the ablation the middle one
RATE = 0.0715  # the probability of each picture to be in a batch: in one of 14
GROUPS = 8  # that take turns, where noise is correlated
STEPS, CLIP_NORM, MOMENTUM = 800, 0.03, 0.9
SPACE = {"learning_rate": (2.0, 30.0)}  # in units of the clip norm
PUBLIC, FOLDS, PUBLIC_BATCH = 5_000, 5, 511
FEATURES, FILTERS, DRAWN, DAMPING = 2_500, 128, 12_000, 1.0
THINGS, PICTURES, EPOCHS = 1_000, 120_000, 5  # of the pre-training

#: The other way to draw the batches; on these, parts were left out and other things tried.
POISSON = {"draw": "poisson", "rate": 0.07}
BY_POISSON = "Poisson batches"
BY_POISSON_AND_TEST = "Poisson batches, settings chosen on the test set"
ON_POISSON = dict.fromkeys((BY_POISSON, BY_POISSON_AND_TEST), POISSON)
CHOSEN_BY_TEST = records.BY_TEST, BY_POISSON_AND_TEST
#: What is left out of the features, or changed in the training, and nothing else but, where the
#: batches, the noise or the model are others, the learning rate: that is chosen anew.
ABLATIONS = {
    "without the networks": {"features": "no things, no clothes"} | POISSON,
    "without the network that has seen drawn clothes": {"features": "no clothes"} | POISSON,
    "the networks alone": {"features": "no filters, no scattering"} | POISSON,
    "without mirror images": {"features": "not mirrored"} | POISSON,
    "without the whitening": {"features": "not whitened"} | POISSON,
    "average of the second half": {"average_from": STEPS // 2} | POISSON,
    "without momentum": {"momentum": 0.0} | POISSON,
    "noise by RDP": {"accountant": "rdp"} | POISSON,
    "normalized, not clipped": {"normalize": True} | POISSON,
    "a hidden layer of 64 units": {"hidden": 64} | POISSON,
    "planned noise": {"noise": dp.noise.Planned()} | POISSON | {"draw": "cyclic_poisson"},
    "balls in bins, batches twice the size": {"rate": 0.143},
}
#: The range of these rates; with a hidden layer 2.5, the lowest of the others, was the best.
CHOSEN_ANEW = {
    "a hidden layer of 64 units": {"learning_rate": (0.2, 5.0)},
    "planned noise": SPACE,
    "balls in bins, batches twice the size": SPACE,
}


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


def network():
    """A small convolutional network: two of its layers, and what kinds are told apart by."""
    layers = keras.layers

    def convolved(x, filters):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        return layers.Activation("relu")(layers.GroupNormalization(8)(x))

    pictures = keras.Input((28, 28, 1))
    x = layers.MaxPooling2D(2)(convolved(pictures, 32))
    early = convolved(convolved(x, 64), 64)
    late = convolved(convolved(layers.MaxPooling2D(2)(early), 128), 128)
    return keras.Model(pictures, [early, late]), layers.AveragePooling2D(3, 2)(late)


@functools.cache
def kinds_of_things():
    return drawings.as_kinds(drawings.things(THINGS, seed=1)) + drawings.glyphs()


def things(count, seed):
    """Pictures of things and characters, and their kinds."""
    return drawings.variants(kinds_of_things(), count, seed)


def things_and_clothes(count, seed):
    """Half of them clothes, whose kinds come last."""
    of_things, of_clothes = things(count // 2, seed), drawn_clothes.clothes(count // 2, 1 + seed)
    last = of_clothes[0], of_clothes[1] + len(kinds_of_things())
    return tuple(map(np.concatenate, zip(of_things, last, strict=True)))


#: What is drawn for each network.
NETWORKS = {"things": things, "clothes": things_and_clothes}


@functools.cache
def pretrained(name, folder):
    """The network of this name, whose weights are kept in the folder."""
    weights = folder / f"drawn-{name}.weights.h5"
    if not weights.exists():
        kinds = len(kinds_of_things()) + len(drawn_clothes.KINDS)
        drawings.pretrain(weights, network, NETWORKS[name], kinds, PICTURES, EPOCHS)
    trained, _ = network()
    trained.load_weights(weights)
    return trained


def raw_features(kind, folder):
    """A model from pictures to features, before they are whitened.

    Args:
        kind: "all", "not mirrored", or "no" and what is left out, with commas between.
        folder: of the networks' weights.
    """
    layers, ops = keras.layers, keras.ops
    bank = layers.Conv2D(FILTERS, 5, padding="same", use_bias=False)
    bank.build((None, 28, 28, 1))
    bank.set_weights([filter_bank(FILTERS)])
    scattering = dp.layers.Scattering2D()

    def pooled(maps, size, stride):
        return ops.sqrt(layers.AveragePooling2D(size, stride)(maps) + 1e-4)

    def of_network(name, view):
        early, late = pretrained(name, folder)(view)
        return [pooled(early, 4, 3), pooled(late, 3, 2)]

    blocks = {  # function of a view that returns maps, and groups that are normalized each
        "filters": (lambda view: [pooled(ops.abs(bank(view)), 8, 5)], 1),
        "scattering": (lambda view: [scattering(view)], 27),
    } | {name: (functools.partial(of_network, name), 1) for name in NETWORKS}
    left_out = kind.split(", ")
    pictures = keras.Input((28, 28, 1))
    views = [pictures] if kind == "not mirrored" else [pictures, ops.flip(pictures, axis=2)]
    found = []
    for block, groups in (blocks[name] for name in blocks if f"no {name}" not in left_out):
        for maps in zip(*map(block, views), strict=True):
            normal = layers.GroupNormalization(groups, center=False, scale=False, epsilon=1e-5)
            found.append(layers.Flatten()(normal(sum(maps) / len(views))))
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
def features(kind, folder):
    """The model from pictures to what the classifier takes, of which nothing is trained."""
    raw = raw_features("all" if kind == "not whitened" else kind, folder)
    parts = [raw]
    if kind != "not whitened":
        drawn, _ = drawn_clothes.clothes(DRAWN)
        of_drawn = whitening(raw.predict(drawn, batch_size=500, verbose=0))
        dense = keras.layers.Dense(of_drawn[1].shape[0])
        dense.build(raw.output_shape)
        dense.set_weights(of_drawn)
        parts.append(dense)
    model = keras.Sequential([keras.Input((28, 28, 1)), *parts, keras.layers.UnitNormalization()])
    model.trainable = False
    return model


@functools.lru_cache(maxsize=1)
def pictures_as_features(kind, folder):
    """(features, labels) of the training and the test set; computed once, kept in the folder."""
    (x, y), (x_test, y_test) = fashion()
    train, test = (as_features(kind, folder, *part) for part in (("train", x), ("test", x_test)))
    return (train, y), (test, y_test)


def as_features(kind, folder, name, pictures):
    """The features of pictures, kept in the folder under this name."""
    path = folder / f"features-{kind.replace(', ', ' ').replace(' ', '-')}-{name}.npy"
    if not path.exists():
        print(f"{path.name}: computing the features, some minutes", flush=True)
        found = features(kind, folder).predict(pictures, batch_size=500, verbose=0)
        np.save(path, np.float16(found))
    return np.float32(np.load(path))


def sampling_of(count, size, draw):
    """The `Sampling` of batches of this expected size, of so many pictures."""
    groups = [GROUPS] if draw == "cyclic_poisson" else []
    return getattr(dp.accounting.Sampling, draw)(count, size, *groups, unit="picture")


def batches_of(rows, size, draw):
    """The batches: all steps at once, or an epoch, where each picture is in one batch of it."""
    if draw == "poisson":
        return dp.data.poisson_batches(rows, size, STEPS, unit="picture")
    if draw == "cyclic_poisson":
        return dp.data.cyclic_poisson(rows, size, GROUPS, STEPS, unit="picture")
    return dp.data.balls_in_bins(rows, size, unit="picture")


def steps_of(sampling):
    """The steps of a training: no more than `STEPS`, and whole epochs where those are drawn."""
    length = sampling.steps_per_epoch if sampling.kind == "balls_in_bins" else 1
    return STEPS // length * length


def optimizer_of(rate, size, noise, multiplier=None, **changes):
    """The optimizer, with a learning rate in units of the clip norm."""
    return dp.optimizers.DPSGD(
        rate / CLIP_NORM, clip_norm=CLIP_NORM, batch_size=size, noise=noise,
        noise_multiplier=multiplier, **{"momentum": MOMENTUM} | changes,
    )  # fmt: skip


@functools.cache
def calibrated(sampling, epsilon, accountant, noise, **changes):
    """The mechanism of a private training, and its noise multiplier."""
    optimizer = optimizer_of(1.0, sampling.batch_size, noise, **changes)
    steps = steps_of(sampling)
    sigma = dp.accounting.calibrate(optimizer, sampling, steps, epsilon, DELTA, accountant)
    return optimizer.noise, sigma


def classifier(size, hidden=None):
    """A linear one, or with a hidden layer; all begin at zero logits.

    Features have length 1, and so has what the hidden layer makes of them: gradients of both layers
    are of one size.
    """
    layers = keras.layers
    inputs = x = keras.Input((size,))
    if hidden:
        of_length_1 = keras.initializers.RandomNormal(1.0)  # units before the tanh have variance 1
        x = layers.Dense(hidden, "tanh", kernel_initializer=of_length_1)(x)
        x = layers.UnitNormalization()(x)
    return dp.DPModel(inputs, layers.Dense(10, kernel_initializer="zeros")(x))


def train(rows, epsilon, values, seed, stands_for=None, accountant="auto", draw="balls_in_bins",
          rate=RATE, noise="gaussian", hidden=None, **changes):  # fmt: skip
    """A private classifier.

    Args:
        rows: (features, labels).
        epsilon: of a training on as many rows as these stand for.
        values: the learning rate, in units of the clip norm.
        seed: of Keras; noise and batches stay unpredictable.
        stands_for: how many rows the private training has, if these are public: the batches are
            smaller, and the noise relative to the batch is as there.
        accountant: by which the noise is found.
        draw: "poisson", "cyclic_poisson" or "balls_in_bins": how batches are drawn.
        rate: the probability of each picture to be in a batch.
        noise: the mechanism, or its name.
        hidden: None, or the units of a hidden layer.
        **changes: other arguments of the optimizer.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    private = stands_for or len(rows[1])
    size = of_private = round(rate * private)
    sampling = sampling_of(private, size, draw)
    mechanism, sigma = calibrated(sampling, epsilon, accountant, noise, **changes)
    if stands_for:
        size = round(rate / RATE * PUBLIC_BATCH)
    sigma *= size / of_private
    optimizer = optimizer_of(values["learning_rate"], size, mechanism, sigma, **changes)
    model = classifier(rows[0].shape[1], hidden)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batches = batches_of(rows, size, draw)
    model.fit(batches, epochs=STEPS // batches.steps_per_epoch, verbose=0)
    return model


def main():
    parser = records.options(__doc__, "fashion", EPSILONS)
    what = "run Poisson batches, too, and at ε = 2.7 what each part brings"
    parser.add_argument("--ablations", action="store_true", help=what)
    parser.set_defaults(trials=8)
    options = parser.parse_args()
    folder = options.output
    load = functools.partial(pictures_as_features, folder=folder)
    tested = [epsilon for epsilon in TESTED if epsilon in options.epsilons]
    if options.quick:
        options.epsilons, options.seeds, options.trials, tested = [2.7], 2, 2, []
        options.output = folder / "quick"

    def rates(space):
        return dp.tuning.candidate("linear", "DPSGD", space=space).draw(options.trials)

    (_, labels), _ = fashion()
    public, private = records.public_and_private(len(labels), PUBLIC)

    def trial(epsilon, values, fold, **changes):
        every, _ = load("all")
        rows, left_out = records.fold_of(records.at(every, public), fold, FOLDS)
        model = train(rows, epsilon, values, fold, len(private), **changes)
        return records.accuracy(model, left_out)

    def trial_by_test(epsilon, values, fold, **changes):
        every, test = load("all")
        return records.accuracy(train(every, epsilon, values, fold, **changes), test)

    def run(values, method, epsilon, seed):
        changes = dict((ON_POISSON | ABLATIONS).get(method, {}))
        rows, judged = load(changes.pop("features", "all"))
        rows = rows if method in CHOSEN_BY_TEST else records.at(rows, private)
        model = train(rows, epsilon, values[epsilon], seed, **changes)
        spent = model.ledger.epsilon(DELTA)
        return values[epsilon] | {"spent": spent, "score": records.accuracy(model, judged)}

    def completed(values, methods, epsilons):
        keys = itertools.product(methods, epsilons, range(options.seeds))
        path = options.output / "results.csv"
        return results.completed(
            path, ("method", "epsilon", "seed"), keys, functools.partial(run, values)
        )

    def trials_of(*names):
        name = " ".join(["trials", *names]).replace(",", "").replace(" ", "-")
        return options.output / f"{name}.csv"

    def choose(epsilons, *names, space=SPACE, **changes):
        path, run_trial = trials_of(*names), functools.partial(trial, **changes)
        tried = rates(space)
        return records.chosen(path, run_trial, epsilons, tried, FOLDS, highest="learning_rate")

    def completed_by_test(method, *names, **changes):
        path, run_trial = trials_of("test", *names), functools.partial(trial_by_test, **changes)
        by_test = records.chosen(path, run_trial, tested, rates(SPACE), 1)
        return completed(by_test, [method], tested)

    chosen = choose(options.epsilons)
    rows = completed(chosen, [records.OURS], options.epsilons)
    if tested:
        rows += completed_by_test(records.BY_TEST)
    if options.ablations:
        on_poisson = choose(options.epsilons, BY_POISSON, **POISSON)
        rows += completed(on_poisson, [BY_POISSON], options.epsilons)
        if tested:
            rows += completed_by_test(BY_POISSON_AND_TEST, BY_POISSON, **POISSON)
    records.picture(rows, "fashion", "test accuracy, %",
                    options.output / "records_fashion.png", "Fashion-MNIST, δ = 1e-5")  # fmt: skip
    Image.fromarray(drawn_clothes.gallery()).save(options.output / "drawn_clothes.png")
    text = records.table(rows, 2)
    if options.ablations and 2.7 in options.epsilons:
        for method, changes in ABLATIONS.items():
            values = on_poisson
            if method in CHOSEN_ANEW:
                values = choose([2.7], method, space=CHOSEN_ANEW[method], **changes)
            rows += completed(values, [method], [2.7])
        text += "\n" + ablation(rows)
    (options.output / "fashion.md").write_text(text, encoding="utf-8")
    print(text)
    last = options.epsilons[-1]
    every, _ = load("all")
    model = train(records.at(every, private), last, chosen[last], 0)
    serve(model, features("all", folder), options.output / "served")


def ablation(rows):
    """The accuracy at ε = 2.7 of each change, and its difference from that of Poisson batches."""
    found = {name: figures for (name, epsilon), figures in records.summary(rows).items()
             if epsilon == 2.7 and name not in CHOSEN_BY_TEST}  # fmt: skip
    base, error, _ = found.pop(BY_POISSON, (np.nan, np.nan, 0))
    lines = ["| at ε = 2.7 | accuracy | difference |", "|---" * 3 + "|",
             f"| {BY_POISSON} | {base:.2f} ± {error:.2f} | |"]  # fmt: skip
    lines += [
        f"| {name} | {mean:.2f} ± {of_mean:.2f} | {mean - base:+.2f} ± "
        f"{np.hypot(error, of_mean):.2f} |"
        for name, (mean, of_mean, _) in found.items()
    ]
    return "\n".join(lines) + "\n"


def serve(model, features_of_pictures, path):
    """Exports the classifier with its features."""
    whole = keras.Sequential([features_of_pictures, *model.layers[1:]])
    whole.export(path, verbose=False)
    print(f"The exported model in {path} takes pictures.")


if __name__ == "__main__":
    main()
