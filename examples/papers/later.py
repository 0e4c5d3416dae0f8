"""What came after the five papers, tuned like everything else, at equal ε and equal compute.

    python examples/papers/later.py rows         # minutes to hours; goes on where it stopped
    python examples/papers/later.py others
    python examples/papers/later.py probed
    python examples/papers/later.py clipped
    python examples/papers/later.py searched

- rows: DP-AdaFEST: with noise on all rows of the tables in each step, and on chosen ones; ratings
  of films and definitions of nouns.
- others: filters that choose where gradients are taken, with one pass each (DiSK, FFTKF, DP-SAT) or
  two (DP-PMLF, in half the steps), geometries of the clip (a centre, AdaClip, which is DP-MacAdam
  with Adam, GeoClip), DP-Muon, and a schedule-free average, beside momentum and bias-corrected
  Adam; ratings of films, pictures of clothes, English text, visits to a doctor, incomes,
  definitions of nouns, and clothes by the record's features that need no network.
- probed: DP-KFC, whose geometry is that of pink noise with labels by chance, beside momentum;
  pictures of clothes.
- clipped: how much of what a searched clip norm of a geometry brings one brings without: momentum
  with smaller ones, also with planned noise, definitions of nouns.
- searched: the same by the record's features: clip norms that are searched around that of the task,
  beside planned noise, with which momentum is in front on the other tasks.

Tasks are those of choosing.py, and features; ε = 1, 3, 8 at δ = 1e-6. Each optimizer gets as many
trials for each of its hyper-parameters: see at_length.py, whose options these are.

Writes NAME-TASK.csv (every run) and NAME.csv and .md (a table and a verdict) to
output/papers/later.
"""

import dataclasses
import pathlib

import at_length
import choosing
import keras
import numpy as np

import dp_keras_opt as dp
from dp_keras_opt import filters, geometries
from dp_keras_opt.tuning.candidates import Candidate, get

BASELINES = ("DPSGD, momentum", "DPAdam, bias-corrected")
#: Of clip norms in units of the length that is expected.
LENGTHS = (0.3, 3.0)


def changed(optimizer, **settings):
    """A new optimizer with the same configuration but for these settings."""
    return type(optimizer).from_config(optimizer.get_config() | settings)


def experiment(tasks, candidates, order, claim):
    """An `at_length.Experiment` at the budgets of choosing.py."""
    return at_length.Experiment(
        tasks, candidates, order, lambda task: (1.0, 3.0, 8.0), lambda task: 1e-6, claim
    )


def rows():
    """DP-AdaFEST."""

    def chosen(plain):
        def make(run, threshold, noise_ratio, **values):
            sparse = dp.optimizers.SparseEmbeddings(threshold, noise_ratio=noise_ratio)
            return changed(plain.make(run, **values), sparse_embeddings=sparse)

        space = {"threshold": (0.5, 4.0), "noise_ratio": (1.0, 8.0)}
        return Candidate(f"{plain.name}, chosen rows", make, {**plain.space, **space})

    whole = [get("DPSGD"), get("DPAdam, bias-corrected")]
    some = [chosen(plain) for plain in whole]
    return experiment(
        {"ratings": choosing.ratings, "definitions": choosing.definitions},
        [*whole, *some],
        [(one.name, other.name) for one, other in zip(some, whole, strict=True)],
        "With noise on chosen rows alone, no worse, at gradients of a tenth of the size or less.",
    )


def variant(name, of, make_settings, passes=1, **space):
    """What `of` is, with the settings that `make_settings` makes of what is searched."""
    plain = get(of)

    def make(run, **values):
        own = {key: values.pop(key) for key in space}
        return changed(plain.make(run, **values), **make_settings(**own))

    return Candidate(name, make, {**plain.space, **space}, passes=passes)


def features():
    """Clothes by features of the record, linear, in as many steps as that has; accuracy.

    By its filters and scattering, which need no network; kept where records/fashion.py keeps them.
    """
    import fashion

    folder = pathlib.Path("output/records/fashion")
    folder.mkdir(parents=True, exist_ok=True)
    (x, y), test = fashion.pictures_as_features("no things, no clothes", folder)
    train, validation = choosing.parts(x, y, [None, fashion.PUBLIC])
    return dp.tuning.Task(
        lambda: fashion.classifier(fashion.FEATURES), train, validation, at_length.LOGITS,
        batch_size=round(fashion.RATE * len(train[1])), steps=fashion.STEPS, test=test,
        score="accuracy", higher_is_better=True, clip_norm=fashion.CLIP_NORM, unit="picture",
    )  # fmt: skip


def others():
    """All but sparse embeddings, and geometries that need probes."""

    def disk(kappa):
        return {"gradient_filter": filters.DiSK(kappa, gamma=None)}

    def fftkf(kappa, suppression):
        return {"gradient_filter": filters.FFTKF(kappa, gamma=None, suppression=suppression)}

    def sharpness_aware(radius):
        return {"gradient_filter": filters.SharpnessAware(radius)}

    def per_example(beta):
        return {"gradient_filter": filters.PerExampleMomentum(2, beta)}

    def in_geometry(geometry):
        return lambda clip_norm: {"geometry": geometry, "clip_norm": clip_norm}

    def wrapped(inner):
        def make(run, learning_rate):
            return dp.optimizers.DPOptimizer(
                inner(learning_rate), clip_norm=run.clip_norm, batch_size=run.batch_size
            )

        return make

    momentum, _ = BASELINES
    ada, geo = in_geometry(geometries.AdaClip()), in_geometry(geometries.GeoClip(8))
    found = [
        variant("DPSGD, DiSK", "DPSGD", disk, kappa=(0.1, 0.9)),
        variant("DPSGD, FFTKF", "DPSGD", fftkf, kappa=(0.1, 0.9), suppression=(0.1, 0.9)),
        variant(f"{momentum}, sharpness-aware", momentum, sharpness_aware, radius=(0.01, 1.0)),
        variant(f"{momentum}, around the mean", momentum, lambda: {"geometry": geometries.Mean()}),
        variant(f"{momentum}, AdaClip", momentum, ada, clip_norm=LENGTHS),
        variant("DPAdam, AdaClip", "DPAdam", ada, clip_norm=LENGTHS),
        variant(f"{momentum}, GeoClip", momentum, geo, clip_norm=LENGTHS),
        Candidate(
            "DPOptimizer, Muon", wrapped(keras.optimizers.Muon), {"learning_rate": (1e-3, 0.1)}
        ),
        variant("DPMuon, bias-corrected", "DPMuon", lambda: {"bias_correction": True}),
        variant(
            f"{momentum}, per-example momentum", momentum, per_example, passes=2, beta=(0.1, 1.0)
        ),
        Candidate(
            "DPOptimizer, schedule-free", wrapped(keras.optimizers.ScheduleFreeAdamW),
            {"learning_rate": (1e-3, 0.1)},
        ),
    ]  # fmt: skip
    return experiment(
        {
            name: choosing.EVERY[name]
            for name in ("ratings", "clothes", "text", "tabular", "incomes", "definitions")
        }
        | {"features": features},
        [*map(get, BASELINES), *found],
        [(each.name, baseline) for each in found for baseline in BASELINES],
        "Each is better than training without it.",
    )


def probed():
    """DP-KFC."""
    momentum, _ = BASELINES
    name = f"{momentum}, Kronecker-factored"
    noise = geometries.pink_noise(256, (28, 28, 1), seed=0)
    labels = np.random.default_rng(0).integers(0, 10, len(noise))

    def of_noise(damping):
        return {"geometry": geometries.KroneckerFactored((noise, labels), damping)}

    return experiment(
        {"clothes": choosing.clothes},
        [get(momentum), variant(name, momentum, of_noise, damping=(0.01, 1.0))],
        [(name, momentum)],
        "In the geometry of noise, better than as gradients are.",
    )


def clipped():
    """Smaller clip norms than that of the task, 1."""
    momentum, _ = BASELINES

    def smaller(name, norm):
        plain = get(name)

        def make(run, **values):
            return plain.make(dataclasses.replace(run, clip_norm=norm), **values)

        return dataclasses.replace(plain, name=f"{name}, C = {norm}", make=make)

    found = [smaller(momentum, 0.3), smaller(momentum, 0.1)]
    return experiment(
        {"definitions": choosing.definitions},
        [*found, smaller(f"{momentum}, planned noise", 0.1)],
        [(found[1].name, found[0].name)],
        "The smaller, the better.",
    )


def searched():
    """As many trials for the clip norm as a geometry gets, in units of that of the task."""

    def wider(name):
        plain = get(name)

        def make(run, clip_norm, **values):
            norm = clip_norm * run.clip_norm
            return plain.make(dataclasses.replace(run, clip_norm=norm), **values)

        space = {**plain.space, "clip_norm": LENGTHS}
        return dataclasses.replace(plain, name=f"{name}, C searched", make=make, space=space)

    found = [wider(name) for name in BASELINES]
    planned = [get(f"{BASELINES[0]}, planned noise{rest}") for rest in ("", ", average")]
    return experiment(
        {"features": features},
        [*found, *planned],
        [(one.name, other.name) for one in found for other in planned],
        "A clip norm that is searched brings more than planned noise.",
    )


EXPERIMENTS = {
    "rows": rows,
    "others": others,
    "probed": probed,
    "clipped": clipped,
    "searched": searched,
}

if __name__ == "__main__":
    at_length.main(EXPERIMENTS, __doc__, "later")
