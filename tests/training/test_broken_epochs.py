"""Training that ends within an epoch: every step that may have been taken counts, also that of an
example that came in the part that ran and comes again in the next epoch.

Expected values are from dp_accounting, of the participations of the worst placed example.
"""

import os
import shutil
import signal
import subprocess
import sys
import textwrap

import dp_accounting
import keras
import numpy as np
import pytest

import dp_keras_opt as dp
from dp_keras_opt.accounting.random_allocation import RandomAllocationDpEvent
from dp_keras_opt.noise import BandedMatrix

N, B, SIGMA, DELTA = 40, 8, 2.0, 1e-3
X = np.random.default_rng(0).normal(size=(N, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
BANDS = BandedMatrix(60, 3)
SIZES = {0: B, 7: 2 * B}


class Source:
    """The examples, until one that is drawn cannot be read."""

    fails = False

    def __len__(self):
        return N

    def __getitem__(self, indices):
        if self.fails:
            raise OSError("bad sector")
        return X[indices], Y[indices]


MAKE = {
    "balls in bins": lambda data: dp.data.balls_in_bins(data, B),
    "one order": lambda data: dp.data.fixed_order_epochs(data, B),
    "one order, correlated": lambda data: dp.data.fixed_order_epochs(data, B),
    "in turns": lambda data: dp.data.cyclic_poisson(data, B, 2, 6),
    "in turns, correlated": lambda data: dp.data.cyclic_poisson(data, B, 3, 6),
    "sizes that change": lambda data: dp.data.poisson_batches(data, SIZES, 5),
}


def make_model(kind):
    inputs = keras.Input((4,))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    optimizer = dp.optimizers.DPSGD(
        0.01,
        clip_norm=1.0,
        noise_multiplier=SIGMA,
        batch_size=SIZES if "sizes" in kind else B,
        noise=BANDS if "correlated" in kind else "gaussian",
    )
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def event_of(kind, runs):
    """The event of runs of so many steps, each from the beginning of an epoch on.

    Args:
        runs: how many steps each of them may have released.
    """
    gaussian = dp_accounting.GaussianDpEvent
    events, done = [], 0
    for steps in runs:
        if kind == "balls in bins":
            epoch = RandomAllocationDpEvent(((SIGMA, 5),), 5)
            events += [epoch] * -(-steps // 5)
        elif kind == "one order":  # an example that is replaced moves the sum by 2C
            events += [gaussian(SIGMA / 2)] * -(-steps // 5)
        elif kind == "one order, correlated":
            moved = columns(steps, 5)
            events.append(gaussian(SIGMA / 2 / moved))
        elif kind == "in turns":
            sampled = dp_accounting.PoissonSampledDpEvent(2 * B / N, gaussian(SIGMA))
            events += [sampled] * -(-steps // 2)
        elif kind == "in turns, correlated":
            once = gaussian(SIGMA / columns(steps, steps))
            sampled = dp_accounting.PoissonSampledDpEvent(3 * B / N, once)
            events += [sampled] * -(-steps // 3)
        else:
            q = [B / N] * 7 + [2 * B / N] * 40
            events += [
                dp_accounting.PoissonSampledDpEvent(q[step], gaussian(SIGMA))
                for step in range(done, done + steps)
            ]
        done += steps
    return dp_accounting.ComposedDpEvent(events)


def columns(steps, apart):
    """The norm that one example, every so many steps, moves C·(sums) by, at most."""
    matrix = np.linalg.inv(BANDS.inverse(60))[:steps, :steps]
    return max(np.linalg.norm(matrix[:, start::apart].sum(axis=1)) for start in range(apart))


def epsilon_of(kind, runs):
    accountant = dp_accounting.rdp.RdpAccountant()
    if kind == "balls in bins":
        events = event_of(kind, runs).events
        ledger = dp.accounting.Ledger.of(
            make_model(kind).optimizer, MAKE[kind]((X, Y)).sampling, 5 * len(events)
        )
        return ledger.epsilon(DELTA)
    accountant.compose(event_of(kind, runs))
    return accountant.get_epsilon(DELTA)


def epsilon(kind, ledger):
    return ledger.epsilon(DELTA, "auto" if kind == "balls in bins" else "rdp")


class After(keras.callbacks.Callback):
    """Does something after so many steps."""

    def __init__(self, steps, action):
        super().__init__()
        self.steps, self.action, self.seen = steps, action, 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.steps:
            self.action(self.model)


def interrupt(model):
    raise KeyboardInterrupt


def stop(model):
    model.stop_training = True


@pytest.mark.representatives(8)
@pytest.mark.parametrize("how", ["interrupt", "stop", "source"])
@pytest.mark.parametrize("kind", MAKE)
def test_an_epoch_that_broke_off_counts_and_so_does_the_next_one(kind, how):
    """Seven steps, in the midst of the second epoch; then two epochs more, of the same batches."""
    source, model = Source(), make_model(kind)
    batches = MAKE[kind](source)
    if how == "source":

        def fail(model):
            source.fails = True

        with pytest.raises(ValueError, match="bad sector"):
            model.fit(batches, epochs=9, verbose=0, callbacks=[After(7, fail)])
        source.fails = False
        steps = int(model.optimizer.iterations) + 1  # that which failed may have released noise
        assert model.ledger.steps == steps >= 8
    else:
        action = {"interrupt": interrupt, "stop": stop}[how]
        try:
            model.fit(batches, epochs=9, verbose=0, callbacks=[After(7, action)])
        except KeyboardInterrupt:
            assert how == "interrupt"
        steps = 7
    runs = [steps]
    assert model.ledger.steps == steps
    assert epsilon(kind, model.ledger) == pytest.approx(epsilon_of(kind, runs), rel=1e-4)
    if how == "source" and kind == "sizes that change":
        return  # what failed is no step of the optimizer: the next one has its expected size
    model.fit(batches, epochs=2, verbose=0)
    runs.append(2 * len(batches))
    assert model.ledger.steps == sum(runs)
    assert epsilon(kind, model.ledger) == pytest.approx(epsilon_of(kind, runs), rel=1e-4)


def test_a_step_of_another_size_that_failed_counts():
    """Over-counted: seven steps, that which failed, and that which takes its place."""
    kind, source = "sizes that change", Source()
    model, batches = make_model(kind), MAKE[kind](source)
    with pytest.raises(ValueError, match="bad sector"):
        model.fit(batches, epochs=9, verbose=0,
                  callbacks=[After(7, lambda model: setattr(source, "fails", True))])  # fmt: skip
    source.fails = False
    taken = int(model.optimizer.iterations)
    model.fit(batches, verbose=0)
    assert model.ledger.steps == taken + 6
    assert epsilon(kind, model.ledger) >= epsilon_of(kind, [taken + 5])


@pytest.mark.parametrize("kind", MAKE)
def test_a_killed_process(kind, tmp_path):
    """What a kill leaves, a ledger file of that moment and a model of the epoch before."""
    model, batches = make_model(kind), MAKE[kind]((X, Y))
    model.ledger = dp.accounting.Ledger(tmp_path / "ledger")
    found = [tmp_path / "found.keras", tmp_path / "found"]

    def copy(model):
        shutil.copy(tmp_path / "model.keras", found[0])
        shutil.copy(tmp_path / "ledger", found[1])

    save = keras.callbacks.ModelCheckpoint(tmp_path / "model.keras")
    model.fit(batches, epochs=2, verbose=0, callbacks=[After(7, copy), save])
    loaded = keras.saving.load_model(found[0])
    first = len(batches)
    assert int(loaded.optimizer.iterations) == loaded.ledger.steps == first
    loaded.ledger = dp.accounting.Ledger(found[1])
    counted = loaded.ledger.steps
    assert 7 <= counted <= 8
    at_least = epsilon_of(kind, [7])
    assert epsilon(kind, loaded.ledger) >= (1 - 1e-4) * at_least
    loaded.fit(MAKE[kind]((X, Y)), verbose=0)
    assert loaded.ledger.steps == counted + first
    runs = [first, first] if "sizes" in kind else [7, first]  # which go on at the step of the model
    assert epsilon(kind, loaded.ledger) > (1 - 1e-4) * epsilon_of(kind, runs)
    assert epsilon(kind, loaded.ledger) > at_least


PROGRAM = textwrap.dedent("""
    import os, signal, sys
    import keras, numpy as np, dp_keras_opt as dp
    from tests.training import test_broken_epochs as t
    folder, kind = sys.argv[1:]
    model = t.make_model(kind)
    model.ledger = dp.accounting.Ledger(folder + "/ledger")
    save = keras.callbacks.ModelCheckpoint(folder + "/model.keras")
    kill = t.After(7, lambda model: os.kill(os.getpid(), signal.SIGKILL))
    model.fit(t.MAKE[kind]((t.X, t.Y)), epochs=9, verbose=0, callbacks=[kill, save])
""")


def test_a_process_that_is_killed_and_goes_on_from_its_files(tmp_path):
    kind = "balls in bins"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), kind],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    model = keras.saving.load_model(tmp_path / "model.keras")
    assert (model.ledger.steps, int(model.optimizer.iterations)) == (5, 5)
    model.ledger = dp.accounting.Ledger(tmp_path / "ledger")
    assert 7 <= model.ledger.steps <= 8
    model.fit(MAKE[kind]((X, Y)), verbose=0)
    assert epsilon(kind, model.ledger) == pytest.approx(epsilon_of(kind, [7, 5]), rel=1e-4)


BY_HAND = ["balls in bins", "one order"]  # others need fit


@pytest.mark.parametrize("kind", BY_HAND)
def test_batches_that_are_begun_anew_by_hand(kind):
    """Two steps of an epoch, again and again: the first example comes each time."""
    model, batches = make_model(kind), MAKE[kind]((X, Y))
    model.sampling = batches.sampling
    for _ in range(3):
        for step, (x, y, rows) in enumerate(batches):
            model.train_on_batch(x, y, rows)
            if step == 1:
                break
    assert model.ledger.steps == 6
    expected = epsilon_of(kind, [2, 2, 2])
    assert epsilon(kind, model.ledger) == pytest.approx(expected, rel=1e-4)


def test_whole_epochs_by_hand_are_one_run():
    for kind in BY_HAND:
        model, batches = make_model(kind), MAKE[kind]((X, Y))
        model.sampling = batches.sampling
        for _ in range(2):
            for x, y, rows in batches:
                model.train_on_batch(x, y, rows)
        (segment,) = model.ledger.segments
        assert segment.steps == 2 * len(batches)


def test_a_run_that_broke_off_is_not_handed_over(tmp_path):
    """Its batches could not go on as accounted; what ran stays in the ledger."""
    for kind in ("one order, correlated", "in turns, correlated"):
        model = make_model(kind)
        with pytest.raises(KeyboardInterrupt):
            model.fit(MAKE[kind]((X, Y)), epochs=3, verbose=0, callbacks=[After(7, interrupt)])
        with pytest.raises(ValueError, match="There is no run to save"):
            model.save_run(tmp_path / "run.secret.npz")
        assert not list(tmp_path.iterdir())
        assert model.ledger.steps == 7


def test_a_resumed_run_that_breaks_off_counts_once(tmp_path):
    """Five steps, handed over; of the next epoch two; then an epoch that is a run of its own."""
    kind = "one order, correlated"
    model, batches = make_model(kind), MAKE[kind]((X, Y))
    model.fit(batches, verbose=0)
    model.save_run(tmp_path / "run.secret.npz")
    seed = model.resume_run(tmp_path / "run.secret.npz")
    batches = dp.data.fixed_order_epochs((X, Y), B, order_seed=seed)
    with pytest.raises(KeyboardInterrupt):
        model.fit(batches, epochs=3, verbose=0, callbacks=[After(2, interrupt)])
    assert model.ledger.epsilon(DELTA, "rdp") == pytest.approx(epsilon_of(kind, [7]), rel=1e-4)
    model.fit(batches, verbose=0)
    assert model.ledger.epsilon(DELTA, "rdp") == pytest.approx(epsilon_of(kind, [7, 5]), rel=1e-4)
