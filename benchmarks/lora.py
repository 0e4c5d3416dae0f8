"""A step of private LoRA beside Keras's own: a GPT of 4 blocks, 256 wide, at rank 4.

    python3.11 benchmarks/lora.py                  # kernels of 32 bits, and of 8
    python3.11 benchmarks/lora.py --xla            # steps that are compiled

As `backbone.enable_lora` of KerasHub has it: queries and values get a LoRA, and all else is frozen,
the layers around them included. A step is on a batch that lies in memory, with Adam; the private
one has clip norm 1 and noise multiplier 1. Keras's model, the private one and the bare draw of the
noise are timed in turn, round by round, in one process. Each round gives a ratio, of the private
step to Keras's plus that draw; the table has their median, least and largest. "first step" is that
of the first epoch, where Keras traces, and this library checks the model before.

Runs in the environment it is started in. Writes `output/lora/lora.csv` and `lora.md`.
"""

import argparse
import pathlib
import statistics
import sys
import time

import measurements

BLOCKS, WIDTH, HEADS, WORDS, RANK = 4, 256, 4, 2000, 4


def gpt(keras, kind, length):
    """(inputs, outputs) of a GPT in which LoRA trains, and else only the biases of its layers."""
    from workers.keras_common import blocks

    layers = keras.layers
    table = layers.ReversibleEmbedding(WORDS, WIDTH, name="table")
    inputs = keras.Input((length,), dtype="int32")
    outputs = table(blocks(layers, inputs, table, WIDTH, BLOCKS, HEADS), reverse=True)
    parts = list(keras.Model(inputs, outputs)._flatten_layers(include_self=False))
    for part in parts:
        if kind == "int8" and isinstance(part, layers.Dense | layers.EinsumDense):
            part.quantize("int8")
        part.trainable = False
    for part in parts:
        if part.name in ("query", "value"):
            part.trainable = True
            part.enable_lora(RANK)
    return inputs, outputs


def timed(kind, arguments):
    """The row of a kind of kernels."""
    import keras
    import numpy as np
    import tensorflow as tf
    from workers.keras_common import fit_steps
    from workers.keras_plain import noise_draws

    import dp_keras_opt as dp

    rng, size = np.random.default_rng(0), (arguments.batch, arguments.length)
    batch = [rng.integers(0, WORDS, size).astype("int32") for _ in range(2)]
    data = tf.data.Dataset.from_tensors(tuple(batch)).repeat()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    plain = keras.Model(*gpt(keras, kind, arguments.length))
    plain.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=arguments.xla)
    private = dp.DPModel(*gpt(keras, kind, arguments.length))
    optimizer = dp.optimizers.DPAdam(
        1e-3, clip_norm=1.0, noise_multiplier=1.0, batch_size=arguments.batch
    )
    private.compile(optimizer, loss, jit_compile=arguments.xla)
    sampled = dp.data.assume_sampling(data, dp.accounting.Sampling.full(arguments.batch))
    contenders = {
        "keras": fit_steps(keras, plain, data),
        "private": fit_steps(keras, private, sampled),
        "noise": noise_draws([v.shape for v in private.trainable_variables]),
    }
    first, found = {}, {name: [] for name in contenders}
    for name, run in contenders.items():
        start = time.perf_counter()
        run(1)
        first[name] = time.perf_counter() - start
    for number in range(arguments.rounds):
        for name, run in contenders.items():
            found[name].append(run(arguments.steps))
        print(kind, number, {name: times[-1] for name, times in found.items()}, flush=True)
    ratios = [
        private / (keras + noise) for keras, private, noise in zip(*found.values(), strict=True)
    ]
    print(str(dp.clipping.explain(private)).splitlines()[-1], flush=True)
    return {
        "kernels": kind,
        "Keras [ms]": round(statistics.median(found["keras"]), 1),
        "noise [ms]": round(statistics.median(found["noise"]), 2),
        "private [ms]": round(statistics.median(found["private"]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "largest": round(max(ratios), 3),
        "first step of Keras [s]": round(first["keras"], 1),
        "and of this library [s]": round(first["private"], 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=["float32", "int8"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="timed, of a round")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=64, help="of a text")
    parser.add_argument("--xla", action="store_true")
    parser.add_argument("--output", default="output/lora")
    arguments = parser.parse_args()
    here = pathlib.Path(__file__).resolve().parent
    sys.path[:0] = [str(here.parent), str(here)]
    rows = [timed(kind, arguments) for kind in arguments.kinds]
    print(measurements.write_plain("lora", rows, arguments.output))


if __name__ == "__main__":
    main()
