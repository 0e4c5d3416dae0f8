"""Wrote the files beside it, at the commit that README.md names: `python write.py FOLDER`.

They must load for all time, so nobody writes them anew. For a later format, add a folder beside
this one.
"""

import json
import math
import pathlib
import sys

import keras
import numpy as np

import dp_keras_opt as dp
from dp_keras_opt.accounting import Ledger, RandomRepetitions, Sampling
from dp_keras_opt.noise import (
    BandedMatrix,
    Gaussian,
    JointMoments,
    Laplace,
    Release,
    SquareRootFactorization,
    TreeAggregation,
    from_matrix,
)

FOLDER = pathlib.Path(sys.argv[1])
DELTA = 1e-5


def releases(*mechanisms, multiplier=1.25):
    return tuple(
        Release(query, "mean", multiplier, mechanism) for query, mechanism in enumerate(mechanisms)
    )


def of(released, sampling, steps, ledger=None, planned=None, **kwargs):
    """A ledger of one more segment."""
    ledger = Ledger() if ledger is None else ledger
    ledger.begin(released, sampling, **kwargs)
    if planned is not None:
        ledger.plan(planned)
    ledger.reserve(steps)
    return ledger


GAUSSIAN = releases(Gaussian())
JOINT = Release(0, "mean_and_square", 1.5, Gaussian(), JointMoments(0.5, 4, "replace_one"))
PUBLIC = Release(1, "public_mean", 0.0, Gaussian())
MATRIX = [[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.25, 0.5, 1.0]]


def ledgers():
    """By name: (ledger, δ, accountant)."""
    yield "poisson", of(GAUSSIAN, Sampling.poisson(1000, 50), 40, clip_norm=0.5), DELTA, "rdp"
    sampling = Sampling.poisson(300, 12, unit="user", examples_per_unit=3)
    yield "poisson_users", of(GAUSSIAN, sampling, 40), DELTA, "pld"
    sampling = Sampling.poisson(1000, 50, "replace_one")
    yield "poisson_replace_one", of(GAUSSIAN, sampling, 40), DELTA, "pld"
    sampling = Sampling.poisson(1000, 50, "zero_out")
    yield "poisson_laplace", of(releases(Laplace(), multiplier=20.0), sampling, 40), 0, "pure"
    sampling = Sampling.without_replacement(1000, 50)
    yield "without_replacement", of((JOINT, PUBLIC), sampling, 40), DELTA, "rdp"
    ledger = of(GAUSSIAN, Sampling.full(64, unit="patient"), 5, schedule=[1.0, 2.0, 0.5, 1.0, 3.0])
    yield "full", ledger, DELTA, "rdp"
    ledger = of(GAUSSIAN, Sampling.shuffled(70, 8, drop_remainder=True), 20, planned=math.inf)
    yield "shuffled", of(GAUSSIAN, Sampling.shuffled(70, 8), 7, ledger, planned=30), DELTA, "rdp"
    sampling = Sampling.shuffled_accounted_as_poisson(1000, 50)
    yield "shuffled_accounted_as_poisson", of(GAUSSIAN, sampling, 40), DELTA, "rdp"
    sampling = Sampling.fixed_order(24, 8)
    ledger = of(releases(SquareRootFactorization(12, 3)), sampling, 9)
    ledger = of(releases(BandedMatrix(12, 3)), sampling, 9, ledger)
    ledger = of(releases(TreeAggregation(12)), sampling, 9, ledger)
    yield "fixed_order", of(releases(from_matrix(MATRIX)), sampling, 3, ledger), DELTA, "rdp"
    sampling = Sampling.cyclic_poisson(400, 10, 4)
    yield "cyclic_poisson", of(releases(BandedMatrix(20, 4)), sampling, 20), DELTA, "rdp"
    ledger = of(GAUSSIAN, Sampling.poisson(1000, 50), 40, selection=RandomRepetitions(5, 1))
    yield "selection", ledger, DELTA, "rdp"


def journal(path):
    """A ledger file: two runs, of which one is over and one broke off, and one that was resumed."""
    ledger = Ledger(path)
    ledger.begin(GAUSSIAN, Sampling.poisson(1000, 50), clip_norm=1.0)
    ledger.plan(30)
    for _ in range(3):
        ledger.reserve(10)
        ledger.settle(10, 10)
    ledger.fulfil(ledger.current.run)
    ledger.begin(GAUSSIAN, Sampling.poisson(1000, 50), [1.5] * 100)
    ledger.plan(100)
    ledger.reserve(20)
    ledger.settle(20, 17)
    ledger.begin(releases(BandedMatrix(40, 4)), Sampling.cyclic_poisson(400, 10, 4))
    ledger.reserve(8)
    run = ledger.current.run
    ledger.close()
    ledger.resume(run, 8)
    ledger.reserve(4)
    ledger.release()
    return Ledger.read(path)


def model(optimizer):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, activation="tanh", name="hidden")(inputs)
    made = dp.DPModel(inputs, keras.layers.Dense(1, name="top")(hidden))
    made.compile(optimizer, "mse")
    return made


def examples(n=60):
    x = np.random.default_rng(0).normal(size=(n, 3)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def main():
    FOLDER.mkdir(exist_ok=True)
    found, told = {}, {}
    for name, ledger, delta, accountant in ledgers():
        found[name] = json.loads(ledger.to_json())
        told[name] = {
            "delta": delta,
            "accountant": accountant,
            "epsilon": ledger.epsilon(delta, accountant),
            "epsilon_as_planned": ledger.epsilon_as_planned(delta, accountant),
        }
    (FOLDER / "ledgers.json").write_text(json.dumps(found, indent=1))
    ledger = journal(FOLDER / "spent.jsonl")
    told["spent.jsonl"] = {
        "delta": DELTA,
        "accountant": "rdp",
        "epsilon": ledger.epsilon(DELTA, "rdp"),
        "epsilon_as_planned": ledger.epsilon_as_planned(DELTA, "rdp"),
    }

    optimizer = dp.optimizers.DPAdam(
        0.01, clip_norm=0.8, batch_size=12, second_moment="scale_then_privatize",
        gradient_filter="first_order_v1", clipping="per_layer", noise_schedule=[1.0] * 20,
    )  # fmt: skip
    sampling = Sampling.poisson(60, 12)
    dp.accounting.calibrate(optimizer, sampling, 20, 3.0, DELTA)
    (FOLDER / "optimizer.json").write_text(
        json.dumps(keras.saving.serialize_keras_object(optimizer), indent=1)
    )
    trained = model(optimizer)
    trained.fit(dp.data.poisson_batches(examples(), 12), epochs=2, verbose=0)
    trained.save(FOLDER / "model.keras")
    trained.save_weights(FOLDER / "model.weights.h5")
    predicted = trained.predict(examples(5)[0], verbose=0).ravel().tolist()
    told["model"] = {"epsilon": trained.ledger.epsilon(DELTA, "rdp"), "predicted": predicted}

    noise = BandedMatrix(40, 3)
    going_on = model(
        dp.optimizers.DPSGD(0.1, clip_norm=1.0, batch_size=12, noise_multiplier=2.0, noise=noise)
    )
    going_on.fit(dp.data.fixed_order_epochs(examples(), 12), epochs=2, verbose=0)
    going_on.save(FOLDER / "run.keras")
    going_on.save_run(FOLDER / "run.secret.npz")
    told["run"] = {"epsilon": going_on.ledger.epsilon(DELTA, "rdp"), "steps": going_on.ledger.steps}
    (FOLDER / "told.json").write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
