"""Large tables: a step of few rows (`SparseEmbeddings`) beside a step of whole tables.

    python3.11 benchmarks/sparse.py

An embedding of 10⁶ rows × 64, the mean over 20 words and a layer of 10 classes; words by Zipf's law
(1.3), Poisson batches of 256, threshold 4. Each rule is trained with noise on all rows and on the
chosen ones, in a process each, in turn. A row of the table is the median over the steps of all
rounds, timed from the end of one to the end of the next; the memory is what the steps need at most
beside what the process holds after the first of them: model, moments and data.

Runs in the environment it is started in, on Linux. Writes `output/sparse/sparse.csv` and
`sparse.md`.
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import measurements

WORDS, WIDTH, LENGTH, BATCH, THRESHOLD = 1_000_000, 64, 20, 256, 4.0
RULES = ("DPSGD", "DPAdam")


def memory(name):
    """A line of what Linux says of this process, in MB."""
    lines = pathlib.Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def train(kind, rule, steps):
    """Milliseconds of each step, MB beside what was held, and rows that were chosen in a step."""
    import keras
    import numpy as np

    import dp_keras_opt as dp

    class Ends(keras.callbacks.Callback):
        times: list[float] = []

        def on_train_batch_end(self, batch, logs=None):
            self.times.append(time.perf_counter())
            self.peak = memory("VmHWM")
            if batch == 0:
                self.held = memory("VmRSS")
                pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")

    rng = np.random.default_rng(0)
    words = np.minimum(rng.zipf(1.3, (8 * BATCH, LENGTH)), WORDS - 1).astype("int32")
    classes = rng.integers(0, 10, len(words))
    inputs = keras.Input((LENGTH,), dtype="int32")
    mean = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(WORDS, WIDTH)(inputs))
    model = dp.DPModel(inputs, keras.layers.Dense(10)(mean))
    sparse = dp.optimizers.SparseEmbeddings(THRESHOLD) if kind == "chosen rows" else None
    optimizer = getattr(dp.optimizers, rule)(
        0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=BATCH, sparse_embeddings=sparse
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batches = dp.data.poisson_batches((words, classes), BATCH, steps)
    model.fit(batches, verbose=0)
    ends = Ends()
    model.fit(batches, verbose=0, callbacks=[ends])
    chosen = WORDS
    if sparse is not None:
        chosen = float(np.sum(optimizer.variables[-1])) / (2 * steps)
    return {
        "milliseconds": [1e3 * (end - start) for start, end in itertools.pairwise(ends.times)],
        "megabytes": ends.peak - ends.held,
        "rows": chosen,
    }


def measured(kind, rule, steps):
    """What `train` gives, in a process of its own."""
    here = pathlib.Path(__file__).resolve()
    command = [sys.executable, str(here), "--worker", kind, rule, str(steps)]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(here.parent.parent), **os.environ}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="in each process")
    parser.add_argument("--output", default="output/sparse")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        kind, rule, steps = arguments.worker
        print(json.dumps(train(kind, rule, int(steps))))
        return
    found = {}
    for _ in range(arguments.rounds):
        for rule in RULES:
            for kind in ("whole table", "chosen rows"):
                result = measured(kind, rule, arguments.steps)
                print(rule, kind, result, flush=True)
                found.setdefault((rule, kind), []).append(result)
    rows = []
    for (rule, kind), results in found.items():
        times = [each for result in results for each in result["milliseconds"]]
        rows.append(
            {
                "rule": rule,
                "noise on": kind,
                "rows a step": round(statistics.median(result["rows"] for result in results)),
                "ms a step": round(statistics.median(times), 1),
                "MB a step": round(statistics.median(result["megabytes"] for result in results)),
            }
        )
    whole = {row["rule"]: row for row in rows if row["noise on"] == "whole table"}
    for row in rows:
        for name in ("ms a step", "MB a step"):
            row[f"to the whole: {name[:2]}"] = round(row[name] / whole[row["rule"]][name], 3)
    print(measurements.write_plain("sparse", rows, arguments.output))


if __name__ == "__main__":
    main()
