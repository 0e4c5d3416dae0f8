"""Audits of every optimizer, and of sabotaged ones: `python -m tests.nightly.audits`.

The model is a table with one weight for each example, all far from their targets: the clipped
gradient of a canary is of full length at every step, and has its weight to itself. No canary leaks
more, whatever the optimizer does with the releases, and what is seen of one says nothing of others.
"""

import argparse
import contextlib
import csv
import functools
import pathlib
import time
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from scipy import linalg, stats

import dp_keras_opt as dp
from dp_keras_opt import audit, noise
from dp_keras_opt import optimizers as o
from dp_keras_opt.accounting import Sampling
from dp_keras_opt.noise.source import NoiseSource
from dp_keras_opt.optimizers import moments
from dp_keras_opt.optimizers.catalog import CATALOG

CONFIDENCE = 0.999
#: μ and δ of the audits: with so much noise, full batches are μ-Gaussian differentially private.
#: A small δ suits one run with many canaries, a large one many runs with one.
ONE_RUN, MANY_RUNS = (1.0, 1e-6), (1.5, 0.2)
FEW = 3  # ordinary examples beside the canaries


# What to look at beside the matched filter: faults of the noise leave traces of their own.


def closest(estimates, stds):
    """Whether some step shows the canary, or its absence, without noise."""
    near = [np.min(np.abs(estimates - there), axis=(0, 1)) for there in (0.0, 1.0)]
    return near[0] - near[1]


def spread(estimates, stds):
    """How much the estimates differ from step to step: noise that is the same in all falls out."""
    return np.max(np.ptp(estimates, axis=0), axis=0)


def whitened(estimates, stds):
    """The matched filter against noise M⁻¹z, M the root of 3 prefix sums, for a canary in all."""
    matrix = linalg.toeplitz([1, 1 / 2, 3 / 8], np.zeros(3))
    return np.tensordot(matrix.T @ matrix @ np.ones(3), estimates[:, 0], 1)


#: How rows are chosen: so that nearly half of them are, with a canary or without.
CHOICE = {"threshold": 0.5, "noise_ratio": 1.0}


def of_chosen_rows(estimates, stds):
    """The logarithm of the likelihood ratio of which rows were chosen, and of what they hold."""
    value, chosen = estimates[:, 0], estimates[:, 1]
    on_sum = stds[:, 0]
    shift, tau = 1 / (CHOICE["noise_ratio"] * on_sum), CHOICE["threshold"]
    left_out = stats.norm.logcdf(tau - shift) - stats.norm.logcdf(tau)
    taken = stats.norm.logcdf(shift - tau) - stats.norm.logcdf(-tau) + (value - 0.5) / on_sum**2
    return np.sum(np.where(chosen > 0, taken, left_out), axis=0)


# How batches are drawn: functions of the number of examples, to (sampling, steps, batches).


def full(n, steps=3):
    def batches(data):
        repeated = tf.data.Dataset.from_tensors(data).repeat(steps)
        return dp.data.assume_sampling(repeated, Sampling.full(n))

    return Sampling.full(n), steps, batches


def public(n):
    sampling, steps, private = full(n)
    others = np.arange(n - FEW, n, dtype="int32"), np.zeros((FEW, 1), "float32")
    return sampling, steps, lambda data: dp.data.with_public(private(data), others)


def replaced(n):
    sampling = Sampling.full(n, adjacency="replace_one")

    def batches(data):
        repeated = tf.data.Dataset.from_tensors(data).repeat(3)
        return dp.data.assume_sampling(repeated, sampling)

    return sampling, 3, batches


def poisson(n):
    def batches(data):
        return dp.data.poisson_batches(data, n // 2, 4, physical_batch_size=n)

    return Sampling.poisson(n, n // 2), 4, batches


def of_users(n):
    """Each user has the same example twice, and is in all batches."""

    def batches(data):
        twice = keras.tree.map_structure(lambda values: np.concatenate([values, values]), data)
        users = np.tile(np.arange(n), 2)
        return dp.data.poisson_users(twice, users, n, 4, examples_per_user=2)

    return Sampling.poisson(n, n, unit="user", examples_per_unit=2), 4, batches


def in_turns(n):
    def batches(data):
        return dp.data.cyclic_poisson(
            data, n // 4, 2, 4, physical_batch_size=n, adjacency="zero_out", order_seed=1
        )

    return Sampling.cyclic_poisson(n, n // 4, 2, "zero_out"), 4, batches


def fixed_order(n):
    def batches(data):
        return dp.data.fixed_order_epochs(data, -(-n // 2), adjacency="zero_out", order_seed=1)

    return Sampling.fixed_order(n, -(-n // 2), "zero_out"), 4, batches


# Models: what is put into `DPModel`.


def table(n):
    inputs = keras.Input((), dtype="int32")
    return inputs, keras.layers.Embedding(n, 1)(inputs)


def kernel(n):
    """The same weights as a kernel, which has sides; as large as the square of n."""
    inputs = keras.Input((), dtype="int32")
    rows = keras.layers.CategoryEncoding(n, output_mode="one_hot")(inputs)
    return inputs, keras.layers.Dense(1, use_bias=False)(rows)


def kronecker_factored(batch_size, **private):
    """Shorter or longer along a weight, by how often it is probed: up to three times."""
    probes = np.concatenate([np.arange(0, batch_size, each, dtype="int32") for each in (1, 2, 3)])
    targets = np.zeros((len(probes), 1), "float32")
    geometry = dp.geometries.KroneckerFactored((probes, targets))
    return o.DPSGD(0.1, geometry=geometry, batch_size=batch_size, **private)


def adam(second_moment, **kwargs):
    return lambda **private: o.DPAdam(0.01, second_moment=second_moment, **kwargs, **private)


def halving():
    return keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)


#: With so little noise on the counts, they have about a quarter of what is spent, or half.
FOUND = {"clip_norm": dp.clipping.Quantile(0.5, initial=1.0, count_noise=1.3)}
DELAYED = {"delay": (1, 1), "adaptive_clip_norm": 1.0}
#: name: (function of the private arguments to an optimizer, how batches are drawn[, score])
CASES = {
    "DPSGD": (o.DPSGD, full),
    "DPSGD, Poisson batches": (o.DPSGD, poisson, audit.likelihood_ratio(0.5)),
    "DPSGD, users": (o.DPSGD, of_users),
    "DPSGD, replace_one": (o.DPSGD, replaced),
    "DPSGD, momentum": (lambda **p: o.DPSGD(0.1, momentum=0.9, **p), full),
    "DPSGD, per layer": (lambda **p: o.DPSGD(0.1, clipping="per_layer", **p), full),
    "DPSGD, DiSK": (lambda **p: o.DPSGD(0.1, gradient_filter=dp.filters.DiSK(0.3), **p), full),
    "DPSGD, FFTKF": (
        lambda **p: o.DPSGD(0.1, gradient_filter=dp.filters.FFTKF(0.3, suppression=0.9), **p),
        full,
    ),
    "DPAdam, sharpness-aware": (
        lambda **p: o.DPAdam(0.01, gradient_filter=dp.filters.SharpnessAware(0.1), **p),
        full,
    ),
    "DPSGD, momentum of each example": (
        lambda **p: o.DPSGD(0.1, gradient_filter=dp.filters.PerExampleMomentum(3), **p),
        full,
    ),
    "DPSGD, around the mean": (
        lambda **p: o.DPSGD(0.1, geometry=dp.geometries.Mean(), **p),
        full,
    ),
    "DPAdam, AdaClip": (
        lambda **p: o.DPAdam(0.01, geometry=dp.geometries.AdaClip(), **p),
        full,
    ),
    "DPSGD, GeoClip": (lambda **p: o.DPSGD(0.1, geometry=dp.geometries.GeoClip(2), **p), full),
    "DPSGD, KroneckerFactored": (kronecker_factored, full),
    "DPSGD, chosen rows": (
        lambda **p: o.DPSGD(0.1, sparse_embeddings=o.SparseEmbeddings(**CHOICE), **p),
        full,
        of_chosen_rows,
    ),
    "DPAdam, chosen rows, replace_one": (
        lambda **p: o.DPAdam(0.01, sparse_embeddings=o.SparseEmbeddings(**CHOICE), **p),
        replaced,
        of_chosen_rows,
    ),
    "DPSGD, normalize": (lambda **p: o.DPSGD(0.1, normalize=True, **p), full),
    "DPSGD, quantile": (lambda **p: o.DPSGD(0.1, **p | FOUND), full),
    "DPSGD, quantile per layer, replace_one": (
        lambda **p: o.DPSGD(0.1, clipping="per_layer", **p | FOUND),
        replaced,
    ),
    "DPAdam, quantile, users": (lambda **p: o.DPAdam(0.01, **p | FOUND), of_users),
    "DPSGD, noise schedule": (
        lambda **p: o.DPSGD(0.1, noise_schedule=[1.0, 0.7, 1.5], **p),
        full,
    ),
    "DPSGD, filter": (lambda **p: o.DPSGD(0.1, gradient_filter="first_order_v1", **p), full),
    "DPSGD, Laplace": (lambda **p: o.DPSGD(0.1, noise="laplace", **p), full),
    "DPSGD, square root": (
        lambda **p: o.DPSGD(0.1, noise=noise.SquareRootFactorization(3, 3), **p),
        full,
        whitened,
    ),
    "DPSGD, tree": (lambda **p: o.DPSGD(0.1, noise=noise.TreeAggregation(3), **p), full),
    "DPSGD, banded, fixed order": (
        lambda **p: o.DPSGD(0.1, noise=noise.BandedMatrix(4, 2), **p),
        fixed_order,
    ),
    "DPSGD, banded, in turns": (
        lambda **p: o.DPSGD(0.1, noise=noise.BandedMatrix(4, 2), **p),
        in_turns,
    ),
    "DPAdam": (adam("post_processing"), full),
    "DPAdam, Poisson batches": (
        adam("post_processing"),
        poisson,
        audit.likelihood_ratio(0.5),
    ),
    "DPAdam, bias_corrected": (adam("bias_corrected"), full),
    "DPAdam, independent": (adam("independent"), full),
    "DPAdam, joint": (adam(moments.Joint(1.0)), full),
    "DPAdam, scale_then_privatize": (adam("scale_then_privatize"), full),
    "DPAdam, side_information": (adam("side_information"), public),
    "DPAdam, amsgrad": (adam("post_processing", amsgrad=True), full),
    "DPRMSprop": (lambda **p: o.DPRMSprop(0.01, **p), full),
    "DPRMSprop, scale_then_privatize": (
        lambda **p: o.DPRMSprop(0.01, second_moment="scale_then_privatize", **p),
        full,
    ),
    "DPAdagrad": (lambda **p: o.DPAdagrad(0.01, **p), full),
    "DPAdagrad, independent": (
        lambda **p: o.DPAdagrad(0.01, second_moment="independent", **p),
        full,
    ),
    "DPYogi": (lambda **p: o.DPYogi(0.01, **p), full),
    "DP2RMSprop": (lambda **p: o.DP2RMSprop(0.01, 0.01, **DELAYED, **p), full),
    "DP2RMSprop, extra_query": (
        lambda **p: o.DP2RMSprop(0.01, 0.01, ablation="extra_query", **DELAYED, **p),
        full,
    ),
    "DP2RMSprop, noise_before_preconditioning": (
        lambda **p: o.DP2RMSprop(
            0.01, 0.01, ablation="noise_before_preconditioning", **DELAYED, **p
        ),
        full,
    ),
    "DP2Adagrad": (lambda **p: o.DP2Adagrad(0.01, 0.01, **DELAYED, **p), full),
    "DP2Yogi": (lambda **p: o.DP2Yogi(0.01, 0.01, **DELAYED, **p), full),
    "ADPSGD": (lambda **p: o.ADPSGD(halving(), 3, **p), full),
    "ADPAdagradNorm": (lambda **p: o.ADPAdagradNorm(steps=3, growth=10.0, **p), full),
    "DPHeavyBall": (o.DPHeavyBall, full),
    "DPHeavyBall, Laplace": (lambda **p: o.DPHeavyBall(noise="laplace", **p), full),
    "DPNesterov": (o.DPNesterov, full),
    "DPMultistageNesterov": (
        lambda **p: o.DPMultistageNesterov(strong_convexity=0.5, smoothness=2.0, **p),
        full,
    ),
    "DPGaLore": (lambda **p: o.DPGaLore(0.01, rank=1, update_gap=2, **p), full),
    "DPOptimizer, Muon": (lambda **p: o.DPOptimizer(keras.optimizers.Muon(1e-3), **p), full),
    "DPMuon, bias-corrected": (lambda **p: o.DPMuon(1e-3, bias_correction=True, **p), full),
    "DPOptimizer, Lion": (lambda **p: o.DPOptimizer(keras.optimizers.Lion(1e-3), **p), full),
    "AdaDPS": (lambda **p: o.AdaDPS(0.01, **p), public),
    "PDADPMD": (lambda **p: o.PDADPMD(0.01, steps=3, **p), public),
    "SubspaceAdagrad": (lambda **p: o.SubspaceAdagrad(0.01, rank=2, **p), public),
}
#: Those of another model than a table, and how many canaries it has room for.
KERNELS = {"DPSGD, KroneckerFactored": 1500}
for _entry in CATALOG:  # what is not listed above, with its defaults
    _make = functools.partial(_entry.cls, **_entry.arguments)
    CASES.setdefault(_entry.name, (_make, public if _entry.make().needs_public else full))


def canary_releases(model, canaries, queries, released):
    """`audit.inclusion_estimates` of this model, written down anew, and for squares as well."""
    optimizer, x = model.optimizer, canaries.x
    weight = tf.gather(model.trainable_variables[0], x)[:, 0]
    weights = model.trainable_variables[0].shape[0]
    sign = tf.sign(weight - canaries.y[:, 0])  # of the gradient, which is longer than its bound
    estimates, stds = [], []
    for part, answer in zip(optimizer.releases, released, strict=True):
        if part.is_public:
            continue
        query = queries[part.query]
        share = query.sensitivity / optimizer.batch_size  # what one example makes of the mean
        mean = tf.gather(tf.convert_to_tensor(answer.value[0]), x)[:, 0]
        estimates.append(mean / share * (1.0 if query.square else sign))
        stds.append(answer.noise_std / share * tf.ones_like(sign))
        if isinstance(answer.value[0], tf.IndexedSlices):  # which rows were chosen
            rows = answer.value[0].indices
            chosen = tf.math.unsorted_segment_sum(tf.ones_like(rows), rows, weights)
            estimates.append(tf.cast(tf.gather(chosen, x), tf.float32))
            stds.append(tf.ones_like(sign))
        if (
            answer.shares is not None and x.shape[0] == 1
        ):  # all are clipped, so each of the FEW is −½
            counts = optimizer.batch_size * (answer.shares - 0.5)
            estimates.append(-2 * counts - FEW)
            stds.append(2 * part.count_noise * tf.ones_like(sign))
        if answer.square is not None:
            estimates.append(tf.gather(answer.square[0], x)[:, 0] / share**2)
            stds.append(answer.noise_std / part.joint.weight**0.5 / share**2 * tf.ones_like(sign))
    return tf.stack(estimates), tf.stack(stds)


def run(name, runs=1, canaries=10_000, seed=None, confidence=CONFIDENCE):
    """The audit of one case, by one run with many canaries or many runs with one."""
    make_optimizer, drawing, *score = CASES[name]
    count = min(canaries, KERNELS.get(name, canaries)) if runs == 1 else 1
    n = count + FEW
    mu, delta = ONE_RUN if runs == 1 else MANY_RUNS
    sampling, steps, batches = drawing(n)

    def make_model():
        private = {"clip_norm": 1.0, "noise_multiplier": steps**0.5 / mu, "seed": seed}
        optimizer = make_optimizer(batch_size=sampling.batch_size, **private)
        model = dp.DPModel(*(kernel if name in KERNELS else table)(n))
        model.compile(optimizer, "mse")
        return model

    x, y = np.arange(n, dtype="int32"), np.full((n, 1), 10.0, "float32")
    scores = (*(score or [audit.matched_filter]), closest, spread)
    return audit.canary_audit(
        make_model,
        (x[count:], y[count:]),
        (x[:count], y[:count]),
        delta=delta,
        batches=batches,
        epochs=2 if drawing is fixed_order else 1,
        score=scores[:1] if runs == 1 else scores,  # where looking at more costs nothing
        replacements=(x[:count], -y[:count]) if drawing is replaced else None,
        runs=runs,
        guesses=(1.0, 1 / 16),
        confidence=confidence,
        accountant="pld",
        observe=canary_releases,
        seed=seed,
    )


# Sabotage.


@contextlib.contextmanager
def half_the_noise():
    draw = noise.Gaussian.unit_noise

    def halved(self, shapes, source, stream=0):
        return [0.5 * z for z in draw(self, shapes, source, stream)]

    with mock.patch.object(noise.Gaussian, "unit_noise", halved):
        yield


@contextlib.contextmanager
def no_clipping():
    def keep(norm, bound, query):
        return tf.ones_like(norm)

    with mock.patch("dp_keras_opt.clipping.clipped_sum.clip_factor", keep):
        yield


@contextlib.contextmanager
def noise_reused():
    """The same draw at every step."""

    def again(self, distribution, shape):
        return tf.random.stateless_normal(shape, seed=(1, 2))

    with mock.patch.object(NoiseSource, "draw", again):
        yield


@contextlib.contextmanager
def one_step_without_noise():
    def alpha(self, step):
        return tf.cast(tf.not_equal(step, 1), tf.float32)

    with mock.patch.object(noise.schedules.Constant, "alpha", alpha):
        yield


@contextlib.contextmanager
def no_noise_on_counts():
    draw = noise.Gaussian.unit_noise

    def silenced(self, shapes, source, stream=0):
        *on_sum, on_counts = draw(self, shapes, source, stream)
        return [*on_sum, 0 * on_counts]

    with mock.patch.object(noise.Gaussian, "unit_noise", silenced):
        yield


@contextlib.contextmanager
def no_noise_on_rows():
    """None on the counts by which rows are chosen."""
    draw = noise.Gaussian.unit_noise

    def silenced(self, shapes, source, stream=0):
        drawn = draw(self, shapes, source, stream)
        return [0 * z for z in drawn] if stream == (0, 1) else drawn

    with mock.patch.object(noise.Gaussian, "unit_noise", silenced):
        yield


SABOTAGE = {
    "half the noise": half_the_noise,
    "no clipping": no_clipping,
    "noise reused": noise_reused,
    "one step without noise": one_step_without_noise,
}
SABOTAGED = ("DPSGD", "DPAdam", "DP2RMSprop", "DPNesterov", "DPSGD, DiSK", "DPSGD, chosen rows",
             "DPSGD, KroneckerFactored")  # fmt: skip


def audits(only=()):
    """(name of the case, name of the sabotage, function that does it) of all audits, or of some."""
    honest = [(name, "", contextlib.nullcontext) for name in CASES]
    faults = [(name, fault, how) for name in SABOTAGED for fault, how in SABOTAGE.items()]
    faults.append(("DPSGD, quantile", "no noise on counts", no_noise_on_counts))
    faults.append(("DPSGD, chosen rows", "no noise on the choice", no_noise_on_rows))
    return [
        each
        for each in honest + faults
        if not only or any(part in ", ".join(each[:2]) for part in only)
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=600, help="runs with the canary and without")
    parser.add_argument("--canaries", type=int, default=10_000, help="of an audit by one run")
    parser.add_argument("--only", nargs="*", help="parts of the names of the audits to do")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("output"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    table, failures = [], []
    for name, fault, sabotage in audits(arguments.only):
        row, reports, start = {"audit": name, "sabotage": fault}, [], time.time()
        for kind, runs in (("one run", 1), ("many runs", arguments.runs)):
            keras.utils.clear_session()
            with sabotage():
                report = run(name, runs, arguments.canaries)
            reports.append(report)
            row |= {
                f"{kind}: claim": round(report.epsilon, 3),
                f"{kind}: bound": round(report.lower_bound, 3),
                f"{kind}: bound on μ": round(report.gaussian_mu, 3),
                f"{kind}: AUC": round(report.auc, 3),
                f"{kind}: above risk": "" if report.excess is None else round(report.excess, 3),
            }
        caught = not all(report.passed for report in reports)
        row["refuted"] = "yes" if caught else "no"
        row["seconds"] = round(time.time() - start)
        table.append(row)
        if caught != bool(fault):
            failures.append(row)
        print(*row.values(), sep=" | ", flush=True)
        _write(table, arguments.output)
    print(f"{len(table)} audits, {len(failures)} not as they should be; confidence {CONFIDENCE}.")
    raise SystemExit(bool(failures))


def _write(table, folder):
    lines = [list(table[0]), ["---"] * len(table[0]), *([*row.values()] for row in table)]
    text = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
    (folder / "audit.md").write_text(text + "\n", encoding="utf-8")
    with (folder / "audit.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()
