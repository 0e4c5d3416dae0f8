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
        kind: of the inputs: "normal", "binary", "tokens" (labels: the tokens that follow), "text"
            (tokens with one label) or "tagged" (tokens with a label each).
        words: how many the tokens of a text are drawn from.
        of_torch: parameters of the model of PyTorch, where that is not quite the same.
    """

    model: str
    batch_size: int
    parameters: int
    input: tuple
    classes: int
    kind: str = "normal"
    words: int | None = None
    of_torch: int | None = None

    def parameters_in(self, worker):
        """How many parameters the model of a worker has."""
        return self.of_torch if worker == "opacus" and self.of_torch else self.parameters

    def batch(self, size):
        """Inputs and labels of `size` examples, the same at every call."""
        import numpy as np

        generator = np.random.default_rng(0)
        if self.kind == "tokens":
            (length,) = self.input
            tokens = generator.integers(0, self.classes, (size, length + 1), dtype="int32")
            return tokens[:, :-1], tokens[:, 1:]
        if self.words is not None:
            x = generator.integers(0, self.words, (size, *self.input), dtype="int32")
            labels = x.shape if self.kind == "tagged" else size
            return x, generator.integers(0, self.classes, labels, dtype="int32")
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
    "mobilenet_v3": Workload(
        "MobileNetV3 small on 64 × 64 pictures", 16, 1_528_106, (64, 64, 3), 10
    ),
    "efficientnet_v2": Workload(
        "EfficientNetV2-B0 on 64 × 64 pictures", 16, 5_871_514, (64, 64, 3), 10
    ),
    "convnext": Workload(
        "ConvNeXt-Tiny on 64 × 64 pictures", 16, 27_827_818, (64, 64, 3), 10
    ),
    "resnet50": Workload(
        "ResNet50 on 64 × 64 pictures", 16, 23_555_082, (64, 64, 3), 10, of_torch=23_528_522,
    ),
    "bert": Workload(
        "the shape of BERT-small: 4 post-norm blocks, d = 256, 4 heads, ff = 1024, 128 tokens of "
        "30,522, a label for each text",
        16, 11_072_258, (128,), 2, "text", words=30_522,
    ),
    "bilstm": Workload(
        "a tagger: embedding 128, LSTM 128 in both directions, Dense 17 for each of 64 tokens of "
        "10,000",
        16, 1_547_537, (64,), 17, "tagged", words=10_000, of_torch=1_548_561,
    ),
}  # fmt: skip

#: Those that every library has, and that take seconds.
SMALL = ("mlp", "cnn", "bow500", "transformer")

#: Networks as they are in use, in Keras, PyTorch and here.
REAL = ("mobilenet_v3", "efficientnet_v2", "convnext", "resnet50", "bert", "bilstm")
