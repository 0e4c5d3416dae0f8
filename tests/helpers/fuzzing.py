"""Random configurations: each satisfies sensitivity and noise scale, or is refused with a reason.

`check` trains two steps. In the second, two batches differ by one example (by one user with all
their rows, where these are clipped as one), and the noise is known:
all zeros, or all ones. Then the difference between the batches is what the sensitivity bounds, and
the difference between the noises is its scale; both are compared with what the ledger accounts for.
"""

import dataclasses
import traceback

import keras
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

import dp_keras_opt as dp
from dp_keras_opt import noise
from dp_keras_opt.accounting import Sampling
from dp_keras_opt.accounting.sampling import KINDS
from dp_keras_opt.data import RowInfo
from dp_keras_opt.noise.gaussian import NORMAL_AND_REST

N, BATCH = 48, 8
OWN = 3  # rows of a user, where users are clipped as one
REFUSALS = (ValueError, TypeError, dp.PrivacyBudgetError)
_NO_RULES = ("GaLore", "PrivateOptimizer", "SparseEmbeddings", "get", "moments")
_SIGMA = 1.3
_COUNT_NOISE = 2.1


def optimizer_of(name, arguments, rule):
    cls = getattr(dp.optimizers, name)
    own = {
        "DP2RMSprop": {"delay": 1, "adaptive_clip_norm": 0.02, "epsilon": 1e-2},
        "DP2Adagrad": {"delay": 1, "adaptive_clip_norm": 0.02, "epsilon": 1e-2},
        "DP2Yogi": {"delay": 1, "adaptive_clip_norm": 0.02, "epsilon": 1e-2},
        "ADPSGD": {"learning_rate": 0.1, "steps": 12},
        "ADPAdagradNorm": {"steps": 12},
        "DPNesterov": {"strong_convexity": 0.5},
        "DPMultistageNesterov": {"strong_convexity": 0.5, "smoothness": 2.0},
        "DPGaLore": {"rank": 2, "update_gap": 1},
        "PDADPMD": {"steps": 12},
        "SubspaceAdagrad": {"rank": 3},
    }.get(name, {})
    if name == "DPOptimizer":
        return cls(keras.optimizers.get(rule["wrapped"]), **arguments)
    if name in ("DPAdam", "DPAdagrad", "DPRMSprop", "DPYogi"):
        own["second_moment"] = rule["second_moment"]()
    if name.startswith("DP2"):
        own["ablation"] = rule["ablation"]
    return cls(**own, **arguments)


RULES = [name for name in dp.optimizers.__all__ if name not in _NO_RULES]
_adjacencies = ["add_or_remove_one", "zero_out", "replace_one"]
_moments = {
    "post_processing": lambda adjacency: "post_processing",
    "bias_corrected": lambda adjacency: "bias_corrected",
    "scale_then_privatize": lambda adjacency: dp.optimizers.moments.ScaleThenPrivatize(0.1),
    "independent": lambda adjacency: dp.optimizers.moments.Independent(BATCH, adjacency),
    "joint": lambda adjacency: dp.optimizers.moments.Joint(2.0, BATCH, adjacency),
    "noiseless": lambda adjacency: "noiseless",
}
_mechanisms = {
    "gaussian": noise.Gaussian,
    "laplace": noise.Laplace,
    "banded": lambda: noise.BandedMatrix(12, 3),
    "square_root": lambda: noise.SquareRootFactorization(12, 6),
    "buffered_toeplitz": lambda: noise.BufferedToeplitz(12),
    "inverse_square_root": lambda: noise.BandedInverseSquareRoot(12, 3),
    "lambda": lambda: noise.LambdaCGD(12),
    "tree": lambda: noise.TreeAggregation(12),
    "matrix": lambda: noise.from_matrix(np.tril(np.ones((12, 12))) + np.eye(12)),
}
_clip_norms = {
    "constant": lambda: 0.02,
    "moving": lambda: keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.2, 0.02]),
    "found": lambda: dp.clipping.Quantile(0.3, initial=0.02, count_noise=_COUNT_NOISE),
}
_geometries = {
    "Mean": lambda c: dp.geometries.Mean(),
    "AdaClip": lambda c: dp.geometries.AdaClip(),
    "GeoClip": lambda c: dp.geometries.GeoClip(2),
    "KroneckerFactored": lambda c: dp.geometries.KroneckerFactored(_arrays(c)[:2]),
}
_samplings = {
    "poisson": lambda a: Sampling.poisson(N, BATCH, a),
    "balls_in_bins": lambda a: Sampling.balls_in_bins(N, BATCH, a),
    "cyclic_poisson": lambda a: Sampling.cyclic_poisson(N, BATCH, 4, a),
    "without_replacement": lambda a: Sampling.without_replacement(N, BATCH, a),
    "full": lambda a: Sampling.full(BATCH, a),
    "shuffled": lambda a: Sampling.shuffled(N, BATCH, a),
    "fixed_order": lambda a: Sampling.fixed_order(N, BATCH, a),
}

configurations = st.fixed_dictionaries(
    {
        "rule": st.sampled_from(RULES),
        "second_moment": st.sampled_from(sorted(_moments)),
        "ablation": st.sampled_from([None, "noise_before_preconditioning", "extra_query"]),
        "wrapped": st.sampled_from(["lion", "nadam", "adamw", "ftrl", "adafactor"]),
        "mechanism": st.sampled_from(sorted(_mechanisms)),
        "filter": st.sampled_from(
            [None, None, "f1", "f6", "optimal", "DiSK", "FFTKF", "momentum of each"]
        ),
        "geometry": st.sampled_from([None, None, *sorted(_geometries)]),
        "projection": st.booleans(),
        "sampling": st.sampled_from(sorted(_samplings)),
        "adjacency": st.sampled_from(_adjacencies),
        "clipping": st.sampled_from(["flat", "per_layer", "proportions"]),
        "normalize": st.booleans(),
        "schedule": st.sampled_from([None, None, [1.0, 0.5] * 6]),
        "clip_norm": st.sampled_from(["constant", "moving", "found"]),
        "policy": st.sampled_from(["float32", "mixed_bfloat16", "mixed_float16", "float64"]),
        "model": st.sampled_from(["dense", "words", "image"]),
        "secure": st.booleans(),
        "physical": st.sampled_from([None, 3]),
        "execution": st.sampled_from(["eager", "eager", "eager", "graph", "xla"]),
        "public": st.booleans(),
        "weighted": st.booleans(),
        "users": st.booleans(),
        "scale": st.sampled_from([1e-3, 1.0, 30.0]),
        "seed": st.integers(0, 10**6),
        "likely": st.sampled_from([True, True, True, False]),
    }
)


def _likely(c):
    """The configuration without the contradictions for which most of them would be refused."""
    c = dict(c)
    rule, own_schedule = c["rule"], c["rule"].startswith("ADP") or "Multistage" in c["rule"]
    if c["mechanism"] not in ("gaussian", "laplace"):
        c["schedule"] = None
        if own_schedule:
            c["mechanism"] = "gaussian"
        elif c["sampling"] == "cyclic_poisson":
            c["mechanism"] = "banded"
        else:
            c["sampling"] = "fixed_order"
    if own_schedule:
        c["schedule"] = None
    if c["sampling"] == "balls_in_bins":
        c["mechanism"] = "gaussian"
    allowed = KINDS[c["sampling"]].adjacencies
    if c["adjacency"] not in allowed:
        c["adjacency"] = allowed[0]
    c["public"] |= rule in ("AdaDPS", "PDADPMD", "SubspaceAdagrad")
    c["projection"] &= rule in ("DPSGD", "DPAdam", "DPAdagrad", "DPRMSprop", "DPYogi")
    if c["second_moment"] in ("independent", "joint") and c["mechanism"] == "laplace":
        c["mechanism"] = "gaussian"
    if c["second_moment"] in ("independent", "joint"):
        c["clip_norm"] = "constant"
    if c["second_moment"] == "independent" and rule != "DPAdam":
        c["second_moment"] = "post_processing"
    if c["second_moment"] == "bias_corrected" and rule == "DPYogi":
        c["second_moment"] = "post_processing"
    takes = ("DPSGD", "DPAdam", "DPAdagrad", "DPRMSprop", "DPYogi", "DPNesterov", "DPOptimizer")
    if rule not in takes or c["second_moment"] not in ("post_processing", "bias_corrected"):
        c["geometry"] = None
    if c["geometry"] is not None:
        c["projection"] = False
    if c["geometry"] in ("AdaClip", "GeoClip") and c["mechanism"] not in ("gaussian", "laplace"):
        c["mechanism"] = "gaussian"
    if c["users"] and c["filter"] in ("DiSK", "FFTKF", "momentum of each"):
        c["filter"] = None
    if c["clip_norm"] == "found":
        c["normalize"] = False
        if c["mechanism"] == "laplace":
            c["mechanism"] = "gaussian"
        if rule.startswith("DP2") or rule == "SubspaceAdagrad":
            c["clip_norm"] = "moving"
    return c


def _model(c):
    """A small model, and whether its inputs are words."""
    dtype, layers = keras.DTypePolicy(c["policy"]), keras.layers
    if c["model"] == "words":
        inputs = keras.Input((5,), dtype="int32")
        x = layers.Embedding(7, 4, dtype=dtype)(inputs)
        x = layers.LayerNormalization(dtype=dtype)(x)
        x = layers.GlobalAveragePooling1D(dtype=dtype)(x)
    elif c["model"] == "image":
        inputs = keras.Input((4, 4, 1))
        x = layers.Conv2D(3, 2, activation="tanh", dtype=dtype)(inputs)
        x = layers.Flatten(dtype=dtype)(x)
    else:
        inputs = keras.Input((6,))
        x = layers.Dense(4, activation="tanh", dtype=dtype)(inputs)
    outputs = layers.Dense(3, name="last", dtype=dtype)(x)
    return dp.DPModel(inputs, outputs)


class _Known:
    """Puts constant draws in the place of a source's."""

    def __init__(self, source):
        self.value = tf.Variable(0.0, dtype=source.dtype)
        source.draw, source.draw_again = self.draw, self.draw_again

    def draw(self, distribution, shape):
        constant = tf.fill(shape, self.value.read_value())
        return (constant, tf.zeros_like(constant)) if distribution is NORMAL_AND_REST else constant

    def draw_again(self, distribution, shape, key):
        """λCGD makes all draws by keys: new ones with a rest, those of the step before without."""
        before = tf.zeros(shape, self.value.dtype)
        return self.draw(distribution, shape) if distribution is NORMAL_AND_REST else before


class _Last:
    """What was released last, and the clip norms of its queries: numbers, also from a graph."""

    def __init__(self):
        self._variables = None

    def __call__(self, queries, released):
        numbers = [query.clip_norm for query in queries]
        for part in released:
            numbers += [*part.value, *(part.square or ())]
            numbers += [] if part.shares is None else [part.shares]
        tensors = list(map(tf.convert_to_tensor, numbers))
        if self._variables is None:
            with tf.init_scope():
                self._variables = [tf.Variable(tf.zeros(t.shape, t.dtype)) for t in tensors]
        for variable, tensor in zip(self._variables, tensors, strict=True):
            variable.assign(tensor)
        self._queries, self._released = queries, released

    def read(self):
        """(queries, released)."""
        rest = iter([variable.numpy() for variable in self._variables])
        queries = [query._replace(clip_norm=next(rest)) for query in self._queries]
        released = []
        for part in self._released:
            value = [next(rest) for _ in part.value]
            square = [next(rest) for _ in part.square or ()]
            shares = None if part.shares is None else next(rest)
            released.append(part._replace(value=value, square=square, shares=shares))
        return queries, released


def _own(c):
    """How many rows a unit has."""
    return OWN if c["users"] else 1


def _arrays(c):
    rng = np.random.default_rng(c["seed"])
    rows = (BATCH + 1) * _own(c) + 4  # one unit to exchange, four public rows
    if c["model"] == "words":
        x = rng.integers(0, 7, (rows, 5)).astype("int32")
    else:
        x = rng.normal(size=(rows, *((4, 4, 1) if c["model"] == "image" else (6,))))
        x = (x * c["scale"]).astype("float32")
    y = (rng.normal(size=(rows, 3)) * c["scale"]).astype("float32")
    weight = rng.uniform(0.1, 3, rows).astype("float32") if c["weighted"] else None
    return x, y, weight


def _batch(c, kind):
    """(x, y, RowInfo): "whole", without its last unit, or with another in its place."""
    x, y, weight = _arrays(c)
    own = _own(c)
    units = np.arange(BATCH)
    mask = np.ones((BATCH, own), "float32")
    mask[0, 1:] = 0.0  # a user who has one row only
    if kind == "other" and c["adjacency"] == "replace_one":
        units[-1] = BATCH
    elif kind == "other":
        mask[-1] = 0.0
    rows = (units[:, None] * own + np.arange(own)).ravel()
    share = np.zeros(len(rows), "float32")
    if c["public"]:
        public = (BATCH + 1) * own + np.arange(4 + -4 % own) % 4
        rows = np.append(rows, public)
        mask = np.append(mask, np.zeros((len(public) // own, own), "float32"), axis=0)
        share = np.append(share, np.where(np.arange(len(public)) < 4, 0.25, 0)).astype("float32")
    mask = mask if c["users"] else mask[:, 0]
    weight = None if weight is None else weight[rows]
    return x[rows], y[rows], RowInfo(mask, weight, share if c["public"] else None)


def _sampling(c):
    sampling = _samplings[c["sampling"]](c["adjacency"])
    users = {"unit": "user", "examples_per_unit": OWN} if c["users"] else {}
    return dataclasses.replace(sampling, **users)


def released(c, last, value):
    """Two steps; returns the queries and what is released in the second."""
    keras.utils.set_random_seed(c["seed"])
    model = _model(c)
    clipping = c["clipping"]
    if clipping == "proportions":
        clipping = {layer.name: 1.0 + i for i, layer in enumerate(model.layers) if layer.weights}
    filters = {
        "optimal": lambda: dp.filters.OptimalFIR(3),
        "DiSK": lambda: dp.filters.DiSK(0.5),
        "FFTKF": lambda: dp.filters.FFTKF(0.5, suppression=0.9),
        "momentum of each": lambda: dp.filters.PerExampleMomentum(2),
    }
    arguments = {
        "clip_norm": _clip_norms[c["clip_norm"]](),
        "batch_size": BATCH,
        "noise_multiplier": _SIGMA,
        "noise": _mechanisms[c["mechanism"]](),
        "clipping": clipping,
        "normalize": c["normalize"],
        "secure_noise": c["secure"],
        "gradient_filter": filters.get(c["filter"], lambda: c["filter"])(),
    }
    if c["geometry"] is not None:
        arguments["geometry"] = _geometries[c["geometry"]](c)
    if c["projection"]:
        arguments["projection"] = dp.optimizers.GaLore(2, 1)
    if c["schedule"] is not None:
        arguments["noise_schedule"] = c["schedule"]
    if c["rule"] == "DPGaLore":
        arguments.pop("projection", None)
    rule = {
        "wrapped": c["wrapped"],
        "ablation": c["ablation"],
        "second_moment": lambda: _moments[c["second_moment"]](c["adjacency"]),
    }
    optimizer = optimizer_of(c["rule"], arguments, rule)
    model.compile(
        optimizer,
        "mse",
        physical_batch_size=c["physical"],
        run_eagerly=c["execution"] == "eager",
        jit_compile=c["execution"] == "xla",
    )
    known, last_released = _Known(optimizer.noise_source), _Last()
    model.observe_releases(last_released)
    both = [tf.data.Dataset.from_tensors(_batch(c, kind)) for kind in ("whole", last)]
    batches = both[0].concatenate(both[1]).filter(lambda *_: True)  # of unknown length
    then = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: known.value.assign(value)
    )
    batches = dp.data.assume_sampling(batches, _sampling(c))
    model.fit(batches, verbose=0, callbacks=[then])
    return model, *last_released.read()


def _vector(parts):
    return np.concatenate([np.ravel(p).astype(np.float64) for p in parts])


def check(c):
    """Trains as `c` says, or has it refused.

    Returns:
        None, or why it was refused.

    Raises:
        AssertionError: it trains, but not as accounted; or it is refused without a reason.
    """
    c = _likely(c) if c.get("likely") else c
    try:
        model, queries, whole = released(c, "whole", 0.0)
    except REFUSALS as error:
        where = traceback.extract_tb(error.__traceback__)[-1].filename
        assert "dp_keras_opt" in where, f"Refused by {where}: {error!r}"
        assert len(str(error)) > 30, f"No reason is given: {error!r}"
        return str(error)
    _, _, other = released(c, "other", 0.0)
    _, _, noisy = released(c, "whole", 1.0)
    segment = model.ledger.segments[-1]
    assert segment.steps == 2 and len(segment.releases) == len(whole)
    for release, a, b, z in zip(segment.releases, whole, other, noisy, strict=True):
        if release.is_public:
            assert a.value == [] or np.array_equal(_vector(a.value), _vector(b.value))
            continue
        query, mechanism = queries[release.query], release.mechanism
        moved = _vector(a.value) - _vector(b.value)
        norm = np.abs(moved).sum() if query.norm == "l1" else np.linalg.norm(moved)
        scale = _vector(z.value) - _vector(a.value)  # of a unit draw
        factor = 2.0 if segment.sampling.noise_adjacency == "replace_one" else 1.0
        bound = factor * float(query.sensitivity) / BATCH
        alpha = 1.0 if c["schedule"] is None else c["schedule"][1]
        if c["rule"].startswith("ADP"):
            alpha = float(model.optimizer.noise_schedule.alphas(1, 1)[0])
        unit = release.multiplier * alpha * float(query.sensitivity) / BATCH
        if release.count_noise is not None:  # in units of the noise that is drawn for each part
            counts = len(a.shares)
            on_sum = (_SIGMA**-2 - counts * (2 * _COUNT_NOISE) ** -2) ** -0.5
            assert release.count_noise == _COUNT_NOISE and release.multiplier == _SIGMA
            unit *= on_sum / _SIGMA
            on_counts = BATCH / _COUNT_NOISE * unit / alpha  # brings them to those of the sum
            norm = np.hypot(norm, np.linalg.norm(on_counts * (a.shares - b.shares)))
            bound *= on_sum / _SIGMA
            scale = np.append(scale, on_counts * (z.shares - a.shares))
        if release.joint is not None:
            bound = release.joint.sensitivity(float(query.clip_norm), BATCH)
            unit = release.multiplier * alpha * bound
            weight = release.joint.weight**0.5
            squares = weight * (_vector(a.square) - _vector(b.square))
            norm = np.hypot(norm, np.linalg.norm(squares))
            on_square = weight * (_vector(z.square) - _vector(a.square))
            scale = np.append(scale, on_square)
        assert norm <= bound * (1 + 1e-3), f"moved by {norm / bound} of the sensitivity"
        if release.multiplier == 0:
            assert not scale.any() and not np.isfinite(model.ledger.epsilon(1e-5))
            continue
        gain = 1.0  # a draw's share in the noise of its own step
        if mechanism.is_correlated and not isinstance(mechanism, noise.TreeAggregation):
            gain = mechanism.inverse(2)[1, 1]
        np.testing.assert_allclose(scale, unit * gain, rtol=2e-3)
    return None
