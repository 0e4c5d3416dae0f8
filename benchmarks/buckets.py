"""Texts of any length: buckets beside padding all to the longest.

    python3.11 benchmarks/buckets.py

Lengths are log-normal (median 60, σ 0.8), at most 512. One model, the blocks of the benchmark's
transformer over tokens of 2000 with a class for each text, is trained on the same texts by Poisson
sampling: padded to 512, and in `Buckets(512)`; with XLA and without, in a process each, in turn.
A row of the table is the median over the timed epochs of all rounds, of texts a second.

Runs in the environment it is started in. Writes `output/buckets/buckets.csv` and `buckets.md`.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import measurements

LONGEST, MEDIAN, SIGMA, WORDS, WIDTH = 512, 60, 0.8, 2000, 128
NUM_TEXTS, BATCH, STEPS = 4096, 64, 16


def lengths(number):
    import numpy as np

    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, number)
    return np.clip(drawn.astype(int), 1, LONGEST)


def train(kind, jit_compile, epochs):
    """Texts a second of each timed epoch, and what was compiled before the first."""
    import keras
    import numpy as np
    import tensorflow as tf

    import dp_keras_opt as dp

    rng, sizes = np.random.default_rng(1), lengths(NUM_TEXTS)
    texts = tf.RaggedTensor.from_row_lengths(rng.integers(1, WORDS, sizes.sum()), sizes)
    classes = rng.integers(0, 2, NUM_TEXTS)
    layers = keras.layers
    inputs = keras.Input((None,), dtype="int64")
    hidden = layers.Embedding(WORDS, WIDTH, mask_zero=True)(inputs)
    for _ in range(2):
        normal = layers.LayerNormalization()(hidden)
        attended = layers.MultiHeadAttention(4, WIDTH // 4)(normal, normal)
        hidden = layers.Add()([hidden, attended])  # keeps the mask, which + does not
        normal = layers.LayerNormalization()(hidden)
        wide = layers.Dense(4 * WIDTH, activation="relu")(normal)
        hidden = layers.Add()([hidden, layers.Dense(WIDTH)(wide)])
    model = dp.DPModel(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(hidden)))
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=BATCH)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=jit_compile)
    buckets = dp.data.Buckets([LONGEST] if kind == "padded" else LONGEST)
    batches = dp.data.poisson_batches((texts, classes), BATCH, STEPS, buckets=buckets)
    start = time.perf_counter()
    model.fit(batches, epochs=1, verbose=0)
    first = time.perf_counter() - start
    rates = []
    for _ in range(epochs):
        start = time.perf_counter()
        model.fit(batches, epochs=1, verbose=0)
        rates.append(BATCH * STEPS / (time.perf_counter() - start))
    return {"first": first, "rates": rates}


def measured(kind, jit_compile, epochs):
    """What `train` gives, in a process of its own."""
    here = pathlib.Path(__file__).resolve()
    command = [sys.executable, str(here), "--worker", kind, str(int(jit_compile)), str(epochs)]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(here.parent.parent), **os.environ}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4, help="timed, in each process")
    parser.add_argument("--output", default="output/buckets")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        kind, jit_compile, epochs = arguments.worker
        print(json.dumps(train(kind, bool(int(jit_compile)), int(epochs))))
        return
    found = {}
    for _ in range(arguments.rounds):
        for jit_compile in (False, True):
            for kind in ("padded", "buckets"):
                result = measured(kind, jit_compile, arguments.epochs)
                print(kind, f"jit_compile={jit_compile}", result, flush=True)
                found.setdefault((kind, jit_compile), []).append(result)
    rows = []
    for (kind, jit_compile), results in found.items():
        rate = statistics.median(rate for result in results for rate in result["rates"])
        first = statistics.median(result["first"] for result in results)
        rows.append(
            {
                "texts": kind,
                "jit_compile": jit_compile,
                "texts a second": round(rate, 1),
                "first epoch [s]": round(first, 1),
            }
        )
    of_padded = {
        row["jit_compile"]: row["texts a second"] for row in rows if row["texts"] == "padded"
    }
    for row in rows:
        row["to padded"] = round(row["texts a second"] / of_padded[row["jit_compile"]], 2)
    print(measurements.write_plain("buckets", rows, arguments.output))


if __name__ == "__main__":
    main()
