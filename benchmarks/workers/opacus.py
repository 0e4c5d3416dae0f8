"""PyTorch: Opacus with hooks and with ghost clipping, and without privacy."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workloads import WORKLOADS

from workers.protocol import serve, timed


class Residual(nn.Module):
    def __init__(self, branch):
        super().__init__()
        self.branch = branch

    def forward(self, x):
        return x + self.branch(x)


class Attention(nn.Module):
    """Causal self-attention of 4 heads of 32, from layers that Opacus has rules for."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(128, 128) for _ in range(4))

    def forward(self, x):
        batch, length, width = x.shape
        heads = (
            layer(x).view(batch, length, 4, 32).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


class Embeddings(nn.Module):
    """Of tokens and of their positions."""

    def __init__(self, length):
        super().__init__()
        self.token, self.position = nn.Embedding(2000, 128), nn.Embedding(length, 128)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
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
    yield Embeddings(64)
    for _ in range(2):
        yield Residual(nn.Sequential(nn.LayerNorm(128), Attention()))
        dense = nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)
        yield Residual(nn.Sequential(nn.LayerNorm(128), *dense))
    yield from (nn.LayerNorm(128), nn.Linear(128, 2000))


def prepare(workload, variant, batch_size, device):
    """See `protocol.serve`; variants "plain", "hooks" and "ghost"."""
    spec = WORKLOADS[workload]
    x, y = (torch.from_numpy(array) for array in spec.batch(batch_size))
    x, y = (x.movedim(-1, 1) if x.ndim == 4 else x).contiguous(), y.long()  # channels come first
    model = nn.Sequential(*globals()[workload]())
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

    return timed(step), parameters


if __name__ == "__main__":
    serve(prepare, ("torch", "opacus"))
