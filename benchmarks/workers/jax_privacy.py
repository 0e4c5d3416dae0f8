"""JAX: `clipped_grad` and the Gaussian privatizer of jax-privacy, jitted, and without privacy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy import clipped_grad
from jax_privacy.noise_addition import gaussian_privatizer
from workloads import WORKLOADS

from workers.protocol import resident_peak, serve, timed

# A model is the shapes of its weights, layer by layer, and a function of weights and one example.


def affine(*kernel):
    return {"kernel": kernel, "bias": kernel[-1:]}


def dense(layer, x):
    return x @ layer["kernel"] + layer["bias"]


MLP = [affine(784, 512), affine(512, 512), affine(512, 10)]


def mlp(weights, x):
    first, second, last = weights
    return dense(last, jax.nn.relu(dense(second, jax.nn.relu(dense(first, x)))))


CNN = [affine(8, 8, 1, 16), affine(4, 4, 16, 32), affine(512, 32), affine(32, 10)]


def cnn(weights, image):
    def conv(layer, x, padding):
        dimensions = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            x, layer["kernel"], (2, 2), padding, dimension_numbers=dimensions
        )
        x = jax.nn.relu(x + layer["bias"])
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID")

    first, second, hidden, last = weights
    x = conv(second, conv(first, image[None], "SAME"), "VALID").ravel()
    return dense(last, jax.nn.relu(dense(hidden, x)))


BOW500 = [affine(10_000, 500)]


def bow500(weights, x):
    return dense(weights[0], x)


NORM = {"scale": (128,), "bias": (128,)}
BLOCK = {
    "norms": [NORM, NORM],
    "query": affine(128, 128),
    "key": affine(128, 128),
    "value": affine(128, 128),
    "out": affine(128, 128),
    "wide": affine(128, 512),
    "narrow": affine(512, 128),
}
TRANSFORMER = {
    "token": (2000, 128),
    "position": (64, 128),
    "blocks": [BLOCK, BLOCK],
    "norm": NORM,
    "logits": affine(128, 2000),
}


def transformer(weights, tokens):
    def norm(layer, x):
        x = jax.nn.standardize(x, epsilon=1e-5)
        return x * layer["scale"] + layer["bias"]

    def attention(block, x):
        heads = (dense(block[name], x).reshape(-1, 4, 32) for name in ("query", "key", "value"))
        attended = jax.nn.dot_product_attention(*heads, is_causal=True)
        return dense(block["out"], attended.reshape(x.shape))

    x = weights["token"][tokens] + weights["position"]
    for block in weights["blocks"]:
        first, second = block["norms"]
        x = x + attention(block, norm(first, x))
        wide = jax.nn.gelu(dense(block["wide"], norm(second, x)), approximate=False)
        x = x + dense(block["narrow"], wide)
    return dense(weights["logits"], norm(weights["norm"], x))


def prepare(workload, variant, batch_size, device):
    """See `protocol.serve`; variants "plain", "vectorized" and "one_by_one"."""
    if device == "gpu" and jax.default_backend() != "gpu":
        raise RuntimeError("JAX sees no GPU")
    x, y = (jnp.asarray(array) for array in WORKLOADS[workload].batch(batch_size))
    shapes, model = globals()[workload.upper()], globals()[workload]
    generator = np.random.default_rng(0)
    weights = jax.tree.map(
        lambda shape: jnp.asarray(0.05 * generator.standard_normal(shape, dtype="float32")),
        shapes, is_leaf=lambda leaf: isinstance(leaf, tuple),
    )  # fmt: skip

    def example_loss(weights, x, y):
        logits = model(weights, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def mean_loss(weights, x, y):
        return jax.vmap(example_loss, (None, 0, 0))(weights, x, y).mean()

    clipped = clipped_grad(
        example_loss, l2_clip_norm=1.0, normalize_by=batch_size, batch_argnums=(1, 2),
        keep_batch_dim=False, microbatch_size=1 if variant == "one_by_one" else None,
    )  # fmt: skip
    privatizer = gaussian_privatizer(stddev=1.0 * clipped.sensitivity())  # noise multiplier 1
    adam = optax.adam(0.001)

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state, x, y):
        weights, noise, moments = state
        if variant == "plain":
            gradients = jax.grad(mean_loss)(weights, x, y)
        else:
            gradients, noise = privatizer.update(clipped(weights, x, y), noise)
        updates, moments = adam.update(gradients, moments)
        return optax.apply_updates(weights, updates), noise, moments

    state = weights, privatizer.init(weights), adam.init(weights)

    def step():
        nonlocal state
        state = train(state, x, y)
        return state

    return timed(step, wait=jax.block_until_ready), sum(w.size for w in jax.tree.leaves(weights))


def peak_megabytes(device):
    """The most memory that JAX held on the GPU, or that the process held on the CPU."""
    if device == "cpu":
        return resident_peak()
    return jax.devices()[0].memory_stats()["peak_bytes_in_use"] / 2**20


if __name__ == "__main__":
    serve(prepare, ("jax", "jaxlib", "jax-privacy"), peak_megabytes)
