"""Rules for what keras_hub and keras.applications are built of, none of which is imported for it.

A class goes by its module and qualified name; a namesake elsewhere, or a subclass, has no rule.
What a later version has changed fails the check before the first step, and loses its rule.
"""

import keras
import tensorflow as tf

from dp_keras_opt._keras import patched
from dp_keras_opt.clipping.factors import DenseGradients, Lookup, OuterProducts, sizes_of
from dp_keras_opt.clipping.layer_rules import (
    broadcastable,
    flat,
    ids_of,
    rule,
    rule_by_copies,
    sum_to,
)

_MODELING, _MODELS = "keras_hub.src.layers.modeling", "keras_hub.src.models"

#: Layers whose weights all act coordinate by coordinate, along the last axes of their input:
#: `norm(x) * scale`, `norm(x) * (1 + scale)`, `x * gamma`, `scale * x + bias`, `x * softplus(w)`.
_COORDINATEWISE = (
    "dinov2.dinov2_layers.DINOV2LayerScale", "dinov3.dinov3_layers.DINOV3LayerScale",
    "edrec.edrec_layers.EdRecRMSNormalization", "gemma.rms_normalization.RMSNormalization",
    "gemma3.gemma3_layers.RMSNormalization", "gemma3.rms_normalization.RMSNormalization",
    "gemma3n.rms_normalization.Gemma3nRMSNorm", "gemma4.gemma4_layers.RMSNormalization",
    "gpt_oss.gpt_oss_layer_norm.GptOssLayerNormalization",
    "hgnetv2.hgnetv2_layers.HGNetV2LearnableAffineBlock", "llama.llama_layernorm.LlamaLayerNorm",
    "mistral.mistral_layer_norm.MistralLayerNormalization",
    "mixtral.mixtral_layer_norm.MixtralLayerNormalization",
    "mobilenetv5.mobilenetv5_layers.RmsNorm2d", "phi3.phi3_layernorm.Phi3LayerNorm",
    "qwen.qwen_layernorm.QwenLayerNorm", "qwen3.qwen3_layernorm.Qwen3LayerNorm",
    "qwen3_5.qwen3_5_layers.Qwen3_5LayerNorm", "qwen3_5.qwen3_5_layers.Qwen3_5RMSNormGated",
    "qwen3_moe.qwen3_moe_layernorm.Qwen3MoeLayerNorm",
    "qwen_moe.qwen_moe_layernorm.QwenMoeLayerNorm",
    "roformer_v2.roformer_v2_attention.RoformerNorm", "t5.t5_layer_norm.T5LayerNorm",
    "video_prism.video_prism_layers.VideoPrismPerDimScale",
)  # fmt: skip


@rule_by_copies(
    "keras.src.applications.convnext.LayerScale",
    f"{_MODELING}.rms_normalization.RMSNormalization",
    *(f"{_MODELS}.{name}" for name in _COORDINATEWISE),
)
def coordinatewise(layer, own, inputs):
    """Each weight as (B, 1, ..., *shape), which broadcasts where the weight alone would."""
    return {
        name: broadcastable(own(value), inputs.shape.rank)
        for name, value in vars(layer).items()
        if isinstance(value, keras.Variable) and value.trainable
    }


# Embeddings. The two that TokenAndPositionEmbedding is made of have rules.


@rule(f"{_MODELING}.position_embedding.PositionEmbedding")
def position_embedding(layer, deltas, inputs, start_index=0, positions=None):
    """The rows of the positions, each once in an example unless `positions` are given."""
    deltas = tf.reduce_sum(deltas, axis=range(1, deltas.shape.rank - 2))
    rows, length, _ = sizes_of(deltas)
    places = start_index + tf.range(length) if positions is None else positions
    ids = ids_of(tf.broadcast_to(places, (rows, length)), layer.sequence_length)
    found = Lookup(ids, deltas, layer.position_embeddings.shape, distinct=positions is None)
    yield layer.position_embeddings, found


@rule(f"{_MODELS}.vit.vit_layers.ViTPatchingAndEmbedding", when=lambda vit: vit.use_class_token)
def class_token(layer, deltas, inputs):
    """The first of the positions; the others, and where they are, have layers of their own."""
    yield layer.class_token, DenseGradients(deltas[:, :1, None])


@rule(
    f"{_MODELS}.clip.clip_layers.CLIPVisionEmbedding",
    f"{_MODELS}.metaclip_2.metaclip_2_layers.MetaCLIP2VisionEmbedding",
)
def class_embedding(layer, deltas, inputs):
    """The same, as a vector."""
    yield layer.class_embedding, DenseGradients(deltas[:, 0])


# Heads and attention, which own some weights beside those of layers that have rules.


@rule(f"{_MODELING}.masked_lm_head.MaskedLMHead")
def masked_lm_head(layer, deltas, inputs, mask_positions):
    """bias Σ b, and kernel Σ a ⊗ b where the head has one of its own."""
    yield layer._bias, sum_to(deltas, layer._bias.shape)
    if layer.token_embedding is None:
        tokens = tf.gather(inputs, tf.cast(mask_positions, tf.int32), axis=1, batch_dims=1)
        hidden = layer._intermediate_layer_norm(layer._intermediate_dense(tokens))
        yield layer._kernel, OuterProducts(flat(hidden), flat(deltas), layer._kernel.shape)


@rule_by_copies(
    f"{_MODELS}.t5.t5_multi_head_attention.T5MultiHeadAttention",
    when=lambda layer: layer.use_relative_attention_bias,
)
def relative_attention_bias(layer, own, inputs):
    """The copies as further heads of one table, from which one look-up takes the bias of each."""
    compute_bias = layer.compute_bias

    def of_each(*args, **kwargs):
        tables = tf.transpose(own(layer.relative_attention_bias), (1, 0, 2))
        buckets, rows, heads = sizes_of(tables)
        tables = tf.reshape(tables, (buckets, rows * heads))
        with patched(layer, "relative_attention_bias", tables):
            bias = compute_bias(*args, **kwargs)  # (1, rows · heads, queries, keys)
        return tf.reshape(bias, (rows, heads, *sizes_of(bias)[2:]))

    return {"compute_bias": of_each}
