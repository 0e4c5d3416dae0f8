"""Every rule against one-example-at-a-time gradients: both norms, any geometry, all bounds.

Hypothesis draws the configurations, the same ones in every run. `path` is how an `OuterProducts`
finds its norms: as it chooses itself, or through Gram matrices, pairs of positions, block by block,
or from small gradients that are written down.
"""

import contextlib
import math

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import dp_keras_opt as dp
from dp_keras_opt.clipping import (
    Batch,
    Query,
    clipped_sums,
    explain,
    factors,
    layer_rules,
    patches,
)
from dp_keras_opt.clipping.book_keeping import per_example_gradients
from dp_keras_opt.clipping.clipped_sum import clip_factor
from dp_keras_opt.clipping.engines import engines_for
from dp_keras_opt.clipping.factors import OuterProducts
from dp_keras_opt.clipping.self_check import checked_engines
from tests.helpers import draws
from tests.helpers.per_example import one_at_a_time

layers = keras.layers
ROWS = 5
#: By how much a norm may be raised, for what rounding may take, in units of itself.
RAISED = 9e-4
PATHS = st.sampled_from(["as chosen", "gram", "pairs", "blocks", "small"])
SIZES = st.integers(1, 6)


def drawn(max_examples=5, **strategies):
    """A test of configurations drawn by hypothesis, the same ones in every run."""

    def decorate(test):
        return draws.draws(max_examples)(given(path=PATHS, **strategies)(test))

    return decorate


@contextlib.contextmanager
def taking(path, block=7):
    """Lets every `OuterProducts` find its norms this way."""
    with pytest.MonkeyPatch.context() as patch:
        if path != "as chosen":
            patch.setattr(OuterProducts, "is_small", property(lambda self: path == "small"))
            patch.setattr(OuterProducts, "_gram_is_cheaper", property(lambda self: path == "gram"))
            patch.setattr(
                OuterProducts, "_pairs_are_cheaper", property(lambda self: path == "pairs")
            )
            patch.setattr(factors, "BLOCK", block)
        yield


# Data and models.


def normal(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=(ROWS, *shape)).astype("float32")


def ids(*shape, below):
    return np.random.default_rng(2).integers(0, below, (ROWS, *shape)).astype("int32")


def headed(hidden):
    """Two numbers from a hidden layer, by a Dense layer of its own."""
    return layers.Dense(2, name="head")(layers.Flatten()(hidden))


def around(layer, x):
    """A model that trains this layer and a head."""
    inputs = keras.Input(x.shape[1:], dtype=str(x.dtype))
    return keras.Model(inputs, headed(layer(inputs)))


def randomized(base):
    """Gives every weight a random value: rules must not rely on zeros or ones."""
    rng = np.random.default_rng(3)
    for weight in base.weights:
        if "float" in str(weight.dtype) and not weight.name.endswith(("_scale", "_zero", "g_idx")):
            weight.assign(rng.normal(0, 0.7, weight.shape))
    return base


def private(base, loss="mse"):
    model = dp.make_private(base)
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=4)
    model.compile(optimizer=optimizer, loss=loss)
    return model


def parts(layer):
    """The layers, from this one down, that own trainable variables themselves."""
    return [part for part in layer._flatten_layers() if owned(part)]


def owned(layer):
    return [v for v in layer._trainable_variables if v.trainable]


def mse(y, y_pred):
    y_pred = tf.cast(y_pred, tf.float32)
    return tf.reduce_mean(tf.square(tf.cast(y, tf.float32) - y_pred))


# The oracle, in float64, from the specification.


def groups_of(model, style, norm):
    """(indices of variables, share of the bound) of what is clipped together."""
    variables = model.trainable_variables
    if style == "flat":
        return [(range(len(variables)), 1.0)]
    index = {id(v): i for i, v in enumerate(variables)}
    owners = [(layer.name, [index[id(v)] for v in own]) for layer, own in owners_in(model)]
    assert sorted(i for _, indices in owners for i in indices) == list(range(len(variables)))
    shares = [1.0 if style == "per_layer" else style[name] for name, _ in owners]
    whole = sum(shares) if norm == "l1" else math.sqrt(sum(share**2 for share in shares))
    return [(own, share / whole) for (_, own), share in zip(owners, shares, strict=True)]


def owners_in(model):
    """(layer, variables) of all that is trained; a shared variable belongs to its first layer."""
    seen, owners = set(), []
    for layer in model._flatten_layers():
        own = [v for v in owned(layer) if id(v) not in seen]
        seen.update(map(id, own))
        owners += [(layer, own)] if own else []
    return owners


def norm_of(arrays, norm):
    if norm == "l1":
        return sum(np.abs(a).sum() for a in arrays)
    return math.sqrt(sum((a**2).sum() for a in arrays))


def bounded_sum(gradients, query, model):
    """Σ_i clip(s ⊙ g_i; C), or of its squares, one number per coordinate."""
    total = [np.zeros_like(g) for g in gradients[0]]
    for example in gradients:
        if query.scale is not None:
            example = [g * np.float64(s) for g, s in zip(example, query.scale, strict=True)]
        for indices, share in groups_of(model, query.style, query.norm):
            bound = query.clip_norm * share
            norm = norm_of([example[i] for i in indices], query.norm)
            factor = min(1.0, bound / max(norm, 1e-300))
            if query.normalize:
                factor = bound / (norm + query.gamma)
            for i in indices:
                total[i] = total[i] + (factor * example[i]) ** (2 if query.square else 1)
    return total


def binding(gradients, query, model):
    """The query with the clip norm that binds for half of the examples (and layers)."""
    ratios = []
    for example in gradients:
        if query.scale is not None:
            example = [g * np.float64(s) for g, s in zip(example, query.scale, strict=True)]
        for indices, share in groups_of(model, query.style, query.norm):
            ratios.append(norm_of([example[i] for i in indices], query.norm) / share)
    clip_norm = np.median([ratio for ratio in ratios if ratio > 1e-5 * max(ratios)])
    return query._replace(clip_norm=float(clip_norm))


def queries_for(model, gradients, brief=False):
    """Both norms, with and without geometry, all kinds of bounds, both clip styles, squares."""
    rng = np.random.default_rng(4)
    scale = [rng.uniform(0.2, 2.0, v.shape).astype("float32") for v in model.trainable_variables]
    scale = [tf.constant(s) for s in scale]
    names = [layer.name for layer, _ in owners_in(model)]
    shares = {name: 1.0 + i for i, name in enumerate(names)}
    if len(shares) < len(names):  # layers of equal names are known by path
        shares = "per_layer"
    queries = [
        Query(style=shares, scale=scale),
        Query(norm="l1", style="per_layer"),
        Query(scale=scale, normalize=True),
        Query(norm="l1", scale=scale),
        Query(square=True, scale=scale),
    ]
    if not brief:
        queries += [
            Query(),
            Query(scale=scale),
            Query(norm="l1"),
            Query(style="per_layer"),
            Query(norm="l1", style=shares, scale=scale, normalize=True),
            Query(norm="l1", style="per_layer", square=True),
        ]
    return tuple(binding(gradients, query, model) for query in queries)


def some(queries, model):
    """Every third of them, others for other models: the configurations that are drawn meet all."""
    if draws.is_thorough():
        return queries
    return queries[model.count_params() % 3 :: 3]


def agree(actual, expected, rtol=1e-4):
    """Agreement of every variable, relative to its own largest entry.

    Some gradients are zero but for rounding, which is coarse in half precision.
    """
    overall = max(np.abs(e).max(initial=0.0) for e in expected)
    for a, e in zip(actual, expected, strict=True):
        atol = rtol * (np.abs(e).max(initial=0.0) + overall / (100 if rtol < 1e-3 else 5))
        np.testing.assert_allclose(np.asarray(a, np.float64), e, rtol=0, atol=atol)


def check(base, x, path="as chosen", ruled=None, general=(), rtol=1e-4, block=7, checked=False):
    """A model's clipped sums, and all that its factors answer, against the oracle.

    Args:
        ruled: the layers that their rules must serve; None for all that own variables.
        general: the layers that the general engine must serve.
        rtol: of the agreement; above 1e-3, for half precision, the factors are left out.
        checked: whether the engines are those that pass the check before the first step instead.
    """
    base(tf.nest.map_structure(tf.convert_to_tensor, x))  # some weights are made in the first call
    randomized(base)
    y = normal(2, seed=5)
    model = private(base)
    tensors = tf.nest.map_structure(tf.convert_to_tensor, (x, y))
    engines = checked_engines(model, Batch(*tensors)) if checked else engines_for(model)
    ruled = parts(base) if ruled is None else ruled
    if not checked:
        assert {id(layer) for layer in engines.ruled} == {id(layer) for layer in ruled}
        assert {id(layer) for layer in engines.general} == {id(layer) for layer in general}
    gradients = one_at_a_time(base, mse, x, y)
    queries = (Query(clip_norm=math.inf), *some(queries_for(model, gradients), model))
    with taking(path, block):
        sums = clipped_sums(model, tensors, queries, engines).sums
        agree(sums[0], ordinary_gradient(model, *tensors), rtol)
        for query, total in zip(queries, sums, strict=True):
            agree(total, bounded_sum(gradients, query, model), max(rtol, RAISED))
        if rtol > 1e-3:
            return
        _, _, found = per_example_gradients(
            model, Batch(*tensors), model.per_example_losses, engines
        )
        overall = max(np.abs(g).max(initial=0.0) for one in gradients for g in one)
        for variable, factor, one in zip(
            model.trainable_variables, found, zip(*gradients, strict=True), strict=True
        ):
            check_factor(factor, np.array(one), variable, rtol, overall)


def ordinary_gradient(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model.per_example_losses(y, model(x, training=True), None))
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    return [
        np.zeros(v.shape) if g is None else np.float64(tf.convert_to_tensor(g))
        for g, v in zip(gradients, model.trainable_variables, strict=True)
    ]


def check_factor(factor, gradients, variable, rtol, overall):
    """All answers of one variable's factor; `gradients` (B, *shape) are those of the oracle.

    Args:
        overall: the largest entry of the gradients of all variables.
    """
    if factor is None:
        np.testing.assert_array_equal(gradients, 0.0)
        return
    rng = np.random.default_rng(6)
    largest = np.abs(gradients).max(initial=0.0)
    # Exactly zero, but for the rounding of some hundred float32 terms: key biases of an attention.
    if largest < 100 * 2.0**-24 * overall:
        return
    weights = rng.normal(size=ROWS)
    scale = rng.uniform(0.2, 2.0, variable.shape)
    keep = weights > np.median(weights)
    each = tuple(range(1, gradients.ndim))
    w = tf.constant(weights, tf.float32)
    s = tf.constant(scale, tf.float32)

    def close(actual, expected, rtol=rtol):
        np.testing.assert_allclose(
            np.float64(actual), expected, rtol=rtol, atol=rtol * np.abs(expected).max()
        )

    def raised(actual, expected):
        close(actual, expected, RAISED)
        close(np.minimum(actual, expected), expected)  # it may come out larger, and not smaller

    raised(tf.sqrt(factor.squared_norm()), np.sqrt((gradients**2).sum(each)))
    raised(tf.sqrt(factor.squared_norm(s)), np.sqrt(((scale * gradients) ** 2).sum(each)))
    raised(factor.l1_norm(), np.abs(gradients).sum(each))
    raised(factor.l1_norm(s), np.abs(scale * gradients).sum(each))
    close(factor.weighted_sum(w), np.tensordot(weights, gradients, 1))
    close(factor.weighted_sum_of_squares(w), np.tensordot(weights**2, gradients**2, 1))
    for count in (1, 3):
        directions = rng.normal(size=(count, *variable.shape))
        actual = np.float64(factor.inner(tf.constant(directions, tf.float32)))
        assert actual.shape == (ROWS, count)
        for direction, found in zip(directions, actual.T, strict=True):
            inner = np.tensordot(gradients, direction, direction.ndim)
            terms = np.abs(gradients * direction).sum(each).max()  # they may cancel
            np.testing.assert_allclose(found, inner, rtol=0, atol=rtol * terms)
    kept = factor.keep(tf.constant(keep)).weighted_sum(w)
    close(kept, np.tensordot(weights * keep, gradients, 1))
    close(factor.materialize(), gradients)


# Dense layers.


@drawn(
    6,
    positions=st.lists(SIZES, max_size=2),
    inputs=SIZES,
    units=SIZES,
    use_bias=st.booleans(),
    activation=st.sampled_from([None, "tanh", "softmax"]),
)
def test_dense(path, positions, inputs, units, use_bias, activation):
    # There tf.matmul, in Keras's forward pass, writes past its memory (TensorFlow 2.18 to 2.21).
    assume(not (len(positions) == 2 and inputs == 1))
    layer = layers.Dense(units, use_bias=use_bias, activation=activation)
    x = normal(*positions, inputs)
    check(around(layer, x), x, path)


#: Equation and bias axes, of what the rule serves.
EQUATIONS = [
    ("abc,cde->abde", "de"),  # the projections of MultiHeadAttention
    ("abde,dec->abc", "c"),  # its output
    ("abcd,def->abcef", "ef"),
    ("abc,cde->abde", "d"),
    ("abc,cde->abde", "b"),
    ("abc,cde->abde", "be"),
    ("ab,bc->ac", None),
    ("...x,xy->...y", "y"),
    ("...ab,bc->...ac", "ac"),
    ("ab...,bc->ac...", "c"),
    ("abc...,cb->ab...", None),
    ("abc,bcd->abd", "bd"),  # a kernel for each b
    ("abc,bcd->abd", "b"),
    ("abcd,bde->abce", "e"),
    ("abc,bc->ab", "b"),
    ("abc,b->abc", None),
    ("abc,bd->abcd", "d"),
    ("abc,cb->ab", None),
    ("abcd,dbe->aceb", "b"),
    ("abcd,ebd->abe", "be"),  # and summed over c
    ("abc,cd->ad", "d"),
    ("abc,c->a", None),
    ("abc,d->abcd", "d"),
    ("abc,dc->abd", "d"),
]


@pytest.mark.representatives(14)
@pytest.mark.parametrize("equation, bias_axes", EQUATIONS, ids=lambda value: str(value))
@drawn(
    2,
    sizes=st.permutations(range(1, 7)),  # of equal sizes, Keras adds a bias to the wrong axis
    extra=st.lists(st.integers(8, 9), min_size=1, max_size=2),
    activation=st.sampled_from([None, "tanh"]),
)
def test_einsum_dense(path, equation, bias_axes, sizes, extra, activation):
    x, layer = einsum_layer(equation, sizes, extra, bias_axes=bias_axes, activation=activation)
    check(around(layer, x), x, path)


def einsum_layer(equation, sizes, extra=(8,), **options):
    """Inputs and a layer of this equation; `extra` are the sizes of the ellipsis."""
    if "..." in equation:  # some versions of TensorFlow err where it meets an axis of size 1
        sizes = [size + 1 for size in sizes]
    source, output = equation.replace("->", ",").split(",")[::2]
    size = dict(zip("abcdefxy", [*sizes[:6], *sizes[4:6]], strict=True))
    if source.startswith("..."):  # the first of the extra axes is that of the batch
        shape = [*extra[1:], *(size[letter] for letter in source[3:])]
        targets = output[3:]
    else:
        shape = [size[letter] for letter in source[1:].replace("...", "")]
        shape += extra if source.endswith("...") else []
        targets = output[1:].replace("...", "")
    return normal(*shape), layers.EinsumDense(
        equation, output_shape=tuple(size[letter] for letter in targets), **options
    )


def test_einsum_dense_of_a_diagonal_is_served_by_the_general_engine():
    x = normal(3, 3)
    layer = layers.EinsumDense("abb,bc->ac", output_shape=(2,))
    base = around(layer, x)
    check(base, x, ruled=[base.layers[-1]], general=[layer])


@drawn(
    5,
    positions=st.tuples(st.integers(2, 6), st.integers(2, 6)),
    widths=st.tuples(SIZES, SIZES),
    heads=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    use_bias=st.booleans(),
    kind=st.sampled_from(["self", "cross", "causal", "keys"]),
)
def test_multi_head_attention(path, positions, widths, heads, dims, use_bias, kind):
    layer = layers.MultiHeadAttention(heads, dims[0], dims[1], use_bias=use_bias)
    check(*attending(layer, kind, positions, widths), path)


@pytest.mark.skipif(not hasattr(layers, "GroupQueryAttention"), reason="of later Keras")
@drawn(
    3,
    positions=st.tuples(st.integers(2, 5), st.integers(2, 5)),
    heads=st.sampled_from([(2, 1), (4, 2), (3, 3)]),
    use_bias=st.booleans(),
    kind=st.sampled_from(["self", "cross", "causal"]),
)
def test_group_query_attention(path, positions, heads, use_bias, kind):
    layer = layers.GroupQueryAttention(3, *heads, use_bias=use_bias)
    check(*attending(layer, kind, positions, (4, 3)), path)


def attending(layer, kind, positions, widths):
    """A model of an attention layer, and its inputs."""
    first = normal(positions[0], widths[0])
    if isinstance(layer, getattr(layers, "GroupQueryAttention", ())):
        widths = (widths[0], widths[0])  # of which it takes no others
    if kind in ("self", "causal"):
        inputs = keras.Input(first.shape[1:])
        hidden = layer(inputs, inputs, use_causal_mask=kind == "causal")
        return keras.Model(inputs, headed(hidden)), first
    second = normal(positions[1], widths[1], seed=8)
    query, value = keras.Input(first.shape[1:]), keras.Input(second.shape[1:])
    keys = {"key": keras.ops.tanh(value)} if kind == "keys" else {}
    return keras.Model([query, value], headed(layer(query, value, **keys))), [first, second]


def test_attention_with_padded_keys():
    # With one token, or one kind of them, scores have no gradient but rounding, which normalising
    # would compare.
    tokens = np.array([[1, 2, 0], [3, 1, 0], [1, 3, 2], [2, 3, 1], [3, 2, 0]], "int32")
    inputs = keras.Input((3,), dtype="int32")
    embedded = layers.Embedding(4, 3, mask_zero=True)(inputs)
    attended = layers.MultiHeadAttention(2, 2)(embedded, embedded)
    outputs = layers.Dense(2, name="head")(layers.GlobalAveragePooling1D()(attended))
    check(keras.Model(inputs, outputs), tokens)


# Embeddings.


@drawn(
    6,
    shape=st.lists(SIZES, max_size=2),
    rows=st.integers(1, 6),
    width=SIZES,
    mask_zero=st.booleans(),
)
def test_embedding(path, shape, rows, width, mask_zero):
    layer = layers.Embedding(rows, width, mask_zero=mask_zero)
    x = ids(*shape, below=rows)
    check(around(layer, x), x, path)


def test_negative_ids_count_from_the_end_of_the_table():
    x = np.array([[0, -1, 3], [-4, 0, 1], [-1, -1, -1], [2, -2, 1], [3, 3, -1]], "int32")
    check(around(layers.Embedding(4, 3), x), x)


def tied(rows, width, positions, tie_weights=True, **options):
    """A language model in miniature, its table used both ways."""
    table = layers.ReversibleEmbedding(rows, width, tie_weights=tie_weights, **options)
    inputs = keras.Input((positions,), dtype="int32")
    hidden = layers.Dense(width, activation="tanh")(table(inputs))
    return keras.Model(inputs, headed(table(hidden, reverse=True)))


reversible = pytest.mark.skipif(
    not hasattr(layers, "ReversibleEmbedding"), reason="of later versions of Keras"
)


@reversible
@drawn(rows=SIZES, width=SIZES, positions=SIZES, tie_weights=st.booleans())
def test_reversible_embedding(path, rows, width, positions, tie_weights):
    check(tied(rows, width, positions, tie_weights), ids(positions, below=rows), path)


@reversible
@drawn(3, rows=SIZES, width=SIZES, positions=SIZES)
def test_reversible_embedding_used_in_reverse_only(path, rows, width, positions):
    table = layers.ReversibleEmbedding(rows, width)
    x = normal(positions, width)
    inputs = keras.Input(x.shape[1:])
    table.build()
    check(keras.Model(inputs, headed(table(inputs, reverse=True))), x, path)


@reversible
def test_reversible_embedding_with_capped_logits_is_served_by_the_general_engine():
    base = tied(4, 3, 2, logit_soft_cap=2.0)
    ruled = [base.get_layer("head"), *(part for part in base.layers if type(part) is layers.Dense)]
    (table,) = [part for part in base.layers if isinstance(part, layers.ReversibleEmbedding)]
    check(base, ids(2, below=4), ruled=dict.fromkeys(ruled), general=[table])


# Convolutions.

CONVOLUTIONS = [layers.Conv1D, layers.Conv2D, layers.Conv3D]


def windows(rank, largest=3):
    return st.tuples(*[st.integers(1, largest)] * rank)


def images(rank, channels, channels_first=False):
    places = (7, 6, 5)[:rank] if rank < 3 else (4, 3, 4)
    return normal(*((channels, *places) if channels_first else (*places, channels)))


@pytest.mark.parametrize("padding", ["valid", "same", "causal"])
@pytest.mark.parametrize("rank", [1, 2, 3])
@drawn(
    3,
    data=st.data(),
    channels=st.integers(1, 3),
    filters=st.integers(1, 4),
    use_bias=st.booleans(),
    dilated=st.booleans(),
    channels_first=st.booleans(),
)
def test_convolution(
    path, data, rank, padding, channels, filters, use_bias, dilated, channels_first
):
    if padding == "causal" and rank > 1:
        return
    window, steps = data.draw(windows(rank)), data.draw(windows(rank, 2 if dilated else 3))
    if math.prod(window) == 1:  # with unequal strides, TensorFlow's own gradient may crash
        steps = (steps[0],) * rank
    layer = CONVOLUTIONS[rank - 1](
        filters,
        window,
        padding=padding,
        use_bias=use_bias,
        activation="tanh",
        **{"dilation_rate" if dilated else "strides": steps},
        **data_format(channels_first and padding != "causal" and rank < 3),
    )
    x = images(rank, channels, layer.data_format == "channels_first")
    assume(not bias_may_go_astray(layer, x))
    check(around(layer, x), x, path)


@pytest.mark.parametrize("padding", ["valid", "same"])
@drawn(
    4,
    window=st.tuples(st.integers(2, 3), st.integers(2, 3)),  # of 2 weights nothing would be left
    groups=st.integers(1, 2),
    channels=st.integers(1, 2),
    filters=st.integers(1, 2),
    use_bias=st.booleans(),
    channels_first=st.booleans(),
)
def test_standardized_convolution(
    path, padding, window, groups, channels, filters, use_bias, channels_first
):
    layer = dp.layers.StandardizedConv2D(
        groups * filters,
        window,
        padding=padding,
        groups=groups,
        use_bias=use_bias,
        activation="tanh",
        epsilon=0.1,
        **data_format(channels_first),
    )
    x = images(2, groups * channels, channels_first)
    assume(not bias_may_go_astray(layer, x))
    check(around(layer, x), x, path)


def along_the_filters(layer, size=1e4):
    """Of two examples, in factors: gradients that standardizing takes away but for rounding."""
    standardized, _ = layer.standardized(layer.kernel)
    filters = size * np.reshape(standardized, (-1, layer.filters)).T  # position t: filter t alone
    inputs = np.stack([filters, np.full_like(filters, size)])[:, None]
    deltas = np.tile(np.eye(layer.filters, dtype="float32"), (2, 1, 1, 1))
    return factors.OuterProducts(inputs, deltas, layer.kernel.shape)


@pytest.mark.parametrize("path", ["small", "gram", "blocks"])
def test_what_standardizing_takes_from_a_gradient_is_not_missing_from_its_norm(path):
    """Of a gradient along the kernel nothing is left but rounding, which the norm covers."""
    layer = dp.layers.StandardizedConv2D(2, 3, epsilon=1e-6)
    layer.build((None, 5, 5, 2))
    inner = along_the_filters(layer)
    whole = np.reshape(inner.materialize() / layer.standardized(layer.kernel)[1], (2, -1))
    with taking(path):
        factor = layer_rules.Standardized(inner, layer)
        exact = np.float64(layer.gradient_of_kernel(inner.materialize()))
        least = np.sqrt((exact**2).sum(axis=(1, 2, 3, 4)))
        norms = {2: np.sqrt(factor.squared_norm()), 1: factor.l1_norm().numpy()}
        for order in (2, 1):
            share = norms[order] / np.linalg.norm(whole, order, axis=1)
            assert (norms[order] >= least).all()
            assert (abs(share / factors.LEAST_OF_PARTS - 1) < 0.01).all()
        released = factor.weighted_sum(tf.constant([1.0, 0.0]))
        assert np.linalg.norm(released) <= np.sqrt(factor.squared_norm()[0])


@pytest.mark.parametrize("inputs, deltas", [(3e38, 1e-25), (1e-25, 3e38), (3e38, 1e-38)])
def test_what_standardizing_takes_away_does_not_overflow(inputs, deltas):
    """It would be taken from a norm that is finite, and leave nothing of it."""
    layer = dp.layers.StandardizedConv2D(4, 4)
    layer.build((None, 8, 8, 4))
    rng = np.random.default_rng(0)
    a = np.float32(inputs) * rng.choice([0.5, 1], (1, 1, 2, 64)).astype("float32")
    b = np.float32(deltas) * rng.choice([-1, 1], (1, 1, 2, 4)).astype("float32")
    for path in ("small", "gram", "blocks"):
        with taking(path):
            factor = layer_rules.Standardized(
                factors.OuterProducts(a, b, layer.kernel.shape), layer
            )
            norm = tf.sqrt(factor.squared_norm())
            if np.isfinite(norm[0]):
                weight = clip_factor(norm, 1e-8, Query())
                released = np.linalg.norm(np.float64(factor.weighted_sum(weight)))
                assert released <= 1e-8 * (1 + 1e-5)


def test_no_standardized_gradient_is_written_down(monkeypatch):
    """For a norm, where there are few positions; of users with two examples neither."""
    layer = dp.layers.StandardizedConv2D(24, 3)
    layer.build((None, 4, 4, 12))
    inner = factors.OuterProducts(normal(1, 4, 108)[:4], normal(1, 4, 24)[:4], layer.kernel.shape)
    factor = layer_rules.Standardized(inner, layer)
    exact = np.float64(factor.materialize())
    monkeypatch.setattr(factors.Mapped, "materialize", None)
    monkeypatch.setattr(factors.OuterProducts, "materialize", None)
    for found, expected in [
        (factor, exact),
        (factor.grouped(2), exact[::2] + exact[1::2]),
        (factor.mapped(lambda tensor: 3 * tensor), 9 * exact),
    ]:
        norms = np.sqrt((expected**2).sum(axis=(1, 2, 3, 4)))
        np.testing.assert_allclose(tf.sqrt(found.squared_norm()), norms, rtol=RAISED)


@pytest.mark.parametrize("mean", [0.0, 1e3])
@pytest.mark.parametrize("path", ["gram", "blocks"])
def test_the_norm_of_a_standardized_gradient_is_that_of_what_is_released(path, mean):
    """Also of filters whose deviations are within the rounding of their mean."""
    rng = np.random.default_rng(0)
    for size in (1e-4, 1.0, 1e3):
        layer = dp.layers.StandardizedConv2D(3, 3, epsilon=1e-6)
        layer.build((None, 8, 8, 2))
        layer.kernel.assign(mean + size * rng.normal(size=layer.kernel.shape))
        inputs = rng.normal(size=(ROWS, 1, 7, 18))
        inner = factors.OuterProducts(inputs, normal(1, 7, 3), layer.kernel.shape)
        with taking(path):
            norms = tf.sqrt(layer_rules.Standardized(inner, layer).squared_norm())
        released = np.float64(layer.gradient_of_kernel(inner.materialize()))
        lengths = np.sqrt((released**2).sum(axis=(1, 2, 3, 4)))
        assert np.all(norms >= lengths)
        np.testing.assert_allclose(norms, lengths, rtol=1e-2)


def data_format(channels_first):
    return {"data_format": "channels_first" if channels_first else "channels_last"}


def bias_may_go_astray(layer, x):
    """Keras adds a bias to the last axis if that has its size, also to images of channels first."""
    shape = layer.compute_output_shape(x.shape)
    return layer.use_bias and layer.data_format == "channels_first" and shape[1] == shape[-1]


@pytest.mark.filterwarnings("ignore:The per-layer engines")
@pytest.mark.parametrize("kind", ["convolution", "einsum"])
def test_bias_that_keras_adds_to_another_axis_is_noticed(kind):
    if kind == "convolution":
        layer, x = layers.Conv2D(5, 2, data_format="channels_first"), images(2, 2, True)
        assert bias_may_go_astray(layer, x)
    else:
        x, layer = einsum_layer("abc,cde->abde", [2, 2, 3, 4, 4, 6], bias_axes="d")
    check(around(layer, x), x, checked=True)


@pytest.mark.parametrize("rank", [1, 2, 3])
@drawn(2, groups=st.integers(2, 3), channels=st.integers(1, 2), filters=st.integers(1, 2))
def test_grouped_convolution(path, rank, groups, channels, filters):
    window, strides = (2, 3, 2)[:rank], (2, 1, 1)[:rank]
    layer = CONVOLUTIONS[rank - 1](groups * filters, window, strides, groups=groups)
    x = images(rank, groups * channels)
    check(around(layer, x), x, path)


def test_convolution_of_volumes_with_channels_first():
    layer, x = layers.Conv3D(4, 2, data_format="channels_first"), images(3, 2, True)
    check(around(layer, x), x)


DEPTHWISE = [layers.DepthwiseConv1D, layers.DepthwiseConv2D]
KERAS = tuple(map(int, keras.__version__.split(".")[:2]))
SEPARABLE = [layers.SeparableConv1D, layers.SeparableConv2D]


@pytest.mark.representatives(5)
@pytest.mark.parametrize("separable", [False, True], ids=["depthwise", "separable"])
@pytest.mark.parametrize("padding", ["valid", "same"])
@pytest.mark.parametrize("rank", [1, 2])
@drawn(
    3,
    size=st.integers(1, 3),
    strides=st.integers(1, 2),
    dilation=st.integers(1, 2),
    channels=st.integers(1, 3),
    multiplier=st.integers(1, 2),
    use_bias=st.booleans(),
    channels_first=st.booleans(),
)
def test_depthwise_and_separable_convolution(
    path, rank, padding, separable, size, strides, dilation, channels, multiplier, use_bias,
    channels_first,
):  # fmt: skip
    assume(strides == 1 or dilation == 1 or KERAS >= (3, 15))  # older Keras refuses both
    filters = (3,) if separable else ()
    layer = (SEPARABLE if separable else DEPTHWISE)[rank - 1](
        *filters,
        size,
        strides=strides,
        padding=padding,
        dilation_rate=dilation,
        depth_multiplier=multiplier,
        use_bias=use_bias,
        activation="tanh",
        **data_format(channels_first),
    )
    x = images(rank, channels, channels_first)
    assume(not bias_may_go_astray(layer, x))
    check(around(layer, x), x, path)


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="for the CPU")
@pytest.mark.parametrize("separable", [False, True], ids=["depthwise", "separable"])
@pytest.mark.parametrize("padding", ["valid", "same"])
@pytest.mark.parametrize("strides", [1, 2])
def test_depthwise_gradients_by_the_kernel_of_tensorflow(padding, strides, separable, monkeypatch):
    """Row by row, as many places make it worth while."""
    served = []

    def has_kernel(layer, deltas):
        served.append(original(layer, deltas))
        return served[-1]

    original = patches._has_kernel
    monkeypatch.setattr(patches, "_MANY_PLACES", 1)
    monkeypatch.setattr(patches, "_has_kernel", has_kernel)
    x, options = normal(6, 7, 3), {"padding": padding, "strides": strides, "depth_multiplier": 2}
    kind = SEPARABLE[1](3, (3, 2), **options) if separable else DEPTHWISE[1]((3, 2), **options)
    check(around(kind, x), x)
    assert served and all(served)
    with patches.compiled(by_xla=True):
        assert not original(kind, tf.zeros((1, 6, 6, 3)))


TRANSPOSED = [layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose]


@pytest.mark.parametrize("padding", ["valid", "same"])
@pytest.mark.parametrize("rank", [1, 2, 3])
@drawn(
    3,
    data=st.data(),
    channels=st.integers(1, 3),
    filters=st.integers(1, 3),
    strides=st.integers(1, 3),
    dilated=st.booleans(),
    use_bias=st.booleans(),
    channels_first=st.booleans(),
)
def test_transposed_convolution(
    path, data, rank, padding, channels, filters, strides, dilated, use_bias, channels_first
):
    layer = TRANSPOSED[rank - 1](
        filters,
        data.draw(windows(rank)),
        padding=padding,
        use_bias=use_bias,
        activation="tanh",
        **({"dilation_rate": 2} if dilated else {"strides": strides}),
        **data_format(channels_first),
    )
    shape = (4, 3, 2)[:rank]
    x = normal(*((channels, *shape) if channels_first else (*shape, channels)))
    assume(not bias_may_go_astray(layer, x))
    check(around(layer, x), x, path)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_output_padding_is_served_by_the_general_engine(rank):
    layer = TRANSPOSED[rank - 1](2, 3, strides=2, output_padding=1)
    x = normal(*(4, 3, 2)[:rank], 2)
    base = around(layer, x)
    check(base, x, ruled=[base.get_layer("head")], general=[layer])


# Normalization and other layers that are linear coordinate by coordinate.


@pytest.mark.parametrize("axis", [-1, 1, [1, 2], [2], [-1, 1], [3, 1]], ids=str)
@drawn(2, shape=st.tuples(SIZES, SIZES, SIZES), center=st.booleans(), scale=st.booleans())
def test_layer_normalization(path, axis, shape, center, scale):
    layer = layers.LayerNormalization(axis, center=center, scale=scale)
    x = normal(*shape)
    check(around(layer, x), x, path)


def test_layer_normalization_with_rms_scaling():
    layer, x = layers.LayerNormalization(rms_scaling=True), normal(3, 4)
    check(around(layer, x), x)


@pytest.mark.skipif(not hasattr(layers, "RMSNormalization"), reason="of later Keras")
@drawn(4, shape=st.lists(SIZES, min_size=1, max_size=3))
def test_rms_normalization(path, shape):
    layer, x = layers.RMSNormalization(), normal(*shape)
    check(around(layer, x), x, path)


@pytest.mark.skipif(not hasattr(layers, "RMSNormalization"), reason="of later Keras")
@pytest.mark.parametrize("axis, shape", [([1, 2], (3, 4)), (1, (3, 2, 3)), ([1, 2], (2, 2, 2))])
def test_rms_normalization_of_other_axes(axis, shape):
    """Where sizes allow it Keras broadcasts the scale to the last axes, not to these."""
    layer, x = layers.RMSNormalization(axis), normal(*shape)
    check(around(layer, x), x)


@pytest.mark.parametrize("axis", [-1, 1])
@drawn(
    3,
    places=st.lists(SIZES, min_size=1, max_size=2),
    channels=st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3), (4, -1)]),
    center=st.booleans(),
    scale=st.booleans(),
)
def test_group_normalization(path, axis, places, channels, center, scale):
    count, groups = channels
    layer = layers.GroupNormalization(groups, axis, center=center, scale=scale)
    x = normal(count, *places) if axis == 1 else normal(*places, count)
    check(around(layer, x), x, path)


@drawn(
    4,
    shape=st.tuples(SIZES, SIZES, SIZES),
    shared=st.sampled_from([None, [1], [2], [1, 2], [1, 2, 3], [3]]),
)
def test_prelu(path, shape, shared):
    layer, x = layers.PReLU(shared_axes=shared), normal(*shape)
    check(around(layer, x), x, path)


# LoRA: only the low-rank factors, and the bias, are trained.


def adapted(base, layer, rank, alpha, mode=None, quantized_first=True):
    """A model whose layer is LoRA-enabled; `check` makes both factors non-zero.

    Args:
        mode: None, or what the layer's kernel is quantized to.
        quantized_first: whether that is before LoRA, which is the other way to make the same.
    """
    steps = [lambda: layer.enable_lora(rank, lora_alpha=alpha)]
    if mode is not None:
        steps.insert(0 if quantized_first else 1, lambda: layer.quantize(mode))
    for step in steps:
        step()
    return base


MODES = st.sampled_from([None, "int8", "int4"])


@drawn(
    positions=st.lists(SIZES, max_size=2),
    sizes=st.tuples(SIZES, SIZES),
    rank=st.integers(1, 3),
    alpha=st.sampled_from([None, 0.5, 7]),
    use_bias=st.booleans(),
    mode=MODES,
    quantized_first=st.booleans(),
)
def test_lora_of_dense(path, positions, sizes, rank, alpha, use_bias, mode, quantized_first):
    layer = layers.Dense(sizes[1], use_bias=use_bias, activation="tanh")
    x = normal(*positions, sizes[0])
    base = adapted(around(layer, x), layer, rank, alpha, mode, quantized_first)
    assert len(layer.trainable_variables) == 2 + use_bias
    check(base, x, path)


@pytest.mark.parametrize(
    "equation, bias_axes",
    [
        ("abc,cde->abde", "de"),
        ("abde,dec->abc", "c"),
        ("abc,bcd->abd", "bd"),
        ("...x,xy->...y", "y"),
        ("ab...,bc->ac...", None),
        ("abcd,dbe->aceb", "b"),
        ("abcd,cbe->ae", "e"),
        ("abc,dc->abd", "d"),  # B meets the inputs, and A what comes of it
        ("abcd,ebd->abe", "be"),
        ("abcd,dbe->abce", "e"),
    ],
)
@drawn(2, sizes=st.permutations(range(1, 7)), rank=st.integers(1, 3))
def test_lora_of_einsum_dense(path, equation, bias_axes, sizes, rank):
    x, layer = einsum_layer(equation, sizes, bias_axes=bias_axes)
    check(adapted(around(layer, x), layer, rank, 0.5), x, path)


@pytest.mark.parametrize("equation, bias_axes", [("abc,cde->abde", "de"), ("abde,dec->abc", "c")])
@pytest.mark.parametrize("mode", ["int8", "int4"])
@drawn(2, sizes=st.permutations(range(1, 7)), rank=st.integers(1, 3), first=st.booleans())
def test_lora_of_quantized_einsum_dense(path, equation, bias_axes, mode, sizes, rank, first):
    x, layer = einsum_layer(equation, sizes, bias_axes=bias_axes, activation="tanh")
    check(adapted(around(layer, x), layer, rank, 0.5, mode, first), x, path)


def test_lora_along_a_group_is_served_by_the_general_engine():
    x, layer = einsum_layer("abc,bc->ac", [1, 2, 3, 4, 5, 6])
    base = adapted(around(layer, x), layer, 2, 0.5)
    check(base, x, ruled=[base.get_layer("head")], general=[layer])


@drawn(
    4,
    shape=st.lists(SIZES, max_size=2),
    sizes=st.tuples(SIZES, SIZES),
    rank=st.integers(1, 3),
    alpha=st.sampled_from([None, 0.5]),
    mode=MODES,
    quantized_first=st.booleans(),
)
def test_lora_of_embedding(path, shape, sizes, rank, alpha, mode, quantized_first):
    layer, x = layers.Embedding(*sizes), ids(*shape, below=sizes[0])
    check(adapted(around(layer, x), layer, rank, alpha, mode, quantized_first), x, path)


@reversible
@drawn(rows=SIZES, width=SIZES, positions=SIZES, tie_weights=st.booleans())
def test_lora_of_reversible_embedding(path, rows, width, positions, tie_weights):
    base = tied(rows, width, positions, tie_weights)
    (table,) = [part for part in base.layers if isinstance(part, layers.ReversibleEmbedding)]
    check(adapted(base, table, 2, 0.5), ids(positions, below=rows), path)


@reversible
def test_lora_of_a_quantized_reversible_embedding_is_of_its_look_ups():
    """Keras adds nothing to a quantized table that is used in reverse."""
    base = tied(6, 3, 4)
    (table,) = [part for part in base.layers if isinstance(part, layers.ReversibleEmbedding)]
    tokens = keras.Input((4,), dtype="int32")
    hidden = layers.Dense(3, activation="tanh", name="hidden")(table(tokens))
    base = keras.Model(tokens, headed(hidden))
    check(adapted(base, table, 2, 0.5, "int8"), ids(4, below=6))


@pytest.mark.parametrize("rank", [1, 2, 3])
@drawn(
    3,
    groups=st.integers(1, 3),
    channels=st.integers(1, 2),
    filters=st.integers(1, 3),
    lora_rank=st.integers(1, 3),
    use_bias=st.booleans(),
)
def test_lora_of_convolution(path, rank, groups, channels, filters, lora_rank, use_bias):
    window, strides = (2, 3, 2)[:rank], (2, 1, 1)[:rank]
    layer = CONVOLUTIONS[rank - 1](
        groups * filters, window, strides, groups=groups, use_bias=use_bias, activation="tanh"
    )
    x = images(rank, groups * channels)
    check(adapted(around(layer, x), layer, lora_rank, 0.5), x, path)


def test_lora_of_a_convolution_of_channels_first():
    layer, x = layers.Conv2D(3, 2, data_format="channels_first"), images(2, 2, True)
    check(adapted(around(layer, x), layer, 2, 0.5), x)


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_bias_of_a_quantized_layer(mode):
    layer, x = layers.Dense(4, activation="tanh"), normal(3, 5)
    base = around(layer, x)
    layer.quantize(mode)
    assert [v.name for v in layer.trainable_variables] == ["bias"]
    check(base, x)
    check(base, x, checked=True)


# How an `OuterProducts` finds its norms.


@pytest.mark.parametrize(
    "positions, inputs, outputs, scaled, expected",
    [
        (1, 9, 8, False, []),  # the norm is the product of two norms
        (2, 12, 11, False, ["_gram_norm"]),  # positions·(I + O) < I·O
        (2, 12, 11, True, ["_norm_of_pairs"]),
        (9, 60, 50, True, ["_blocks"]),  # of more than a few positions
        (5, 12, 11, False, ["_materialized"]),  # no larger than what was recorded
        (5, 12, 11, True, ["_materialized"]),
    ],
)
def test_path_to_the_norm(positions, inputs, outputs, scaled, expected, monkeypatch):
    rng = np.random.default_rng(0)
    a = rng.normal(size=(ROWS, 1, positions, inputs))
    b = rng.normal(size=(ROWS, 1, positions, outputs))
    outer = OuterProducts(tf.constant(a), tf.constant(b), (inputs, outputs))
    taken = []

    def spied(name, original):
        return lambda self, *args: taken.append(name) or original(self, *args)

    for name in ("_gram_norm", "_norm_of_pairs", "_blocks", "_materialized"):
        monkeypatch.setattr(OuterProducts, name, spied(name, getattr(OuterProducts, name)))
    scale = rng.uniform(0.2, 2.0, (inputs, outputs)) if scaled else 1.0
    squared = outer.squared_norm(tf.constant(scale, tf.float32) if scaled else None)
    gradients = np.einsum("bgti,bgto->bio", a, b) * scale
    np.testing.assert_allclose(squared, (gradients**2).sum((1, 2)), rtol=1e-4)
    assert taken == expected


@pytest.mark.parametrize("path", ["gram", "pairs", "blocks", "small"])
@pytest.mark.parametrize("block", [1, 200])
def test_wide_layers_on_a_sequence(path, block):
    """Wide enough for several blocks, of one row of the kernel each or of a few."""
    if path != "blocks" and block == 1:
        return
    x = normal(3, 23)
    check(around(layers.Dense(19, activation="tanh"), x), x, path, block=block)


# A variable that is used more than once: the uses are summed before the norm.


def share(layer, kernel):
    """Gives a built layer the variable of another one as its kernel."""
    name = "_kernel" if hasattr(layer, "_kernel") else "kernel"
    layer._untrack_variable(getattr(layer, name))
    layer._tracker.unlock()
    setattr(layer, name, kernel)
    layer._tracker.lock()


def shared_dense():
    shared = layers.Dense(6, activation="tanh")
    inputs = keras.Input((3, 6))
    return keras.Model(inputs, headed(shared(shared(inputs)))), normal(3, 6)


def dense_on_vector_and_sequence():
    shared = layers.Dense(4, activation="tanh")
    inputs = keras.Input((3, 4))
    vector = shared(inputs[:, 0])[:, None]
    both = layers.Concatenate(1)([shared(inputs), shared(inputs[:, :1]), vector])
    return keras.Model(inputs, headed(both)), normal(3, 4)


def shared_einsum():
    shared = layers.EinsumDense("abc,bcd->abd", (3, 4), bias_axes="bd", activation="tanh")
    inputs = keras.Input((3, 4))
    return keras.Model(inputs, headed(shared(shared(inputs)))), normal(3, 4)


def shared_convolution():
    shared = layers.Conv2D(2, (2, 3), padding="same", activation="tanh")
    inputs = keras.Input((4, 5, 2))
    hidden = layers.MaxPooling2D(2)(shared(inputs))
    return keras.Model(inputs, headed(shared(hidden))), normal(4, 5, 2)


def shared_normalization():
    shared = layers.LayerNormalization()
    inputs = keras.Input((3, 4))
    hidden = layers.Dense(4, activation="tanh")(shared(inputs))
    return keras.Model(inputs, headed(shared(hidden))), normal(3, 4)


def embedding_used_twice():
    table, inputs = layers.Embedding(4, 3), keras.Input((4,), dtype="int32")
    both = layers.Concatenate()([layers.Flatten()(table(inputs)), table(inputs[:, 0])])
    return keras.Model(inputs, headed(both)), ids(4, below=4)


def kernel_in_two_layers():
    first, second = layers.Dense(4, activation="tanh"), layers.Dense(4, use_bias=False)
    inputs = keras.Input((3, 4))
    second.build((None, 3, 4))
    hidden = first(inputs)
    share(second, first._kernel)
    return keras.Model(inputs, headed(second(hidden))), normal(3, 4)


def kernel_in_dense_and_einsum():
    """The same kernel, once as it is and once transposed."""
    first, second = layers.Dense(4, activation="tanh"), layers.EinsumDense("abd,cd->abc", (3, 4))
    inputs = keras.Input((3, 4))
    hidden = first(inputs)
    second.build((None, 3, 4))
    share(second, first._kernel)
    return keras.Model(inputs, headed(second(hidden))), normal(3, 4)


def kernel_with_and_without_groups():
    """Grouped by an axis in one layer, summed over it in the other."""
    first = layers.EinsumDense("abc,bcd->abd", (2, 3), activation="tanh")
    second = layers.EinsumDense("abc,bcd->ad", (3,))
    inputs = keras.Input((2, 3))
    hidden = first(inputs)
    second.build((None, 2, 3))
    share(second, first._kernel)
    return keras.Model(inputs, headed(second(hidden))), normal(2, 3)


def autoencoder_with_one_kernel():
    first, second = layers.Conv1D(3, 2, activation="tanh"), layers.Conv1DTranspose(2, 2)
    inputs = keras.Input((5, 2))
    hidden = first(inputs)
    second.build((None, 4, 3))
    share(second, first._kernel)
    return keras.Model(inputs, headed(second(hidden))), normal(5, 2)


def table_as_kernel():
    """The table of an embedding is also the kernel of a dense layer."""
    table, dense = layers.Embedding(4, 3), layers.Dense(3, use_bias=False)
    tokens, x = keras.Input((5,), dtype="int32"), keras.Input((2, 4))
    looked_up = table(tokens)
    dense.build((None, 2, 4))
    share(dense, table._embeddings)
    both = layers.Concatenate(1)([looked_up, dense(x)])
    return keras.Model([tokens, x], headed(both)), [ids(5, below=4), normal(2, 4)]


def table_as_einsum(rows, width):
    """The usual tied projection, written as an einsum."""
    table = layers.Embedding(rows, width)
    project = layers.EinsumDense("abd,cd->abc", (2, rows))
    tokens = keras.Input((2,), dtype="int32")
    hidden = table(tokens)
    project.build((None, 2, width))
    share(project, table._embeddings)
    return keras.Model(tokens, headed(project(hidden))), ids(2, below=rows)


def table_used_in_three_ways():
    table, dense = layers.Embedding(4, 3), layers.Dense(3, use_bias=False)
    tokens = keras.Input((3,), dtype="int32")
    hidden = table(tokens)
    dense.build((None, 3, 4))
    share(dense, table._embeddings)
    again = dense(layers.Dense(4, activation="tanh")(hidden))
    more = dense(layers.Dense(4)(again))
    both = layers.Concatenate(1)([more, table(tokens[:, :1])])
    return keras.Model(tokens, headed(both)), ids(3, below=4)


SHARED = [
    shared_dense, dense_on_vector_and_sequence, shared_einsum, shared_convolution,
    shared_normalization, embedding_used_twice, kernel_in_two_layers, kernel_in_dense_and_einsum,
    kernel_with_and_without_groups, autoencoder_with_one_kernel, table_as_kernel,
    table_used_in_three_ways,
]  # fmt: skip


@pytest.mark.representatives(16)
@pytest.mark.parametrize("path", ["as chosen", "gram", "pairs", "blocks", "small"])
@pytest.mark.parametrize("make", SHARED, ids=lambda make: make.__name__)
def test_shared_variable(make, path):
    check(*make(), path)


@pytest.mark.parametrize("rows, width", [(4, 3), (3, 5), (4, 4)])
def test_table_as_the_kernel_of_an_einsum(rows, width):
    check(*table_as_einsum(rows, width))


def test_lora_of_a_shared_layer():
    base, x = shared_dense()
    check(adapted(base, base.layers[1], 2, 0.5), x)


# Frozen layers, precision, dynamic shapes, graphs.


def test_frozen_layers_are_left_out():
    frozen = layers.Dense(4, activation="tanh", trainable=False)
    inputs = keras.Input((3, 4))
    hidden = layers.LayerNormalization()(frozen(layers.Dense(4)(inputs)))
    base = keras.Model(inputs, headed(hidden))
    check(base, normal(3, 4))
    base.get_layer("head")._kernel.trainable = False  # the bias alone
    assert [v.path for v in base.trainable_variables][-1:] == ["head/bias"]
    check(base, normal(3, 4))


def test_activation_with_weights_of_its_own():
    layer, x = layers.Dense(4, activation=layers.PReLU()), normal(3)
    check(around(layer, x), x)


def text_model():
    """One layer of each rule that a sequence may meet."""
    tokens = keras.Input((6,), dtype="int32")
    hidden = layers.Embedding(7, 4, mask_zero=True)(tokens)
    hidden = layers.EinsumDense("abc,cde->abde", (6, 2, 3), bias_axes="de")(hidden)
    hidden = layers.Reshape((6, 6))(layers.PReLU(shared_axes=[1])(hidden))
    hidden = layers.LayerNormalization()(layers.MultiHeadAttention(2, 2)(hidden, hidden))
    low_rank = layers.Dense(4, activation="tanh")
    hidden = low_rank(hidden)
    if hasattr(layers, "RMSNormalization"):
        hidden = layers.RMSNormalization()(hidden)
    hidden = layers.Conv1D(4, 2, padding="causal", activation="tanh")(hidden)
    hidden = layers.Conv1DTranspose(3, 2)(hidden)
    base = keras.Model(tokens, headed(layers.GroupNormalization(3)(hidden)))
    return adapted(base, low_rank, 2, 0.5), ids(6, below=7)


def image_model():
    """One convolution of each kind."""
    inputs = keras.Input((7, 6, 2))
    hidden = layers.Conv2D(4, (3, 2), strides=2, padding="same", activation="tanh")(inputs)
    hidden = layers.Conv2D(4, 2, groups=2, activation="tanh")(hidden)
    hidden = layers.DepthwiseConv2D(2, depth_multiplier=2, padding="same")(hidden)
    hidden = layers.SeparableConv2D(3, 2, padding="same", activation="tanh")(hidden)
    hidden = layers.Conv2DTranspose(2, 2, strides=2)(hidden)
    return keras.Model(inputs, headed(hidden)), images(2, 2)


def wide_model():
    """A sequence in a wide layer, whose norms go through Gram matrices, or blocks if scaled."""
    x = normal(3, 23)
    return around(layers.Dense(19, activation="tanh"), x), x


def tied_model(positions=3):
    return tied(4, 3, positions), ids(positions, below=4)


def tied_model_at_one_position():
    return tied_model(1)


TRACED = [text_model, image_model, wide_model]
if hasattr(layers, "ReversibleEmbedding"):
    TRACED += [tied_model, tied_model_at_one_position]


# The two passes round some 25 times one after the other, by half a digit each: 2⁻⁹ and 2⁻¹².
HALF = [("mixed_bfloat16", 50 * 2.0**-9), ("mixed_float16", 50 * 2.0**-12)]


@pytest.mark.representatives(4)
@pytest.mark.parametrize("policy, rtol", HALF)
@pytest.mark.parametrize("make", TRACED[:4], ids=lambda make: make.__name__)
def test_half_precision(make, policy, rtol):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        check(*make(), rtol=rtol)
        check_bound(*make())
    finally:
        keras.config.set_dtype_policy(before)


def check_bound(base, x):
    """However the passes round, no row moves the sum by more than its bound."""
    base(tf.nest.map_structure(tf.convert_to_tensor, x))
    model, y = private(randomized(base)), normal(2, seed=5)
    queries = tuple(Query(clip_norm=c, norm=norm) for c in (1e-3, 1.0) for norm in ("l2", "l1"))
    for row in range(ROWS):
        batch = Batch(tf.constant(x), tf.constant(y), mask=tf.range(ROWS) == row)
        for query, total in zip(queries, clipped_sums(model, batch, queries).sums, strict=True):
            moved = norm_of([np.float64(part) for part in total], query.norm)
            assert 0.5 * query.clip_norm < moved <= query.clip_norm * (1 + 1e-5)


def traced_sums(make, jit_compile):
    base, x = make()
    randomized(base)
    y = normal(2, seed=5)
    model = private(base)
    gradients = one_at_a_time(base, mse, x, y)
    queries = queries_for(model, gradients, brief=True)
    queries = queries[::-1]  # squares first: nothing of theirs may stay
    queries = queries[::2] if jit_compile else queries

    @tf.function(jit_compile=jit_compile)
    def traced(x, y):
        return clipped_sums(model, (x, y), queries).sums

    for query, total in zip(queries, traced(tf.constant(x), tf.constant(y)), strict=True):
        agree(total, bounded_sum(gradients, query, model))


@pytest.mark.parametrize("make", TRACED, ids=lambda make: make.__name__)
def test_traced_in_a_graph(make):
    traced_sums(make, jit_compile=False)


@pytest.mark.representatives(2)
@pytest.mark.parametrize("make", TRACED[:4], ids=lambda make: make.__name__)
def test_compiled_by_xla(make):
    traced_sums(make, jit_compile=True)


def attention_of_itself(inputs):
    return layers.MultiHeadAttention(2, 3)(inputs, inputs)


DYNAMIC = {
    "dense": lambda inputs: layers.Dense(11, activation="tanh")(inputs),
    "conv1d": lambda inputs: layers.Conv1D(5, 3, strides=2, padding="same")(inputs),
    "conv1d, valid": lambda inputs: layers.Conv1D(5, 2, dilation_rate=2)(inputs),
    "einsum": lambda inputs: layers.EinsumDense("abc,cd->abd", (None, 5), bias_axes="d")(inputs),
    "attention": attention_of_itself,
    "normalization": lambda inputs: layers.LayerNormalization()(inputs),
    "depthwise": lambda inputs: layers.DepthwiseConv1D(2, padding="same")(inputs),
    "separable": lambda inputs: layers.SeparableConv1D(4, 2, strides=2, padding="same")(inputs),
    "transposed": lambda inputs: layers.Conv1DTranspose(4, 2, strides=2)(inputs),
}


@pytest.mark.representatives(5)
@pytest.mark.parametrize("hidden, rows", [(name, ROWS) for name in DYNAMIC] + [("dense", None)])
def test_length_that_is_not_known_when_tracing(hidden, rows):
    inputs = keras.Input((None, 12))
    outputs = layers.Dense(2, name="head")(layers.GlobalAveragePooling1D()(DYNAMIC[hidden](inputs)))
    check_dynamic(keras.Model(inputs, outputs), [normal(n, 12) for n in (3, 7)], rows)


@pytest.mark.parametrize("make", [layers.Embedding, getattr(layers, "ReversibleEmbedding", None)])
def test_number_of_ids_that_is_not_known_when_tracing(make):
    if make is None:
        pytest.skip("of later versions of Keras")
    table, inputs = make(6, 3), keras.Input((None,), dtype="int32")
    hidden = layers.Dense(3, activation="tanh")(table(inputs))
    hidden = table(hidden, reverse=True) if make is not layers.Embedding else hidden
    outputs = layers.Dense(2, name="head")(layers.GlobalAveragePooling1D()(hidden))
    check_dynamic(keras.Model(inputs, outputs), [ids(n, below=6) for n in (1, 6)], ROWS)


def check_dynamic(base, batches, rows):
    """One traced function for batches of several lengths."""
    randomized(base)
    model, y = private(base), normal(2, seed=5)
    found = [one_at_a_time(base, mse, x, y) for x in batches]
    queries = queries_for(model, found[0], brief=True)
    spec = tf.TensorSpec((rows, None, *batches[0].shape[2:]), batches[0].dtype)

    @tf.function(input_signature=[spec, tf.TensorSpec((rows, 2), tf.float32)])
    def traced(x, y):
        return clipped_sums(model, (x, y), queries).sums

    for x, gradients in zip(batches, found, strict=True):
        for query, total in zip(queries, traced(tf.constant(x), tf.constant(y)), strict=True):
            agree(total, bounded_sum(gradients, query, model))


# What a neighbouring batch can change: invariant 1, in the query's norm and geometry.


def wide_sequence():
    return wide_model()


def grouped_einsum():
    x = normal(3, 9)
    return around(layers.EinsumDense("abc,bcd->abd", (3, 8)), x), x


def small_convolution():
    x = normal(5, 4, 2)
    return around(layers.Conv2D(3, 2, activation="tanh"), x), x


def low_rank():
    layer, x = layers.Dense(6, activation="tanh"), normal(3, 7)
    return adapted(around(layer, x), layer, 2, 0.5), x


def normalized():
    inputs = keras.Input((3, 4))
    hidden = layers.PReLU()(layers.LayerNormalization()(inputs))
    return keras.Model(inputs, headed(hidden)), normal(3, 4)


ADVERSARIAL = [wide_sequence, grouped_einsum, small_convolution, low_rank, normalized]
if hasattr(layers, "ReversibleEmbedding"):
    ADVERSARIAL.append(tied_model)


@pytest.mark.parametrize("make", ADVERSARIAL, ids=lambda make: make.__name__)
def test_neighbouring_batches_differ_by_at_most_the_clip_norm(make):
    base, x = make()
    randomized(base)
    y = normal(2, seed=5)
    model = private(base)
    numbers = st.sampled_from([np.nan, np.inf, -np.inf, 0.0, 1e30, -1e30, 1e19, 1e4, 1e-30])
    asked = [("l2", "flat"), ("l2", "per_layer"), ("l1", "flat"), ("l1", "per_layer")]

    @tf.function
    def sums(x, y, mask, clip_norm, factor):
        rng = np.random.default_rng(4)
        scale = [
            tf.constant(rng.uniform(0.2, 2.0, v.shape), tf.float32) * factor
            for v in model.trainable_variables
        ]
        queries = [
            Query(scale=s, clip_norm=clip_norm, norm=norm, style=style, normalize=normalize)
            for (norm, style), normalize in zip(asked, [False, True, True, False], strict=True)
            for s in (None, scale)
        ]
        return clipped_sums(model, Batch(x, y, None, mask), tuple(queries)).sums

    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(
        clip_norm=st.floats(1e-3, 1.0),
        scale=st.sampled_from([1e-3, 1.0, 30.0]),
        place=st.integers(0, 10**6),
        entry=numbers,
        whole_row=st.booleans(),
        target=st.one_of(st.just(1.0), numbers),
    )
    # A huge input where the activation is saturated: its term is zero, and the others are not.
    @hypothesis.example(clip_norm=1.0, scale=1e-3, place=0, entry=1e30, whole_row=False, target=1.0)
    def holds(clip_norm, scale, place, entry, whole_row, target):
        adversarial_x, adversarial_y = x.copy(), y.copy()
        if x.dtype == np.float32 and whole_row:
            adversarial_x[0] = entry
        elif x.dtype == np.float32:
            adversarial_x[0].flat[place % x[0].size] = entry
        with np.errstate(all="ignore"):
            adversarial_y[0] *= np.float32(target)
        mask = np.ones(ROWS, bool)
        args = (tf.constant(adversarial_x), tf.constant(adversarial_y))
        bounds = (tf.constant(clip_norm, tf.float32), tf.constant(scale, tf.float32))
        with_row = sums(*args, tf.constant(mask), *bounds)
        mask[0] = False
        without = sums(*args, tf.constant(mask), *bounds)
        queries = [(norm, style) for norm, style in asked for _ in range(2)]
        for one, other, (norm, style) in zip(with_row, without, queries, strict=True):
            moved = [np.float64(a) - np.float64(b) for a, b in zip(one, other, strict=True)]
            for indices, share in groups_of(model, style, norm):
                distance = norm_of([moved[i] for i in indices], norm)
                assert distance <= clip_norm * share * (1 + 2e-5)
            assert norm_of(moved, norm) <= clip_norm * (1 + 2e-5)

    holds()


def cancelling(layer, x, places, width, huge, exact):
    """A model whose output gradients at all places add up to nothing, and are huge.

    Args:
        layer: the only one that is trained; its output is (B, places, width).
        exact: False for almost nothing.
    """
    inputs = keras.Input(x.shape[1:], dtype=str(x.dtype))
    hidden = layers.Reshape((places * width,))(layer(inputs))
    base = keras.Model(inputs, layers.Dense(1, trainable=False)(hidden))
    half = np.random.default_rng(9).normal(size=(places // 2, width)) * huge
    kernel = np.concatenate([half, -half[::-1]])  # exactly: all that is left is rounding
    if not exact:
        kernel -= 1e-6 * kernel[:1]
    base.layers[-1].set_weights([kernel.reshape(-1, 1).astype("float32"), np.zeros(1)])
    return private(base, loss="mae")


def cancelling_dense(places, huge, exact):
    x = np.repeat(normal(1, 40)[:1], places, axis=1)  # the same at all places
    return cancelling(layers.Dense(36, use_bias=False), x, places, 36, huge, exact), x


def cancelling_einsum(places, huge, exact):
    x = np.repeat(normal(1, 2, 20)[:1], places, axis=1)
    layer = layers.EinsumDense("abcd,cde->abce", (places, 2, 18))
    return cancelling(layer, x, places, 36, huge, exact), x


def cancelling_convolution(places, huge, exact):
    x = np.ones((1, places, 20), "float32") * normal(20)[0]
    layer = layers.Conv1D(36, 1, use_bias=False)
    return cancelling(layer, x, places, 36, huge, exact), x


def cancelling_embedding(places, huge, exact):
    x = np.zeros((1, places), "int32")
    return cancelling(layers.Embedding(5, 36), x, places, 36, huge, exact), x


def cancelling_table(places, huge, exact):
    """A look-up less the product of the same table with the same rows, one-hot."""
    table, dense = layers.Embedding(5, 36), layers.Dense(36, use_bias=False)
    tokens = keras.Input((places,), dtype="int32")
    dense.build((None, places, 5))
    looked_up = table(tokens)
    share(dense, table._embeddings)
    one_hot = keras.ops.one_hot(tokens, 5)
    both = looked_up - dense(one_hot if exact else one_hot * (1 + 1e-6))
    outputs = layers.Dense(1, trainable=False)(layers.Flatten()(both))
    base = keras.Model(tokens, outputs)
    kernel = np.random.default_rng(9).normal(size=(places * 36, 1)) * huge
    base.layers[-1].set_weights([kernel.astype("float32"), np.zeros(1)])
    return private(base, loss="mae"), np.random.default_rng(2).integers(0, 5, (1, places))


CANCELLING = [
    cancelling_dense, cancelling_einsum, cancelling_convolution, cancelling_embedding,
    cancelling_table,
]  # fmt: skip


@pytest.mark.representatives(10)
@pytest.mark.parametrize("path", ["as chosen", "gram", "pairs", "blocks", "small"])
@pytest.mark.parametrize("make", CANCELLING, ids=lambda make: make.__name__)
def test_terms_that_cancel_do_not_hide_the_norm(make, path):
    """Rounding leaves something of huge terms that add up to nothing, which must be bounded too."""
    for places, huge, exact in [
        (2, 1e9, False),
        (8, 1e3, True),
        (8, 1e12, False),
        (64, 1e9, True),
        (512, 1e6, False),
        (512, 1e9, True),
    ]:
        if path == "pairs" and places > 64:  # of which there are too many
            continue
        model, x = make(places, huge, exact)
        scale = [tf.random.uniform(v.shape, 0.2, 2.0) for v in model.trainable_variables]
        queries = tuple(Query(norm=norm, scale=s) for norm in ("l2", "l1") for s in (None, scale))
        queries += tuple(query._replace(square=True) for query in queries)
        beside = np.concatenate([x, x]), np.float32([[1e30], [np.nan]])  # a row that is dropped
        for rows, targets in [(x, beside[1][:1]), beside]:
            with taking(path, block=400):
                sums = clipped_sums(model, (rows, targets), queries).sums
            for query, total in zip(queries, sums, strict=True):
                released = norm_of([np.float64(t) for t in total], query.norm)
                assert released <= 1.001, (places, huge, len(rows), query._replace(scale=None))


@pytest.mark.parametrize("norm", ["l2", "l1"])
@pytest.mark.parametrize("places", [64, 1024, 4096])
def test_rounding_that_adds_up_over_many_positions(places, norm):
    """Each term of the first half loses a bit in the same direction; the second half cancels it."""
    half = np.full(places // 2, 1 + 0.45 * 2.0**-23 * places / 4)
    terms = np.concatenate([half, -half[::-1] * (1 - 1e-9)]).astype("float32") * 1e12
    inputs = np.ones((1, 1, places, 24), "float32")
    deltas = np.ones((1, 1, 1, 20), "float32") * terms[:, None]
    outer = OuterProducts(tf.constant(inputs), tf.constant(deltas), (24, 20))
    for path in ("gram", "blocks", "small"):
        with taking(path, block=400):
            size = outer.l1_norm() if norm == "l1" else tf.sqrt(outer.squared_norm())
        weight = clip_factor(size, 1.0, Query())
        assert norm_of([np.float64(outer.weighted_sum(weight))], norm) <= 1.001
        outer._gradients = None


# What is said of the engines.


class OwnLSTM(layers.LSTM):
    """A loop without a rule: it may compute something else."""


def test_explain(capsys):
    inputs = keras.Input((4, 6))
    hidden = layers.Dense(6, trainable=False, name="frozen")(inputs)
    hidden = layers.MultiHeadAttention(2, 3, name="attention")(hidden, hidden)
    hidden = layers.LayerNormalization(name="norm")(hidden)
    adapter = layers.Dense(5, name="adapter")
    hidden = OwnLSTM(4, name="lstm")(layers.Dropout(0.5)(adapter(hidden)))
    model = private(
        adapted(keras.Model(inputs, layers.Dense(2, name="head")(hidden)), adapter, 2, 1)
    )
    served = explain(model)
    assert served == [
        ("attention/query", "EinsumDense", 42, "rule", ""),
        ("attention/key", "EinsumDense", 42, "rule", ""),
        ("attention/value", "EinsumDense", 42, "rule", ""),
        ("attention/attention_output", "EinsumDense", 42, "rule", ""),
        ("norm", "LayerNormalization", 12, "rule", ""),
        ("adapter", "Dense", 2 * (6 + 5) + 5, "rule", ""),
        ("lstm", "OwnLSTM", 4 * 4 * (5 + 4 + 1), "one example at a time", "no rule for OwnLSTM"),
        ("head", "Dense", 10, "rule", ""),
        ("frozen", "Dense", 42, "frozen", ""),
    ]
    assert capsys.readouterr().out == ""  # nothing is printed
    assert repr(served) == str(served)
    *lines, empty, sums, reason = str(served).splitlines()
    assert [line.split()[0] for line in lines] == ["layer", *(row.layer for row in served)]
    engines = ["engine", *(row.engine for row in served)]
    starts = {line.rindex(engine) for line, engine in zip(lines, engines, strict=True)}
    assert len(starts) == 1  # aligned
    assert (empty, reason) == ("", "'lstm': no rule for OwnLSTM")
    assert sums == (
        "rule: 7 layers, 217 weights; one example at a time: 1 layer, 160 weights (a copy for each "
        "example: 640 B); "
        "frozen: 1 layer, 42 weights"
    )


def test_explain_after_training():
    """The engines that passed the check; paths tell layers of one name apart."""
    inputs = keras.Input((3, 4))
    hidden = layers.MultiHeadAttention(1, 2)(inputs, inputs)
    hidden = layers.MultiHeadAttention(1, 2)(hidden, hidden)
    model = private(keras.Model(inputs, headed(hidden)))
    model.sampling = dp.accounting.Sampling.poisson(100, 4)
    model.train_on_batch(normal(3, 4), normal(2))
    served = explain(model)
    assert {row.engine for row in served} == {"rule"}
    blocks = [f"{layer.name}/query" for layer in model.layers if "attention" in layer.name]
    assert len(blocks) == 2 and {row.layer for row in served} > set(blocks)
    assert len({row.layer for row in served}) == len(served) == 9


def test_explain_layers_of_one_path():
    class Two(layers.Layer):
        def __init__(self):
            super().__init__(name="two")
            self.parts = [layers.Dense(4, name="part"), layers.Dense(4, name="part")]

        def call(self, inputs):
            return self.parts[1](self.parts[0](inputs))

    inputs = keras.Input((4,))
    model = private(keras.Model(inputs, headed(Two()(inputs))))
    assert [row.layer for row in explain(model)][:2] == ["two/part", "two/part_2"]


def test_explain_says_why_there_is_no_rule():
    class MyDense(layers.Dense):
        pass

    inputs = keras.Input((4, 4))
    hidden = MyDense(4, name="own")(inputs)
    hidden = layers.EinsumDense("btc,cc->btc", (4, 4), name="diagonal")(hidden)
    model = private(keras.Model(inputs, headed(hidden)))
    reasons = {row.layer: row.reason for row in explain(model)}
    assert reasons["own"] == "no rule for MyDense"
    assert "EinsumDense does not hold for how this one is configured" in reasons["diagonal"]


def test_explain_a_layer_that_is_trained_within_a_frozen_one():
    """As `enable_lora` of keras_hub leaves it: each part stays in the table, by its path."""
    inputs = keras.Input((3, 4))
    attention = layers.MultiHeadAttention(1, 2, name="attention")
    model = keras.Model(inputs, headed(attention(inputs, inputs)))
    attention.trainable = False
    attention.query_dense.trainable = True
    served = {row.layer: row for row in explain(private(model))}
    assert served["attention/query"].weights == 10
    assert served["attention/key"].engine == "frozen"


def test_explain_where_a_rule_has_failed():
    class Twice(layers.Layer):
        """Calls a layer on something that has no row per example."""

        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(4)

        def call(self, inputs):
            return self.dense(inputs) + self.dense(keras.ops.ones((1, 4)))

    inputs = keras.Input((4,))
    model = private(keras.Model(inputs, headed(Twice()(inputs))))
    model.sampling = dp.accounting.Sampling.poisson(100, 4)
    model.train_on_batch(normal(4), normal(2))
    twice, head = explain(model)
    assert (twice.kind, twice.engine) == ("Twice", "one example at a time")
    assert twice.reason.startswith("demoted: layer 'dense")
    assert "without any tensor that has one row per example" in twice.reason
    assert (head.kind, head.engine, head.reason) == ("Dense", "rule", "")
