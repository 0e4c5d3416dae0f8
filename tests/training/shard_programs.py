"""What test_replicas.py runs as one of two workers, on data on disk.

TF_CONFIG=... python -m tests.training.shard_programs <folder>
"""

import pathlib
import sys
import warnings

import dp_accounting
import keras
import numpy as np
import scipy.stats
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.workers import gathered
from tests.helpers.inclusions import assert_draws, table_of

SIGMA, CLIP, DIM, SPLIT = 1.5, 0.4, 3, 13
rng = np.random.default_rng(0)
X = rng.normal(size=(20, DIM)).astype("float32")
Y = rng.normal(size=(20, 1)).astype("float32")
IDS = np.arange(20)
USERS = np.repeat(np.arange(10), 2)
USERS[SPLIT - 1] = 0  # nobody is on both sides
PARTS = slice(SPLIT), slice(SPLIT, None)
B, N, DRAWS = 4, 20, 10_000


def write(folder):
    """A file for each worker and array, and one of all."""
    for name, values in {"x": X, "y": Y, "ids": IDS}.items():
        np.save(folder / f"{name}.npy", values)
        for worker, part in enumerate(PARTS):
            np.save(folder / f"{name}{worker}.npy", values[part])


opened = set()


def _note(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".npy"):
        opened.add(pathlib.Path(arguments[0]).name)


def make(strategy, batch_size=B, **private):
    with strategy.scope():
        inputs = keras.Input((DIM,))
        model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
        model.set_weights([np.full(w.shape, 0.1, "float32") for w in model.get_weights()])
        private = {"clip_norm": CLIP, "noise_multiplier": SIGMA, "batch_size": batch_size} | private
        model.compile(dp.optimizers.DPSGD(1.0, **private), "mse", jit_compile=False)
    return model


def assert_same(strategy, *values):
    """On both workers."""
    assert len(set(gathered(repr(values).encode(), strategy))) == 1, values


def refused(words, call, kind=ValueError):
    try:
        call()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


def shards_are_trained_on(strategy, folder, worker):
    """Each worker opens its own files; ε is that of all examples; weights are equal."""
    with strategy.scope():
        own = dp.data.own_shard((folder / f"x{worker}.npy", folder / f"y{worker}.npy"))
        batches = dp.data.poisson_batches(own, B)
    assert batches.sampling == dp.accounting.Sampling.poisson(N, B)
    assert len(batches) == 5 and batches.workers == 2
    model = make(strategy)
    before = model.get_weights()
    model.fit(batches, epochs=2, verbose=0)
    assert not np.array_equal(model.get_weights()[0], before[0])
    assert_same(strategy, [w.tobytes() for w in model.get_weights()], model.ledger.steps)
    accountant = dp_accounting.rdp.RdpAccountant()
    once = dp_accounting.PoissonSampledDpEvent(B / N, dp_accounting.GaussianDpEvent(SIGMA))
    accountant.compose(dp_accounting.SelfComposedDpEvent(once, 10))
    assert abs(model.ledger.epsilon(1e-3, "rdp") - accountant.get_epsilon(1e-3)) < 1e-9
    assert opened == {f"x{worker}.npy", f"y{worker}.npy"}, opened


def all_examples_take_part(strategy, folder, worker):
    """A step on all of them, without noise, is the one of NumPy; of every sampler an epoch has."""
    inputs = np.hstack([X, np.ones((N, 1))])
    gradients = 2 * (0.1 * inputs.sum(axis=1, keepdims=True) - Y) * inputs
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    assert (norms > CLIP).any()
    step = np.sum(gradients * np.minimum(1, CLIP / norms), axis=0) / N
    data = np.load(folder / f"x{worker}.npy"), folder / f"y{worker}.npy"
    for sampler in (dp.data.poisson_batches, dp.data.balls_in_bins, dp.data.fixed_order_epochs):
        with strategy.scope():
            batches = sampler(dp.data.own_shard(data), N)
        model = make(strategy, N, noise_multiplier=0.0)
        model.fit(batches, verbose=0)
        moved = np.concatenate([0.1 - w.ravel() for w in model.get_weights()])
        np.testing.assert_allclose(moved, step, rtol=1e-4, atol=1e-6)


def inclusion_is_that_of_all(strategy, folder, worker):
    """B/n at both, whatever the lengths of their parts; and together as one sampler draws."""
    own = folder / f"ids{worker}.npy"
    with strategy.scope():
        batches = dp.data.poisson_batches(dp.data.own_shard((own, own)), B, DRAWS)
    members = [x[rows.mask == 1] for x, _, rows in batches.dataset.as_numpy_iterator()]
    table = table_of(members, N)
    mine = IDS[PARTS[worker]]
    assert_draws(table[:, mine], scipy.stats.binom(len(mine), B / N))
    assert not np.delete(table, mine, axis=1).any()
    tables = gathered(np.packbits(table.astype(bool)).tobytes(), strategy)
    both = sum(np.unpackbits(np.frombuffer(t, np.uint8))[: table.size].astype(int) for t in tables)
    assert_draws(both.reshape(table.shape), scipy.stats.binom(N, B / N))


def shards_that_are_none_are_refused(strategy, folder, worker):
    own = X[PARTS[worker]], Y[PARTS[worker]]
    theirs = {"users": USERS[PARTS[worker]], "examples_per_user": 2}
    of_both = {"users": np.where(theirs["users"] == 9, 5, theirs["users"]), "examples_per_user": 2}
    poisson, users = dp.data.poisson_batches, dp.data.poisson_users
    outside = dp.data.poisson_batches(dp.data.own_shard(own), B)
    assert outside.workers == 1
    model = make(strategy)
    refused("Make them within `with strategy.scope():`", lambda: model.fit(outside, verbose=0))
    refused("Several replicas need Batches", lambda: model.fit(dp.data.own_shard(own), verbose=0))
    with strategy.scope():
        assert users(dp.data.own_shard(own), batch_size=3, **theirs).sampling.num_examples == 10
        same = folder / "x.npy", folder / "y.npy"
        refused("the same data as a part", lambda: poisson(dp.data.own_shard(same), B))
        refused(
            "A user has examples on two workers",
            lambda: users(dp.data.own_shard(own), batch_size=3, **of_both),
        )
        for sampler in (poisson, dp.data.balls_in_bins, dp.data.fixed_order_epochs):
            refused(
                "sample in different ways", lambda s=sampler: s(dp.data.own_shard(own), B + worker)
            )
        refused("sample in different ways", lambda: poisson(dp.data.own_shard(own), B, 3 + worker))
        cut = dp.data.without_replacement_batches
        refused("the draw of all examples together", lambda: cut(dp.data.own_shard(own), B))
    assert model.ledger.steps == 0


class Source:
    """All examples, which notes whose were asked for."""

    def __init__(self, changed=None, length=N):
        self.x, self.length, self.asked = X.copy(), length, []
        if changed is not None:
            self.x[changed] += 1

    def __len__(self):
        return self.length

    def __getitem__(self, indices):
        self.asked += indices.tolist()
        return self.x[indices], Y[indices]


def one_source_for_all(strategy, folder, worker):
    """Each reads what it draws, of its own half."""
    source = Source()
    with strategy.scope():
        batches = dp.data.poisson_batches(source, B)
    source.asked.clear()
    model = make(strategy)
    model.fit(batches, epochs=4, verbose=0)
    assert_same(strategy, [w.tobytes() for w in model.get_weights()], model.ledger.steps)
    own = set(range(worker, N, 2))
    padding = {0}
    assert set(source.asked) - padding <= own, source.asked
    assert len(set(source.asked) & own) > 1  # of 24 draws of 10, each with 1/5
    with strategy.scope():
        poisson = dp.data.poisson_batches
        for changed in (0, 7, N - 1):
            other = Source(changed if worker else None)
            refused("The workers were given different data", lambda o=other: poisson(o, B))
        other = Source(length=N - worker)
        refused("The workers were given different data", lambda: poisson(other, B))
        shuffled = (X, Y) if worker == 0 else (X[::-1], Y[::-1])
        refused("or the same in another order", lambda: poisson(shuffled, B))
        half = X[PARTS[worker]], Y[PARTS[worker]]
        refused("dp_keras_opt.data.own_shard(data)", lambda: poisson(half, B))
        ids = {"users": np.roll(USERS, worker), "examples_per_user": 2}
        refused("different data", lambda: dp.data.poisson_users((X, Y), batch_size=2, **ids))


CHECKS = (
    shards_are_trained_on,
    all_examples_take_part,
    inclusion_is_that_of_all,
    shards_that_are_none_are_refused,
    one_source_for_all,
)


def main(folder):
    sys.addaudithook(_note)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    for check in CHECKS:
        check(strategy, pathlib.Path(folder), strategy.cluster_resolver.task_id)
        print("ok", check.__name__, flush=True)
    print("ok", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
