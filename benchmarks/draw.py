"""The draw of normal noise by several routes, each against `tf.random.normal` of the same size.

    python benchmarks/draw.py

On the CPU, in one process: in each round all routes take their turn, forwards and backwards by
turns, and the ratios are medians of the ratios within a round. What each route keeps of the proofs
stands beside it: whether a draw can be exactly 0, where the tail ends, and what is near 0.

Writes `output/draw/draw.csv` and `draw.md`.
"""

import argparse
import pathlib
import secrets
import statistics
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


def one_core(size):
    draw = ours(size, OnHost)

    def alone():
        usual, host._threads = host._threads, lambda _: InTurn
        draw()
        host._threads = usual

    return alone


class InTurn:
    map = map


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
    ("graph, blocks of 2²⁰ (with a GPU, several workers)", ALL, ours),
    ("graph, blocks of 2¹⁶", ALL, lambda n: ours(n, name="_AT_ONCE", value=2**16)),
    ("graph, XLA", ALL, lambda n: ours(n, jit_compile=True)),
    ("**NumPy, blocks of 2¹⁵, all cores (CPU)**", ALL, lambda n: ours(n, OnHost)),
    ("NumPy, blocks of 2¹⁵, one core", ALL, one_core),
    ("NumPy, blocks of 2¹³", ALL, lambda n: ours(n, OnHost, host, "_BLOCK", 2**13)),
    ("NumPy, blocks of 2¹⁷", ALL, lambda n: ours(n, OnHost, host, "_BLOCK", 2**17)),
    ("NumPy's ziggurat, float32, one core", ("2⁻²³", "8.2", "multiples of 256 grids"),
     lambda n: ziggurat(n, np.float32)),
    ("NumPy's ziggurat, float64 rounded, one core", ("2⁻⁵²", "13.7", "multiples of 256 grids"),
     lambda n: ziggurat(n, np.float64)),
    ("**`secure_noise=True`, all cores**", ("never", "13.4", "every number"),
     lambda n: ours(n, SecureNoiseSource)),
    ("64 bits alone: TensorFlow's Philox", BITS, words_of_tensorflow),
    ("64 bits alone: NumPy's Philox, one core", BITS, words_of_numpy),
    ("64 bits alone: AES-256 in counter mode, one core", BITS, lambda n: words_of_cipher(
        n, ciphers.algorithms.AES(secrets.token_bytes(32)), ciphers.modes.CTR(bytes(16)))),
    ("64 bits alone: ChaCha20, one core", BITS, lambda n: words_of_cipher(
        n, ciphers.algorithms.ChaCha20(secrets.token_bytes(32), bytes(16)), None)),
]  # fmt: skip


def ratios(size, rounds):
    """For each route the median of its times over those of the first, round by round."""
    draws = [make(size) for _, _, make in ROUTES]
    repeats = max(1, 1_000_000 // size)
    for draw in draws:
        draw()
        draw()
    times = []
    for number in range(rounds):
        taken = dict.fromkeys(range(len(draws)))
        for index in sorted(taken, reverse=number % 2 == 1):
            start = time.perf_counter()
            for _ in range(repeats):
                draws[index]()
            taken[index] = time.perf_counter() - start
        times.append([taken[index] for index in range(len(draws))])
    return [statistics.median(each[i] / each[0] for each in times) for i in range(len(draws))]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--output", type=pathlib.Path, default="output/draw")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    options = parser.parse_args()
    columns = {f"{size:,} draws": ratios(size, options.rounds) for size in options.sizes}
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
