"""Counts what a private step multiplies and moves, as a ratio to the plain step of Keras.

    python benchmarks/flops.py                                # mlp, cnn, bow500 and transformer
    python benchmarks/flops.py --workloads cnn --optimizers dpsgd

Each step is lowered to XLA's HLO for the CPU, and its text is read (`hlo.py`); nothing is timed,
and no time follows from it: an XLA that fuses moves less. The plain step is Keras's, with Adam. The
table goes to `output/benchmark/flops.csv` and `.md`.
"""

import argparse
import pathlib

import measurements
from hlo import cost
from workloads import SMALL, WORKLOADS

OPTIMIZERS = ("dpsgd", "post_processing", "scale_then_privatize", "dp2rmsprop")


def plain_step(workload, batch_size):
    """The HLO of a step of Keras."""
    import keras
    from workers.keras_common import inputs_and_outputs

    model = keras.Model(*inputs_and_outputs(keras, workload, WORKLOADS[workload]))
    compiled(model, keras.optimizers.Adam(0.001))
    return lowered(model, WORKLOADS[workload].batch(batch_size))


def private_step(workload, variant, batch_size):
    """The HLO of a step of this library; `variant` as in `workers/dp_keras.py`."""
    import keras
    from workers.dp_keras import optimizer
    from workers.keras_common import inputs_and_outputs

    import dp_keras_opt as dp

    model = dp.DPModel(*inputs_and_outputs(keras, workload, WORKLOADS[workload]))
    compiled(model, optimizer(variant, batch_size, [], WORKLOADS[workload]))
    model.sampling = dp.accounting.Sampling.full(batch_size)
    return lowered(model, WORKLOADS[workload].batch(batch_size))


def compiled(model, optimizer):
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=True)


def lowered(model, batch):
    """The HLO of the train step of a compiled model, before XLA optimizes it."""
    import tensorflow as tf

    model.train_on_batch(*batch)  # makes all variables
    if hasattr(model, "_guard"):
        model._guard.is_stepping = True  # nothing runs: it is only lowered
    step = tf.function(lambda x, y: model.train_step((x, y)), jit_compile=True, autograph=False)
    return step.experimental_get_compiler_ir(*map(tf.convert_to_tensor, batch))(stage="hlo")


def rows(workloads, optimizers, batch_size=None):
    """A row for each workload and optimizer; ratios are to the plain step."""
    for workload in workloads:
        size = batch_size or WORKLOADS[workload].batch_size
        plain = cost(plain_step(workload, size))
        for variant in (None, *optimizers):
            found = plain if variant is None else cost(private_step(workload, variant, size))
            yield {
                "workload": workload,
                "batch": size,
                "step": variant or "Keras, not private",
                "Gflop": f"{found.flops / 1e9:.3f}",
                "× Keras": f"{found.flops / plain.flops:.2f}",
                "MB, unfused": f"{found.bytes / 2**20:.0f}",
                "× Keras, unfused": f"{found.bytes / plain.bytes:.2f}",
            }


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(SMALL))
    add("--optimizers", nargs="+", default=list(OPTIMIZERS))
    add("--batch-size", type=int, help="instead of that of the workload")
    add("--output", type=pathlib.Path, default=pathlib.Path("output", "benchmark"))
    options = parser.parse_args(arguments)
    table = list(rows(options.workloads, options.optimizers, options.batch_size))
    print(measurements.write_plain("flops", table, options.output))


if __name__ == "__main__":
    main()
