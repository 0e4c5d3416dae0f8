"""PyTorch: Opacus with hooks and with ghost clipping, and without privacy."""

import operator

import torch
from opacus import PrivacyEngine
from opacus.layers import DPLSTM
from opacus.validators import ModuleValidator
from torch import fx, nn
from torch.utils.data import DataLoader, TensorDataset
from workloads import WORKLOADS

from workers.protocol import resident_peak, serve, timed


class Residual(nn.Module):
    def __init__(self, branch):
        super().__init__()
        self.branch = branch

    def forward(self, x):
        return x + self.branch(x)


class Attention(nn.Module):
    """Self-attention of 4 heads, from layers that Opacus has rules for."""

    def __init__(self, width, causal):
        super().__init__()
        self.causal = causal
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        batch, length, width = x.shape
        heads = (
            layer(x).view(batch, length, 4, width // 4).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=self.causal)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


class Embeddings(nn.Module):
    """Of tokens and of their positions."""

    def __init__(self, words, length, width):
        super().__init__()
        self.token, self.position = nn.Embedding(words, width), nn.Embedding(length, width)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        return self.token(tokens) + self.position(positions)


def mlp():
    return (nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def cnn():
    return (
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten(),
        nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def bow500():
    return (nn.Linear(10_000, 500),)


def transformer():
    yield Embeddings(2000, 64, 128)
    for _ in range(2):
        yield Residual(nn.Sequential(nn.LayerNorm(128), Attention(128, causal=True)))
        dense = nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)
        yield Residual(nn.Sequential(nn.LayerNorm(128), *dense))
    yield from (nn.LayerNorm(128), nn.Linear(128, 2000))


class First(nn.Module):
    def forward(self, x):
        return x[:, 0]


def bert():
    yield from (Embeddings(30_522, 128, 256), nn.LayerNorm(256, 1e-12))
    for _ in range(4):
        yield from (Residual(Attention(256, causal=False)), nn.LayerNorm(256, 1e-12))
        dense = nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)
        yield from (Residual(nn.Sequential(*dense)), nn.LayerNorm(256, 1e-12))
    yield from (First(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 2))


class Outputs(nn.Module):
    """Those of an LSTM, without its state."""

    def __init__(self, lstm):
        super().__init__()
        self.lstm = lstm

    def forward(self, x):
        return self.lstm(x)[0]


def bilstm():
    lstm = DPLSTM(128, 128, batch_first=True, bidirectional=True)
    return nn.Embedding(10_000, 128), Outputs(lstm), nn.Linear(256, 17)


def torchvision_models():
    try:
        from torchvision import models
    except RuntimeError:  # a CPU build of PyTorch lacks operators that are not used here
        for name in ("nms", "qnms"):
            form = "(Tensor boxes, Tensor scores, float threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", form)
        from torchvision import models
    return models


class Tracer(fx.Tracer):
    """Keeps each layer that owns parameters as it is."""

    def is_leaf_module(self, module, name):
        return (
            super().is_leaf_module(module, name)
            or next(module.parameters(recurse=False), None) is not None
        )


def adapted(network):
    """A network of torchvision with group normalization, and without what hooks do not allow."""
    for module in network.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    network = ModuleValidator.fix(network)
    graph = Tracer().trace(network)
    for node in graph.nodes:
        if node.target is operator.iadd:
            node.target = operator.add
    return (fx.GraphModule(network, graph),)


def mobilenet_v3():
    return adapted(torchvision_models().mobilenet_v3_small(num_classes=10))


def efficientnet_v2():
    """B0, which torchvision does not name: as Keras has it."""
    parts = torchvision_models().efficientnet
    blocks = [
        parts.FusedMBConvConfig(*sizes)
        for sizes in ((1, 3, 1, 32, 16, 1), (4, 3, 2, 16, 32, 2), (4, 3, 2, 32, 48, 2))
    ]
    blocks += [
        parts.MBConvConfig(*sizes)
        for sizes in ((4, 3, 2, 48, 96, 3), (6, 3, 1, 96, 112, 5), (6, 3, 2, 112, 192, 8))
    ]
    return adapted(parts.EfficientNet(blocks, 0.2, num_classes=10, last_channel=1280))


class LayerScale(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return self.weight * x


def convnext():
    """With the scale of each block as a layer: Opacus has no rule for a parameter of a block."""
    network = torchvision_models().convnext_tiny(num_classes=10)
    for block in [part for part in network.modules() if hasattr(part, "layer_scale")]:
        block.block.append(LayerScale(block.layer_scale))
        del block.layer_scale
        block.layer_scale = 1.0
    return adapted(network)


def resnet50():
    return adapted(torchvision_models().resnet50(num_classes=10))


def prepare(workload, variant, batch_size, device):
    """See `protocol.serve`; variants "plain", "hooks" and "ghost"."""
    if device == "gpu" and not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no GPU")
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs, as TensorFlow and JAX have it
    place = "cuda" if device == "gpu" else "cpu"
    spec = WORKLOADS[workload]
    x, y = (torch.from_numpy(array).to(place) for array in spec.batch(batch_size))
    x, y = (x.movedim(-1, 1) if x.ndim == 4 else x).contiguous(), y.long()  # channels come first
    model = nn.Sequential(*globals()[workload]()).to(place)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), 0.001)
    criterion = nn.CrossEntropyLoss()
    if variant != "plain":
        model, optimizer, *wrapped, _ = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=DataLoader(TensorDataset(x, y), batch_size),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=variant,
        )
        criterion = wrapped[0] if wrapped else criterion

    def loss():
        logits = model(x)
        if logits.ndim == 2:
            return criterion(logits, y)
        # Over sequences ghost clipping wants the shape, to take the mean within each example.
        shape = {"shape": logits.shape} if variant == "ghost" else {}
        return criterion(logits.flatten(0, 1), y.flatten(), **shape)

    def step():
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return timed(step, wait=lambda _: device == "gpu" and torch.cuda.synchronize()), parameters


def peak_megabytes(device):
    """The most memory that PyTorch held on the GPU, or that the process held on the CPU."""
    if device == "cpu":
        return resident_peak()
    return torch.cuda.max_memory_allocated() / 2**20


if __name__ == "__main__":
    serve(prepare, ("torch", "opacus"), peak_megabytes)
