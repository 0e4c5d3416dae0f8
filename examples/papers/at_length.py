"""The papers' claims at their own length: thousands of steps, and everything tuned alike.

    python examples/papers/at_length.py filtered     # hours; goes on where it was interrupted
    python examples/papers/at_length.py uneven
    python examples/papers/at_length.py logistic
    python examples/papers/at_length.py delayed      # a run takes a quarter of an hour
    python examples/papers/at_length.py scaled       # a run takes three quarters of an hour
    python examples/papers/at_length.py filtered --quick     # minutes, to try it out

Each optimizer gets as many trials for each of its hyper-parameters at each ε, a learning rate that
is best at an end of its range is followed further, and the best setting by the validation data is
trained from other initial weights and judged by the test data: see `dp.tuning.compare`. The
accountant is the tight one; where a paper gives σ, its ε is what that costs by this accountant.

The papers' accountants find a larger ε for the same noise: what that of RDP says of each run is
written beside it.

- filtered (DOPPLER): Fashion-MNIST at 14 × 14 pixels, batches of 500, 4,000 steps of a small CNN,
  2,000 of a ViT, and the CNN from pre-training on the digits of scikit-learn; ε = 1, 3, 8 at
  δ = 1/N^1.1; with the first-order filter and without.
- uneven (ADP-SGD): the CNN, batches of 256, the paper's 12,660 steps with η_t = η/√(20 + t); ε = 1
  and 3; with noise that follows the step sizes, and with constant noise.
- delayed (DP²): which of 500 branches of WordNet a noun is in, by a bag of 10,000 words: a linear
  model of 5 million weights, as the paper has it for the tags of StackOverflow; batches of 64,
  σ = 1, 10,000 steps. With fewer (`--steps`) σ stays, and ε is what they cost.
- logistic (DP²): which testament of the King James Bible a sentence is from, by its words: the
  logistic regression of 10,001 weights that the paper has for reviews of films; batches of 64,
  σ = 1, 100 epochs, and the paper's ranges of hyper-parameters.
- scaled (scale-then-privatize): a Transformer of a million weights predicts the next character of
  English prose; batches of 256, 2,000 steps, ε = 10 at δ = 1e-7; all with banded noise.

Writes NAME-TASK.csv (every run) and NAME.csv and .md (a table and a verdict) to
output/papers/at_length.
"""

import dataclasses
import functools
import itertools
import os
import pathlib
import sys
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import report

import dp_keras_opt as dp
from dp_keras_opt.noise import schedules
from dp_keras_opt.optimizers import moments
from dp_keras_opt.tuning import runs
from dp_keras_opt.tuning.candidates import Candidate, candidate, get

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import choosing  # noqa: E402
import doppler  # noqa: E402
import language_model  # noqa: E402
from example_data import branches, digits, fashion, prose, testaments  # noqa: E402

LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
BANDS = 8
WORDS, TAGS, LENGTH = 10_000, 500, 32


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What is compared.

    Attributes:
        tasks: function without arguments that makes each `Task`, by its name.
        candidates: of all tasks.
        order: (what should be better, than what), by the paper.
        epsilons: function of a task that returns the budgets.
        delta: function of a task.
        claim: of the paper, in a sentence.
    """

    tasks: dict[str, Callable]
    candidates: list[Candidate]
    order: list[tuple[str, str]]
    epsilons: Callable
    delta: Callable
    claim: str


def pictures(features, steps, batch_size, start=None):
    """Clothes at half their resolution, and a classifier; accuracy.

    Args:
        features: function of the pictures that gives what the logits are linear in.
        steps: of a run.
        batch_size: B.
        start: None, or function that returns the initial weights of all but the logits.
    """
    (x, y), test = fashion()
    train, validation = choosing.parts(x, y, [None, 6_000])

    def build():
        model = classifier(features)
        if start is not None:
            model.set_weights([*start(), *model.get_weights()[-2:]])
        return model

    return dp.tuning.Task(
        build, train, validation, LOGITS, batch_size=batch_size, steps=steps, test=test,
        score="accuracy", higher_is_better=True, unit="picture",
    )  # fmt: skip


def classifier(features):
    """A model of pictures of 28 × 28 pixels."""
    inputs = keras.Input((28, 28, 1))
    halved = keras.layers.AveragePooling2D(2)(inputs)
    x = features(keras.layers.Rescaling(2.0, offset=-1.0)(halved))
    return keras.Model(inputs, keras.layers.Dense(10)(x))


@functools.cache
def pretrained():
    """The weights of the small CNN, but for the logits, after training on digits."""
    x, y = digits()
    keras.utils.set_random_seed(0)
    model = classifier(doppler.small_cnn)
    model.compile("adam", LOGITS)
    model.fit(keras.ops.image.resize(x, (28, 28)), y, epochs=20, batch_size=32, verbose=0)
    return model.get_weights()[:-2]


def filtered():
    """DOPPLER."""
    adam = {"second_moment": moments.BiasCorrected(floor=1.0), "space": get("DPAdam").space}
    return Experiment(
        {
            "cnn": lambda: pictures(doppler.small_cnn, 4_000, 500),
            "vit": lambda: pictures(doppler.vit, 2_000, 500),
            "pretrained": lambda: pictures(doppler.small_cnn, 4_000, 500, pretrained),
        },
        [
            get("DPSGD"),
            get("DPSGD, filter"),
            get("DPAdam, bias-corrected"),
            candidate(
                "DPAdam, bias-corrected, filter", "DPAdam", gradient_filter="first_order_v1", **adam
            ),
        ],
        [
            ("DPSGD, filter", "DPSGD"),
            ("DPAdam, bias-corrected, filter", "DPAdam, bias-corrected"),
        ],
        lambda task: (1.0, 3.0, 8.0),
        lambda task: len(task.train[1]) ** -1.1,
        "With a low-pass filter the test accuracy is 3 to 10 points higher, at every ε.",
    )


@keras.saving.register_keras_serializable(package="papers")
class InverseRoot(keras.optimizers.schedules.LearningRateSchedule):
    """η·√20/√(20 + t)."""

    def __init__(self, rate):
        self.rate = rate

    def __call__(self, step):
        return self.rate * (20 / (20 + keras.ops.cast(step, "float32"))) ** 0.5

    def get_config(self):
        return {"rate": self.rate}


def uneven():
    """ADP-SGD, whose levels are rounded: each of its own would be priced slowly."""

    def falling(run, learning_rate, noise_schedule=None):
        return dp.optimizers.DPSGD(
            InverseRoot(learning_rate), clip_norm=run.clip_norm, batch_size=run.batch_size,
            noise_schedule=noise_schedule,
        )  # fmt: skip

    def following(run, learning_rate):
        levels = (20 + np.arange(run.steps)) ** 0.25
        rounded = np.exp(0.15 * np.round(np.log(levels) / 0.15))
        return falling(run, learning_rate, schedules.Fixed(rounded))

    space = {"learning_rate": (0.3, 30.0)}
    return Experiment(
        {"cnn": lambda: pictures(doppler.small_cnn, 12_660, 256)},
        [Candidate("DP-SGD", falling, space), Candidate("ADP-SGD", following, space)],
        [("ADP-SGD", "DP-SGD")],
        lambda task: (1.0, 3.0),
        lambda task: 1e-5,
        "At equal ε and T, ADP-SGD's accuracy is mostly higher.",
    )


def tags():
    """Definitions of nouns as bags of words, and which of 500 branches they are in."""
    definitions, members = branches(TAGS)
    words = keras.layers.TextVectorization(WORDS, output_mode="int", output_sequence_length=LENGTH)
    words.adapt(definitions)  # what this reveals is not accounted: the words are public
    places = np.int32(words(definitions))
    train, validation, test = choosing.parts(places, members, [None, 4_000, 16_000])

    def build():
        inputs = keras.Input((LENGTH,), dtype="int32")
        rows = keras.layers.Embedding(WORDS, TAGS, embeddings_initializer="zeros")(inputs)
        there = keras.ops.cast(keras.ops.not_equal(inputs, 0), "float32")
        weights = there / keras.ops.maximum(keras.ops.sum(there, axis=1, keepdims=True), 1.0)
        logits = keras.ops.sum(rows * weights[..., None], axis=1)
        return keras.Model(inputs, keras.layers.Rescaling(LENGTH**0.5, offset=-4.0)(logits))

    return dp.tuning.Task(
        build, train, validation, keras.losses.BinaryCrossentropy(from_logits=True),
        batch_size=64, steps=10_000, test=test, clip_norm=0.25, unit="definition",
    )  # fmt: skip


def at_unit_noise(delta):
    """Function of a task that returns the ε of σ = 1."""

    def epsilons(task):
        optimizer = dp.optimizers.DPSGD(clip_norm=1.0, batch_size=64, noise_multiplier=1.0)
        sampling = dp.accounting.Sampling.poisson(len(task.train[1]), 64)
        return (float(f"{dp.accounting.epsilon(optimizer, sampling, task.steps, delta):.4g}"),)

    return epsilons


DELAYED = {
    "order": [("DP2RMSprop", "DPSGD"), ("DP2RMSprop", "DPRMSprop")],
    "claim": "DP² is better than DP-SGD and private RMSProp after as many steps.",
}


def delayed():
    """DP²."""
    names = ["DPSGD", "DP2RMSprop", "DPRMSprop", "DPSGD, momentum", "DPAdam, bias-corrected"]
    return Experiment(
        {"tags": tags},
        [get(name) for name in names],
        epsilons=at_unit_noise(1e-6),
        delta=lambda task: 1e-6,
        **DELAYED,
    )


def sentences():
    """Sentences as the words that are in them, and whether they are of the New Testament."""
    texts, is_new = testaments()
    words = keras.layers.TextVectorization(WORDS, output_sequence_length=2 * LENGTH)
    words.adapt(texts)  # what this reveals is not accounted: the words are public
    there = [np.union1d(row, [0, WORDS]) for row in np.int32(words(texts))]  # WORDS: in all of them
    places = keras.utils.pad_sequences(there, 2 * LENGTH, padding="post")
    train, validation, test = choosing.parts(places, is_new, [340 * 64, 2_795, None])

    def build():
        inputs = keras.Input((2 * LENGTH,), dtype="int32")
        rows = keras.layers.Embedding(WORDS + 1, 1, embeddings_initializer="zeros")(inputs)
        is_word = keras.ops.cast(keras.ops.not_equal(inputs, 0), "float32")
        return keras.Model(inputs, keras.ops.sum(rows * is_word[..., None], axis=1))

    return dp.tuning.Task(
        build, train, validation, keras.losses.BinaryCrossentropy(from_logits=True),
        batch_size=64, steps=100 * 340, score=keras.metrics.BinaryAccuracy(threshold=0.0),
        higher_is_better=True, test=test, unit="sentence", steps_per_execution=100,
        jit_compile=True,
    )  # fmt: skip


def logistic():
    """DP², with the ranges that its paper searches."""
    plain = {"learning_rate": (0.03, 5.0), "clip_norm": (0.1, 1.0)}
    adaptive = {"learning_rate": (1e-3, 3.0), "clip_norm": (0.1, 1.0), "epsilon": (1e-7, 1e-2)}
    both = plain | {
        "adaptive_learning_rate": (1e-3, 3.0), "adaptive_clip_norm": (0.1, 5.0),
        "epsilon": (1e-7, 1e-2), "delay": (0.005, 0.02),
    }  # fmt: skip
    spaces = {"DPSGD": plain, "DPRMSprop": adaptive, "DP2RMSprop": both}
    return Experiment(
        {"testaments": sentences},
        [candidate(name, name, space=space) for name, space in spaces.items()],
        epsilons=at_unit_noise(1e-5),
        delta=lambda task: 1e-5,
        **DELAYED,
    )


def large_transformer(width=160, depth=3, heads=5):
    """Causal, with a million weights."""
    layers = keras.layers
    tokens = keras.Input((language_model.LENGTH,), dtype="int32")
    places = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(language_model.VOCABULARY, width)(tokens)
    x = x + layers.Embedding(language_model.LENGTH, width)(places)
    for _ in range(depth):
        normal = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(heads, width // heads)
        x = x + attention(normal, normal, use_causal_mask=True)
        hidden = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(hidden)
    logits = layers.Dense(language_model.VOCABULARY)(layers.LayerNormalization()(x))
    return keras.Model(tokens, logits)


def characters():
    """Prose, character by character; cross-entropy."""
    train, validation, test = map(language_model.xy, language_model.sequences(prose()))

    def some(part, count):
        rows = np.random.default_rng(0).permutation(len(part[0]))[:count]
        return tuple(values[rows] for values in part)

    return dp.tuning.Task(
        large_transformer, train, some(validation, 1_000), LOGITS, batch_size=256, steps=2_000,
        test=some(test, 4_000), unit="sequence",
    )  # fmt: skip


def scaled():
    """Scale-then-privatize."""
    names = ["DPAdam, scale-then-privatize, banded noise", "DPAdam, banded noise",
             "DPAdam, bias-corrected, banded noise", "DPSGD, momentum, banded noise"]  # fmt: skip
    first, *others = names
    return Experiment(
        {"characters": characters},
        [get(name) for name in names],
        [(first, other) for other in others],
        lambda task: (10.0,),
        lambda task: 1e-7,
        "Scale-then-privatize is better than post-processing and DP-SGD, with banded noise, too.",
    )


EXPERIMENTS = {
    "filtered": filtered,
    "uneven": uneven,
    "logistic": logistic,
    "delayed": delayed,
    "scaled": scaled,
}


def shortened(experiment, steps):
    """The same with runs of as many steps."""

    def short(make):
        return lambda: dataclasses.replace(make(), steps=steps)

    tasks = {name: short(make) for name, make in experiment.tasks.items()}
    return dataclasses.replace(experiment, tasks=tasks)


def compared(name, experiment, options):
    """{task: its `Comparison`}; every run is written to a file as it ends."""
    found = {}
    for task_name, make in experiment.tasks.items():
        if options.tasks and task_name not in options.tasks:
            continue
        trials, seeds = (1, 2) if options.quick else (options.trials, options.seeds)
        task = make()
        epsilons = options.epsilons or experiment.epsilons(task)
        found[task_name] = dp.tuning.compare(
            task, experiment.candidates, epsilons, experiment.delta(task), trials=trials,
            seeds=seeds, name=task_name,
            results=options.output / f"{name}-{task_name}{'-quick' * options.quick}.csv",
        )  # fmt: skip
    return found


def table(found):
    """One row for each task, ε and candidate, the best first."""
    return [
        {"task": task, "ε": row["epsilon"], "optimizer": row["candidate"], "test": row["score"],
         "±": row["standard_error"], "setting": str(row["values"])}
        for task, comparison in found.items()
        for row in comparison.rows
    ]  # fmt: skip


def verdict(found, order):
    """Whether each claim was seen: more than two standard errors of the difference decide."""
    lines = []
    for task, comparison in found.items():
        sign = 1 if comparison.higher_is_better else -1
        cells = {(row["candidate"], row["epsilon"]): row for row in comparison.rows}
        for (better, worse), epsilon in (
            (pair, epsilon) for pair in order for epsilon in dict.fromkeys(e for _, e in cells)
        ):
            one, other = cells[better, epsilon], cells[worse, epsilon]
            gain = sign * (one["score"] - other["score"])
            error = float(np.hypot(one["standard_error"], other["standard_error"]))
            seen = report.seen(gain, error)
            lines.append(
                f"{task}, ε = {epsilon:g}: {better} better than {worse}: {seen} "
                f"({gain:+.4f} ± {error:.4f})"
            )
    return "\n\n" + "\n".join(f"- {line}." for line in lines)


def by_rdp(found, experiment):
    """What the accountant of the papers, Rényi differential privacy, says of the same runs."""
    lines = []
    for name, comparison in found.items():
        task = experiment.tasks[name]()
        delta = experiment.delta(task)
        epsilons = dict.fromkeys(row["epsilon"] for row in comparison.rows)
        for epsilon, each in itertools.product(epsilons, experiment.candidates):
            sampling, steps = task.batches(each).sampling, task.steps_of(each)
            optimizer = runs.optimizer_for(task, each, each.middle(), sampling, epsilon, delta)
            other = dp.accounting.epsilon(optimizer, sampling, steps, delta, accountant="rdp")
            said = f"ε = {epsilon:g} here is {other:.3g} by RDP, δ = {delta:.2g}"
            lines.append(f"- {name}, {each.name}: {said}.")
    return "\n\n" + "\n".join(lines)


def main(experiments=EXPERIMENTS, doc=__doc__, folder="at_length"):
    """Runs those of these experiments that the command names."""
    parser = report.parser(doc, folder)
    parser.add_argument(
        "experiments", nargs="*", default=list(experiments), help="else all of them"
    )
    parser.add_argument("--tasks", nargs="+", help="of an experiment; else all of them")
    parser.add_argument("--epsilons", nargs="+", type=float, help="else those of the paper")
    parser.add_argument("--trials", type=int, default=6, help="settings for each hyper-parameter")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of a run; else those of the paper")
    options = parser.parse_args()
    if unknown := set(options.experiments) - set(experiments):
        parser.error(f"no experiments: {unknown}; there are {', '.join(experiments)}")
    if options.seed:
        parser.error("a comparison counts its seeds from 0; --seeds says how many there are")
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.experiments:
        experiment = experiments[name]()
        if steps := BANDS if options.quick else options.steps:
            experiment = shortened(experiment, steps)
        found = compared(name, experiment, options)
        seen = verdict(found, experiment.order) + by_rdp(found, experiment)
        report.write(
            options.output, name + "-quick" * options.quick, table(found), experiment.claim, seen
        )


if __name__ == "__main__":
    main()
