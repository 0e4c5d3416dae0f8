"""The draw of normal noise by several routes, each against `tf.random.normal` of the same size.

    python benchmarks/draw.py

On the CPU, in one process: in each round all routes take their turn, forwards and backwards by
turns, and the ratios are medians of the ratios within a round: of the time, and of the processor's
time, of all cores. What each route keeps of the proofs stands beside it: whether a draw can be
exactly 0, where the tail ends, and what is near 0.

Writes `output/draw/draw.csv` and `draw.md`.
"""

import argparse
import pathlib
import secrets
import time

import measurements
import numpy as np
import tensorflow as tf
from cryptography.hazmat.primitives import ciphers

from dp_keras_opt.noise import distribution, host
from dp_keras_opt.noise.gaussian import NORMAL
from dp_keras_opt.noise.secure import SecureNoiseSource
from dp_keras_opt.noise.source import NoiseSource

SIZES = 5_000_000, 100_000
ALL, OF_TENSORFLOW = ("never", "9.49", "every number"), ("2⁻²³", "5.68", "multiples of a grid")
BITS = ("", "", "")


def graph(draw, **options):
    traced = tf.function(draw, autograph=False, **options)
    return lambda: traced()


def ours(size, source=NoiseSource, module=distribution, name="", value=0, **options):
    """This library's draw, with one constant of a module changed while it is drawn."""
    source = source()
    draw = graph(lambda: distribution.drawn(source, NORMAL, [(size,)])[0], **options)

    def changed():
        usual = getattr(module, name)
        setattr(module, name, value)
        draw()
        setattr(module, name, usual)

    return changed if name else draw


class OnHost(NoiseSource):
    on_host = True


def ziggurat(size, dtype):
    generator = np.random.Generator(np.random.Philox(secrets.randbits(128)))
    return lambda: generator.standard_normal(size, dtype).astype(np.float32)


def words_of_tensorflow(size):
    generator = tf.random.Generator.from_non_deterministic_state("philox")
    return graph(lambda: generator.uniform_full_int((size,), tf.int64))


def words_of_numpy(size):
    generator = np.random.Philox(secrets.randbits(128))
    return lambda: generator.random_raw(size)


def words_of_cipher(size, algorithm, mode):
    stream = ciphers.Cipher(algorithm, mode).encryptor()
    zeros, found = bytes(8 * size), bytearray(8 * size + 16)
    return lambda: stream.update_into(zeros, found)


#: (route, what it keeps, function of a size that gives a function that draws).
ROUTES = [
    ("`tf.random.normal`", OF_TENSORFLOW, lambda n: graph(lambda: tf.random.normal((n,)))),
    ("`tf.random.normal`, XLA", OF_TENSORFLOW,
     lambda n: graph(lambda: tf.random.normal((n,)), jit_compile=True)),
    ("**graph, blocks of 2²⁰ (three cores or more, GPUs, several workers)**", ALL, ours),
    ("graph, blocks of 2¹⁶", ALL, lambda n: ours(n, name="_AT_ONCE", value=2**16)),
    ("**graph, XLA**", ALL, lambda n: ours(n, jit_compile=True)),
    ("**NumPy, blocks of 2¹⁵ (one core or two)**", ALL, lambda n: ours(n, OnHost)),
    ("NumPy, blocks of 2¹³", ALL, lambda n: ours(n, OnHost, host, "_BLOCK", 2**13)),
    ("NumPy, blocks of 2¹⁷", ALL, lambda n: ours(n, OnHost, host, "_BLOCK", 2**17)),
    ("NumPy's ziggurat, float32", ("2⁻²³", "8.2", "multiples of 256 grids"),
     lambda n: ziggurat(n, np.float32)),
    ("NumPy's ziggurat, float64 rounded", ("2⁻⁵²", "13.7", "multiples of 256 grids"),
     lambda n: ziggurat(n, np.float64)),
    ("**`secure_noise=True`**", ("never", "13.4", "every number"),
     lambda n: ours(n, SecureNoiseSource)),
    ("64 bits alone: TensorFlow's Philox", BITS, words_of_tensorflow),
    ("64 bits alone: NumPy's Philox", BITS, words_of_numpy),
    ("64 bits alone: AES-256 in counter mode", BITS, lambda n: words_of_cipher(
        n, ciphers.algorithms.AES(secrets.token_bytes(32)), ciphers.modes.CTR(bytes(16)))),
    ("64 bits alone: ChaCha20", BITS, lambda n: words_of_cipher(
        n, ciphers.algorithms.ChaCha20(secrets.token_bytes(32), bytes(16)), None)),
]  # fmt: skip


def ratios(size, rounds):
    """For each route (time, processor's time) over those of the first; medians over the rounds."""
    draws = [make(size) for _, _, make in ROUTES]
    repeats = max(1, 1_000_000 // size)
    for draw in draws:
        draw()
        draw()
    found = np.empty((rounds, len(draws), 2))
    for number in range(rounds):
        for index in range(len(draws))[:: -1 if number % 2 else 1]:
            start = time.perf_counter(), time.process_time()
            for _ in range(repeats):
                draws[index]()
            found[number, index] = time.perf_counter() - start[0], time.process_time() - start[1]
    return np.median(found / found[:, :1], axis=0)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--output", type=pathlib.Path, default="output/draw")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    options = parser.parse_args()
    columns = {}
    for size in options.sizes:
        of_times = ratios(size, options.rounds)
        columns[f"{size:,} draws"] = of_times[:, 0]
        columns[f"{size:,}, processor"] = of_times[:, 1]
    rows = [
        {"route": route}
        | {name: f"{column[i]:.2f}" for name, column in columns.items()}
        | dict(zip(("exactly 0", "ends at", "near 0"), kept, strict=True))
        for i, (route, kept, _) in enumerate(ROUTES)
    ]
    options.output.mkdir(parents=True, exist_ok=True)
    print(measurements.write_plain("draw", rows, options.output))


if __name__ == "__main__":
    main()
