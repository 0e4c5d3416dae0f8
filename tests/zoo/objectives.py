"""Models whose loss is not that of one output and its label."""

import keras

from tests.zoo.example import Example, integers, numbers

layers, ops = keras.layers, keras.ops


class Sample(layers.Layer):
    """A draw from the normal distribution that an encoder gives."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(0)

    def call(self, inputs):
        mean, log_variance = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        return mean + ops.exp(log_variance / 2) * noise


def _divergence(mean, log_variance):
    """KL(N(mean, variance), N(0, 1)) of each row."""
    terms = 1 + log_variance - ops.square(mean) - ops.exp(log_variance)
    return -ops.sum(terms, axis=-1, keepdims=True) / 2


class AddDivergence(layers.Layer):
    def __init__(self, reduced, **kwargs):
        super().__init__(**kwargs)
        self.reduced = reduced

    def call(self, inputs):
        self.add_loss(self.reduced(_divergence(*inputs)))
        return inputs[0]


def _encoded():
    inputs = keras.Input((12,))
    hidden = layers.Dense(16, activation="relu")(inputs)
    return inputs, [layers.Dense(2)(hidden), layers.Dense(2)(hidden)]


def _decoded(code):
    return layers.Dense(12, name="decoded")(layers.Dense(16, activation="relu")(code))


def variational_autoencoder():
    """The divergence is an output, with a loss that passes it on."""
    inputs, parameters = _encoded()
    outputs = {"decoded": _decoded(Sample()(parameters)), "divergence": _divergence(*parameters)}
    loss = {"decoded": "mse", "divergence": lambda y, divergence: divergence[..., 0]}
    x = numbers(12)
    y = {"decoded": x, "divergence": numbers(1) * 0}
    return Example(keras.Model(inputs, outputs), x, y, loss)


def _with_divergence(reduced):
    inputs, parameters = _encoded()
    mean = AddDivergence(reduced, name="divergence")(parameters)
    x = numbers(12)
    return Example(keras.Model(inputs, _decoded(Sample()([mean, parameters[1]]))), x, x)


def variational_autoencoder_by_add_loss():
    """A vector, one divergence for each example."""
    return _with_divergence(lambda divergence: divergence[:, 0])


def variational_autoencoder_by_scalar_add_loss():
    return _with_divergence(ops.mean)


def variational_autoencoder_by_train_step():
    class VAE(keras.Model):
        def train_step(self, data):
            return super().train_step(data)

    inputs, parameters = _encoded()
    x = numbers(12)
    return Example(VAE(inputs, _decoded(Sample()(parameters))), x, x)


def _encoder():
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(4)(layers.Dense(16, activation="relu")(inputs)))


def siamese():
    """Are both of a pair of the same kind? One encoder for both."""
    encoder = _encoder()
    pair = [keras.Input((6,)), keras.Input((6,))]
    distance = ops.abs(encoder(pair[0]) - encoder(pair[1]))
    model = keras.Model(pair, layers.Dense(1, activation="sigmoid")(distance))
    x, y = [numbers(6), numbers(6, seed=2)], integers(2, 1, seed=1).astype("float32")
    return Example(model, x, y, "binary_crossentropy")


def triplets():
    """An anchor lies nearer to what is like it than to what is not; a row has all three."""
    encoder = _encoder()
    inputs = [keras.Input((6,)) for _ in range(3)]
    outputs = ops.stack([encoder(each) for each in inputs], axis=1)

    def loss(y, places):
        near = ops.sum(ops.square(places[:, 0] - places[:, 1]), axis=-1)
        far = ops.sum(ops.square(places[:, 0] - places[:, 2]), axis=-1)
        return ops.maximum(near - far + 1, 0)

    x = [numbers(6, seed=seed) for seed in range(3)]
    return Example(keras.Model(inputs, outputs), x, numbers(1), loss)


def contrast_in_the_batch():
    """SimCLR: the other rows of the batch are what a row must not be like."""
    encoder = _encoder()
    inputs = [keras.Input((6,)), keras.Input((6,))]
    model = keras.Model(inputs, ops.stack([encoder(each) for each in inputs], axis=1))

    def loss(y, places):
        places = places / ops.norm(places, axis=-1, keepdims=True)
        alike = ops.matmul(places[:, 0], ops.transpose(places[:, 1])) / 0.1
        own = ops.arange(ops.shape(alike)[0])
        return keras.losses.sparse_categorical_crossentropy(own, alike, from_logits=True)

    return Example(model, [numbers(6), numbers(6, seed=2)], numbers(1), loss)


def two_towers_in_the_batch():
    """Retrieval: what the other users of the batch took is what this one did not take."""
    inputs = [keras.Input((), dtype="int32"), keras.Input((), dtype="int32")]
    users, things = layers.Embedding(30, 4)(inputs[0]), layers.Embedding(30, 4)(inputs[1])
    model = keras.Model(inputs, ops.stack([users, things], axis=1))

    def loss(y, places):
        scores = ops.matmul(places[:, 0], ops.transpose(places[:, 1]))
        own = ops.arange(ops.shape(scores)[0])
        return keras.losses.sparse_categorical_crossentropy(own, scores, from_logits=True)

    return Example(model, [integers(30), integers(30, seed=2)], numbers(1), loss)


def two_towers():
    """Retrieval with things that were not taken drawn for each row beforehand."""
    user, things = keras.Input((), dtype="int32"), keras.Input((5,), dtype="int32")
    table = layers.Embedding(30, 4)
    scores = ops.einsum("bd,bnd->bn", layers.Embedding(30, 4)(user), table(things))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    y = integers(1, seed=1)  # the first is the one that was taken
    return Example(keras.Model([user, things], scores), [integers(30), integers(30, 5)], y, loss)


def mixture_density():
    """A mean and a scale for each of two parts, and the likelihood of both as the loss."""
    inputs = keras.Input((6,))
    hidden = layers.Dense(16, activation="tanh")(inputs)
    outputs = layers.Reshape((3, 2))(layers.Dense(6)(hidden))

    def loss(y, outputs):
        weights, means, scales = outputs[:, 0], outputs[:, 1], ops.softplus(outputs[:, 2]) + 0.1
        logs = -ops.square((y - means) / scales) / 2 - ops.log(scales)
        return -ops.logsumexp(ops.log_softmax(weights) + logs, axis=-1)

    return Example(keras.Model(inputs, outputs), numbers(6), numbers(1, seed=1), loss)
