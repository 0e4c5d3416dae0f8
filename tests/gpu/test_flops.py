"""What a private step multiplies beside Keras's: a pass or a sum that is made twice would show.

Products are counted in the program that XLA is given, for the CPU; nothing is timed.
"""

import importlib
import pathlib

import pytest
import tensorflow as tf

from dp_keras_opt.clipping.factors import OuterProducts

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def flops(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("flops")


def ratios(flops, workload, *optimizers):
    _, *rows = flops.rows([workload], optimizers, batch_size=4)
    return [float(row["× Keras"]) for row in rows]


@pytest.mark.parametrize(
    "workload, of_sgd, in_geometry",
    [
        ("mlp", 1.0, 1.5),  # the products of the plain step; and those of squares
        ("cnn", 1.45, 1.45),  # the patches of a picture are found by a product
        ("transformer", 1.02, 1.02),
    ],
)
def test_no_more_is_multiplied_than_a_private_step_needs(flops, workload, of_sgd, in_geometry):
    sgd, scaled = ratios(flops, workload, "dpsgd", "scale_then_privatize")
    assert 0.99 <= sgd <= of_sgd and 0.99 <= scaled <= in_geometry


def test_sums_that_are_made_twice_exceed_that(flops, monkeypatch):
    once = OuterProducts.weighted_sum
    monkeypatch.setattr(
        OuterProducts, "weighted_sum", lambda self, w: once(self, 2 * w) - once(self, w)
    )
    assert ratios(flops, "mlp", "dpsgd")[0] > 1.3


def cost_of(flops, function, *shapes):
    arguments = [tf.zeros(shape) for shape in shapes]
    function = tf.function(function, jit_compile=True, autograph=False)
    return flops.cost(function.experimental_get_compiler_ir(*arguments)(stage="hlo"))


def test_products_and_bytes_are_counted(flops):
    found = cost_of(flops, lambda a, b: a @ b, (8, 16), (16, 4))
    assert found.flops == 2 * 8 * 16 * 4
    found = cost_of(flops, lambda a, b: tf.matmul(a, b, transpose_a=True), (3, 5, 8), (3, 5, 4))
    assert found.flops == 2 * 3 * 5 * 8 * 4
    found = cost_of(flops, lambda a, b: tf.nn.conv2d(a, b, 2, "VALID"), (2, 9, 9, 3), (3, 3, 3, 7))
    assert found.flops == 2 * (2 * 4 * 4 * 7) * (3 * 3 * 3)
    assert cost_of(flops, lambda a, b: a + b, (8, 16), (8, 16)) == (0, 3 * 4 * 8 * 16)


def test_what_the_result_does_not_need_does_not_count(flops):
    def unused(a, b):
        tf.matmul(b, a)
        return tf.matmul(a, b)

    assert cost_of(flops, unused, (8, 16), (16, 8)).flops == 2 * 8 * 16 * 8


def test_the_dearest_branch_counts_and_products_in_loops_are_refused(flops):
    def branches(a, b):
        return tf.cond(tf.reduce_sum(a) > 0, lambda: a @ b, lambda: a)

    assert cost_of(flops, branches, (8, 8), (8, 8)).flops == 2 * 8 * 8 * 8
    with pytest.raises(ValueError, match="loop"):
        cost_of(flops, lambda a: tf.map_fn(lambda row: row[None] @ a, a), (8, 8))
