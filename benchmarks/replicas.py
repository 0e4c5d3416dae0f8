"""Times training on two workers and on two devices beside one, on this machine.

    python benchmarks/replicas.py                             # mlp and cnn, batches of 256 and 4096
    python benchmarks/replicas.py --workloads cnn --batch-sizes 1024

Workers are processes that talk over loopback, each held to one core, as if it were a machine of its
own: "2 workers" over "1 worker" is what a second machine brings, less what a network costs. Devices
are logical ones of one process, which has two cores in either case: there the second one can bring
nothing, and the ratio is what dealing out and bringing together costs. The batch is the same in all
cases, and shared among the replicas; the step is DP-Adam with scale-then-privatize.
"""

import argparse
import json
import os
import socket
import subprocess
import sys

CASES = ("1 worker", "2 workers", "1 device", "2 devices")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="*", default=["mlp", "cnn"])
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[256, 4096])
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--rounds", type=int, default=5, help="of which the fastest counts")
    options = parser.parse_args()
    print("| examples a second | " + " | ".join(CASES) + " | workers | devices |")
    print("|---" * (len(CASES) + 3) + "|")
    for workload in options.workloads:
        for size in options.batch_sizes:
            times = [measure(case, workload, size, options) for case in CASES]
            speeds = [size / time * 1e3 for time in times]
            cells = [f"{speed:,.0f}" for speed in speeds]
            cells += [f"× {speeds[i + 1] / speeds[i]:.2f}" for i in (0, 2)]
            print(f"| {workload}, batch {size} | " + " | ".join(cells) + " |", flush=True)


def measure(case, workload, batch_size, options):
    """Milliseconds a step, in the fastest round."""
    count, kind = case.split()
    environments = [{"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}]
    if case == "2 workers":
        addresses = [f"localhost:{port}" for port in free_ports(2)]
        environments = [
            environments[0] | {"TF_CONFIG": json.dumps(
                {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            )}
            for index in range(2)
        ]  # fmt: skip
    processes = []
    for core, environment in enumerate(environments):
        arguments = [kind, count, workload, batch_size, options.steps, options.rounds, core]
        command = [sys.executable, __file__, "--case", *map(str, arguments)]
        processes.append(
            subprocess.Popen(
                command, env=os.environ | environment, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    try:
        outputs = [process.communicate(timeout=900) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit(outputs[0][1][-3000:])
    return float(outputs[0][0].split()[-1])


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("localhost", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def run(kind, count, workload, batch_size, steps, rounds, core):
    """One process of a case: prints its fastest time."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core]} if kind.startswith("worker") else set(cores[:2]))

    import keras
    import tensorflow as tf
    from workers.keras_common import fit_steps, inputs_and_outputs
    from workloads import WORKLOADS

    import dp_keras_opt as dp

    share = batch_size
    if kind.startswith("device"):
        cpu = tf.config.list_physical_devices("CPU")[0]
        logical = [tf.config.LogicalDeviceConfiguration()] * count
        tf.config.set_logical_device_configuration(cpu, logical)
    if kind == "workers":
        strategy, share = tf.distribute.MultiWorkerMirroredStrategy(), batch_size // count
    elif kind == "devices":
        strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(count)])
    else:
        strategy = tf.distribute.get_strategy()
    spec = WORKLOADS[workload]
    with strategy.scope():
        model = dp.DPModel(*inputs_and_outputs(keras, workload, spec))
        optimizer = dp.optimizers.DPAdam(
            0.001, epsilon=1e-3, second_moment="scale_then_privatize",
            clip_norm=1.0, noise_multiplier=1.0, batch_size=batch_size,
        )  # fmt: skip
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=False)
        data = tf.data.Dataset.from_tensors(spec.batch(share)).repeat()
        sampling = dp.accounting.Sampling.full(batch_size)
        data = dp.data.assume_sampling(data, sampling)
    timed = fit_steps(keras, model, data)
    print(min(timed(steps) for _ in range(rounds)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        run(*(int(part) if part.isdigit() else part for part in sys.argv[2:]))
    else:
        main()
