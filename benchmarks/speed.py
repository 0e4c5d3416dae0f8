"""Step time and peak memory of private training against Keras without privacy, in one run.

    python benchmarks/speed.py                 # mlp, cnn, bow500
    python benchmarks/speed.py cnn --rounds 9

Keras without privacy (with and without XLA), the bare draw of the noise, and this library's DP-SGD
step are timed in turn, round by round, so that a drift of the machine's speed hits all of them. The
floor of a private step is the faster non-private one plus the noise; the table is for the ratio to
it. Absolute figures belong to the machine. Peak memory is that of a process of its own for each.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from workloads import WORKLOADS

import dp_keras_opt as dp

CONTENDERS = ("non-private", "non-private XLA", "noise", "private")


def stepper(workload, contender):
    """A function that runs a number of steps of a contender on a workload."""
    inputs, outputs, x, y = WORKLOADS[workload]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    data = tf.data.Dataset.from_tensors((tf.constant(x), tf.constant(y))).repeat()
    if contender == "noise":
        return _noise_stepper([v.shape for v in keras.Model(inputs, outputs).trainable_variables])
    if contender.startswith("non-private"):
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.01), loss, jit_compile=contender.endswith("XLA"))
    else:
        model = dp.DPModel(inputs, outputs)
        optimizer = dp.optimizers.DPSGD(
            0.01, clip_norm=1.0, noise_multiplier=1.0, batch_size=len(x)
        )
        model.compile(optimizer, loss)
        data = dp.data.assume_sampling(data, dp.accounting.Sampling.shuffled(10**6, len(x)))
    return lambda steps: model.fit(data, steps_per_epoch=steps, shuffle=False, verbose=0)


def _noise_stepper(shapes):
    source = dp.noise.entropy.NoiseSource()

    @tf.function
    def draw():
        return [tf.reduce_max(source.normal(shape)) for shape in shapes]

    return lambda steps: [draw() for _ in range(steps)]


def measure(workload, steps, rounds):
    """Milliseconds a step of each contender: one list of rounds each."""
    steppers = {name: stepper(workload, name) for name in CONTENDERS}
    for run in steppers.values():
        run(3)
    times = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, run in steppers.items():
            start = time.perf_counter()
            run(steps)
            times[name].append(1e3 * (time.perf_counter() - start) / steps)
    return times


def peak_memory(workload, contender):
    """Peak resident memory in MB of a process that trains this and nothing else."""
    command = [sys.executable, __file__, workload, "--memory-of", contender]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(answer.splitlines()[-1])


def _peak_megabytes():
    """High-water mark of this process's resident memory (a child's ru_maxrss is its parent's)."""
    with open("/proc/self/status", encoding="ascii") as status:
        (line,) = (line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=40, help="steps a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory-of", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        stepper(options.workloads[0], options.memory_of)(10)
        print(json.dumps(_peak_megabytes()))
        return
    print("| workload | non-private | with XLA | noise | private | private / floor | "
          "peak MB non-private | private | ratio |")  # fmt: skip
    print("|" + "---|" * 9)
    for workload in options.workloads:
        times = measure(workload, options.steps, options.rounds)
        medians = [statistics.median(times[name]) for name in CONTENDERS]
        ratio = statistics.median(
            private / (min(plain, xla) + noise)
            for plain, xla, noise, private in zip(*(times[n] for n in CONTENDERS), strict=True)
        )
        memory = [peak_memory(workload, name) for name in ("non-private", "private")]
        figures = [f"{m:.1f}" for m in medians] + [f"{ratio:.2f}"]
        figures += [f"{m:.0f}" for m in memory] + [f"{memory[1] / memory[0]:.2f}"]
        print("| " + " | ".join([workload, *figures]) + " |", flush=True)


if __name__ == "__main__":
    main()
