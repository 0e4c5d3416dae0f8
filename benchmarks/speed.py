"""Step time and peak memory of private training against Keras without privacy, in one run.

    python benchmarks/speed.py                 # mlp, cnn, bow500
    python benchmarks/speed.py cnn --rounds 9
    python benchmarks/speed.py --optimizers    # adaptive optimizers in their own geometry

Keras without privacy (with and without XLA), the bare draw of the noise, and this library's DP-SGD
step are timed in turn, round by round, so that a drift of the machine's speed hits all of them. The
floor of a private step is the faster non-private one plus the noise; the table is for the ratio to
it. Absolute figures belong to the machine. Peak memory is that of a process of its own for each.

With `--optimizers` the contenders are optimizers that clip in the geometry of their second moment,
against DPAdam with post-processing, which clips plain gradients.
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
OPTIMIZERS = ("post_processing", "scale_then_privatize", "DP2RMSprop adaptive")


def stepper(workload, contender):
    """A function that runs a number of steps of a contender: milliseconds a step."""
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
        model.compile(_private_optimizer(contender, len(x)), loss)
        data = dp.data.assume_sampling(data, dp.accounting.Sampling.shuffled(10**6, len(x)))

    def run(steps):
        clock = _Clock()
        options = {"shuffle": False, "verbose": 0, "callbacks": [clock]}
        model.fit(data, steps_per_epoch=steps, **options)
        return clock.milliseconds

    return run


class _Clock(keras.callbacks.Callback):
    """Times the steps between the first and the last, without what `fit` does around them."""

    def on_train_begin(self, logs=None):
        self._ends = []

    def on_train_batch_end(self, batch, logs=None):
        self._ends.append(time.perf_counter())

    @property
    def milliseconds(self):
        return 1e3 * (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)


def _private_optimizer(contender, batch_size):
    common = {"clip_norm": 1.0, "noise_multiplier": 1.0, "batch_size": batch_size}
    if contender == "private":
        return dp.optimizers.DPSGD(0.01, **common)
    if contender == "DP2RMSprop adaptive":  # one step of the SGD phase, then adaptive ones only
        return dp.optimizers.DP2RMSprop(
            0.01, 0.01, epsilon=1e-3, delay=(1, 10**6), adaptive_clip_norm=1.0, **common
        )
    return dp.optimizers.DPAdam(0.001, epsilon=1e-3, second_moment=contender, **common)


def _noise_stepper(shapes):
    source = dp.noise.entropy.NoiseSource()

    @tf.function
    def draw():
        return [tf.reduce_max(source.normal(shape)) for shape in shapes]

    def run(steps):
        start = time.perf_counter()
        for _ in range(steps):
            draw()
        return 1e3 * (time.perf_counter() - start) / steps

    return run


def measure(workload, steps, rounds, contenders=CONTENDERS):
    """Milliseconds a step of each contender: one list of rounds each."""
    steppers = {name: stepper(workload, name) for name in contenders}
    for run in steppers.values():
        run(3)
    times = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in steppers.items():
            times[name].append(run(steps))
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


def compare_optimizers(workloads, steps, rounds):
    """Prints the time and memory of each of `OPTIMIZERS`, and their ratios to the first."""
    print("| workload | optimizer | ms a step | ratio | peak MB | ratio |")
    print("|" + "---|" * 6)
    for workload in workloads:
        times = measure(workload, steps, rounds, OPTIMIZERS)
        memory = {name: peak_memory(workload, name) for name in OPTIMIZERS}
        base = OPTIMIZERS[0]
        for name in OPTIMIZERS:
            slower = statistics.median(
                time / plain for time, plain in zip(times[name], times[base], strict=True)
            )
            figures = [f"{statistics.median(times[name]):.1f}", f"{slower:.2f}"]
            figures += [f"{memory[name]:.0f}", f"{memory[name] / memory[base]:.2f}"]
            print("| " + " | ".join([workload, name, *figures]) + " |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=40, help="steps a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--optimizers", action="store_true", help="compare adaptive optimizers")
    parser.add_argument("--memory-of", choices=CONTENDERS + OPTIMIZERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        stepper(options.workloads[0], options.memory_of)(10)
        print(json.dumps(_peak_megabytes()))
        return
    if options.optimizers:
        compare_optimizers(options.workloads, options.steps, options.rounds)
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
