"""How users call the library, for mypy alone (`tox -e types`); nothing here is run.

Where mypy finds no error in a line that is marked as one, it complains of the mark.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import dp_keras_opt as dp

# `typing.assert_type` is newer than Python 3.10.
number: float
text: str


def planned(x: np.ndarray, y: np.ndarray) -> dp.optimizers.DPAdam:
    train = dp.data.poisson_batches((x, y), batch_size=64, steps_per_epoch=100)
    sampling: dp.accounting.Sampling = train.sampling
    optimizer = dp.optimizers.DPAdam(
        learning_rate=keras.optimizers.schedules.CosineDecay(0.1, 100),
        clip_norm=1.0,
        batch_size=64,
        noise="gaussian",
        noise_schedule=[1.0, 2.0],
        clipping={"dense": 1.0},
        second_moment="scale_then_privatize",
        gradient_filter=dp.filters.LowPass.preset("f1"),
    )
    multiplier: float = dp.accounting.calibrate(optimizer, sampling, 100, epsilon=2, delta=1e-6)
    multiplier = dp.accounting.calibrate(optimizer, train, epochs=1, epsilon=2, delta=1e-6)
    spent: float = dp.accounting.epsilon(optimizer, sampling, 100, 1e-6, accountant="pld")
    statement: str = dp.accounting.statement(optimizer, sampling, 100, 1e-6)
    print(multiplier, spent, statement, sampling.separation, sampling.describe().upper())
    return optimizer


def trained(model: keras.Model, optimizer: dp.optimizers.PrivateOptimizer, train: Any) -> None:
    private = dp.make_private(model)
    private.compile(optimizer=optimizer, loss="mse", physical_batch_size=16)
    private.ledger = dp.accounting.Ledger(pathlib.Path("spent.jsonl"))
    report = dp.callbacks.PrivacyReport(delta=1e-6, every=None)
    budget = dp.callbacks.PrivacyBudget(epsilon=2.0, delta=1e-6, accountant="rdp")
    renyi = dp.accounting.RenyiFilter.planned(optimizer, train, 100, epsilon=2.0, delta=1e-6)
    dp.callbacks.PrivacyBudget(2.0, 1e-6, accountant=renyi)
    dp.callbacks.PrivacyBudget(2.0, 1e-6, accountant=dp.accounting.GaussianFilter())
    private.fit(train, epochs=5, callbacks=[report, budget, dp.callbacks.OptimizerReport()])
    matrix = dp.statistics.metrics.ConfusionMatrix(2)
    scores = dp.callbacks.PrivateValidation(
        (train, train), ["accuracy", matrix], 0.5, 1e-6, every=2
    )
    private.fit(train, epochs=4, callbacks=[scores])
    std: float = scores.history["accuracy"][0].noise_std + matrix.threshold
    print(scores.epochs, std)
    spent: float = report.epsilon
    lower, upper = private.ledger.epsilon_bracket(1e-6)
    print(spent, upper - lower, report.statement().upper())
    dp.serving.export(private, pathlib.Path("served") / "1", report)
    for served in dp.clipping.explain(private):
        print(served.layer.upper(), served.weights + 1)


class Rows:
    """A source of one's own."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, indices: np.ndarray) -> Any:
        return indices, indices


def sources(folder: pathlib.Path) -> None:
    own: dp.data.Source = Rows()
    pictures = dp.data.image_folder(folder, image_size=(8, 8))
    records = dp.data.TFRecords([folder / "a.tfrecord", "b.tfrecord"])
    every: list[dp.data.Source] = [own, pictures, dp.data.text_folder(folder), records]
    count: int = dp.data.write(iter([(1, "a")]), folder / "a.array_record")
    count += dp.data.index_tfrecord("b.tfrecord") + len(records) + len(pictures.class_names[0])
    function = dp.data.PythonFunction(lambda x, y: (x, y), processes=2)
    batches = dp.data.poisson_batches(dp.data.own_shard(own), 3, map=function, views=2)
    print(count, every, batches.unreadable[0].upper(), batches.sampling.views + 1)


def others() -> None:
    schedule = dp.noise.schedules.allocate(np.ones(10), dp.noise.Laplace())
    bounds = keras.optimizers.schedules.CosineDecay(1.0, 9)
    optimizers: list[dp.optimizers.PrivateOptimizer] = [
        dp.optimizers.DPSGD(0.1, momentum=0.9, clip_norm=1, batch_size=8, noise_multiplier=1),
        dp.optimizers.DP2RMSprop(delay=(10, 20), clip_norm=1, adaptive_clip_norm=2, batch_size=8),
        dp.optimizers.DPOptimizer("lion", clip_norm=1.0, batch_size=8, noise_schedule=schedule),
        dp.optimizers.get("DPYogi", clip_norm=1.0, batch_size=8),
        dp.optimizers.DPAdam(clip_norm=bounds, batch_size={0: 8, 3: 9}),
    ]
    for each in optimizers:
        set_later: float | None = each.noise_multiplier
        print(set_later, each.clip_norm, each.calibrated_for)
    make: Callable[[int, int], dp.noise.Mechanism] = dp.noise.BandedMatrix
    print(make(10, 2).std(0))
    contractions, gains = dp.theory.nesterov_recursion(0.1, 1.0, 0.5, 100)
    print(contractions.shape, gains.shape)
    candidate: dp.tuning.Candidate = dp.tuning.CANDIDATES["DPAdam"]
    print(candidate.middle()["learning_rate"] * 2)
    objective = dp.Objective(lambda x, y, outputs, given: outputs[:, 0], intermediates=["code"])
    print(objective.intermediates[0], objective.name)


def attacked(model: keras.Model, x: np.ndarray, y: np.ndarray) -> None:
    report: dp.audit.AttackReport = dp.audit.attack_report(
        model,
        (x[:9], y[:9]),
        (x[9:], y[9:]),
        scores={"loss": "loss", "mine": lambda model, x, y: -abs(model(x) - y)},
        slices={"region": (y[:9], y[9:])},
        false_positive_rates=(0.1,),
    )
    low, high = report.results[0].rates[0].interval
    bits: np.ndarray = dp.audit.exposure([0.1], dp.audit.sequence_losses(model, (x, y)))
    p: float = dp.audit.trade_off_p_value(9, 5, 4, dp.audit.gaussian_trade_off(1.0))
    print(high - low, bits, p, report.to_markdown().upper(), report.to_dict()["what"])
    dp.audit.attack_report(model, (x, y), (x, y), slices="classes")  # type: ignore[arg-type]


def wrong(optimizer: dp.optimizers.DPSGD, train: dp.data.Batches) -> None:
    """What mypy must find."""
    sampling = train.sampling
    dp.accounting.calibrate(optimizer, sampling, 100, "2", 1e-6)  # type: ignore[arg-type]
    dp.accounting.epsilon(optimizer, sampling, 9, 1e-6, "gdp")  # type: ignore[arg-type]
    dp.accounting.epsilon(optimizer, 100, 9, 1e-6)  # type: ignore[arg-type]
    dp.accounting.epsilon(optimizer, sampling, 9, "1e-6")  # type: ignore[arg-type]
    dp.accounting.Sampling.poisson(100, 10, "add_one")  # type: ignore[arg-type]
    dp.accounting.calibrate(optimizer, [1], epochs=1, epsilon=2.0)  # type: ignore[arg-type]
    dp.accounting.epsilon(object(), sampling, 100, 1e-6)  # type: ignore[arg-type]
    dp.Objective("mse")  # type: ignore[arg-type]
    dp.optimizers.DPSGD(clip_norm="1", batch_size=8)  # type: ignore[arg-type]
    dp.optimizers.DPSGD(batch_size=8)  # type: ignore[call-arg]
    dp.optimizers.DPYogi(0.1, batch_size=8)  # type: ignore[call-arg]
    dp.optimizers.AdaDPS(0.1, clip_norm="1")  # type: ignore[arg-type]
    dp.optimizers.DPAdam(0.1, clip_norm=1.0, noise=3)  # type: ignore[arg-type]
    dp.optimizers.DPAdam(0.1, clip_norm=1.0, batch_size=8.5)  # type: ignore[arg-type]
    dp.data.poisson_batches(None, batch_sizes=8)  # type: ignore[call-arg]
    dp.callbacks.PrivacyBudget(2.0, delta=None)  # type: ignore[arg-type]
    dp.accounting.RenyiFilter(order=None)  # type: ignore[arg-type]
    dp.filters.LowPass.preset(1)  # type: ignore[arg-type]
    optimizer.noise_multiplier + 1  # type: ignore[operator]
    optimizer.batch_size + 1  # type: ignore[operator]
    multiplier: str = optimizer.clip_norm  # type: ignore[assignment]
    print(multiplier, dp.optimisers)  # type: ignore[attr-defined]
