"""What the benchmarks train, for any framework: shapes, parameter counts, and batches of noise."""

from typing import NamedTuple


class Workload(NamedTuple):
    """A model and its data; each worker builds the model with the layers of its own framework.

    Attributes:
        model: the architecture in words.
        batch_size: of the comparison; the scaling run takes others.
        parameters: how many the model has, the same in every framework.
        input: the shape of an example.
        classes: how many the labels are drawn from.
        kind: of the inputs: "normal", "binary", or "tokens" (labels: the tokens that follow).
    """

    model: str
    batch_size: int
    parameters: int
    input: tuple
    classes: int
    kind: str = "normal"

    def batch(self, size):
        """Inputs and labels of `size` examples, the same at every call."""
        import numpy as np

        generator = np.random.default_rng(0)
        if self.kind == "tokens":
            (length,) = self.input
            tokens = generator.integers(0, self.classes, (size, length + 1), dtype="int32")
            return tokens[:, :-1], tokens[:, 1:]
        x = generator.standard_normal((size, *self.input), dtype="float32")
        x = (x > 2).astype("float32") if self.kind == "binary" else x
        return x, generator.integers(0, self.classes, size, dtype="int32")


WORKLOADS = {
    "mlp": Workload("Dense 784-512-512-10, ReLU", 256, 669_706, (784,), 10),
    "cnn": Workload(
        "Conv 16@8×8/2 same, pool 2/1, Conv 32@4×4/2, pool 2/1, Dense 32-10, ReLU",
        256, 26_010, (28, 28, 1), 10,
    ),
    "bow500": Workload("Dense 10000-500, a bag of words", 64, 5_000_500, (10_000,), 500, "binary"),
    "transformer": Workload(
        "2 pre-norm blocks, d = 128, 4 heads, ff = 512, 64 tokens of 2000, next-token loss",
        32, 918_992, (64,), 2000, "tokens",
    ),
    "gpt2": Workload(
        "the shape of GPT-2 small: 12 pre-norm blocks, d = 768, 12 heads, ff = 3072, 128 tokens of "
        "50,257, tied head, next-token loss",
        4, 123_751_680, (128,), 50_257, "tokens",
    ),
}  # fmt: skip

#: Those that every library has, and that take seconds.
SMALL = ("mlp", "cnn", "bow500", "transformer")
