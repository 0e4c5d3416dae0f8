"""Models of keras_hub with random weights, a few hundred or thousand of them each."""

import keras
import keras_hub
import numpy as np

models = keras_hub.models
ROWS, LENGTH, WORDS = 4, 6, 40


def _tokens():
    rng = np.random.default_rng(0)
    mask = np.arange(LENGTH) < rng.integers(3, LENGTH + 1, (ROWS, 1))
    return {
        "token_ids": rng.integers(0, WORDS, (ROWS, LENGTH)).astype("int32"),
        "padding_mask": mask.astype("int32"),
    }


def _with_segments():
    return {**_tokens(), "segment_ids": np.ones((ROWS, LENGTH), "int32")}


def _encoder(make, **options):
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 12}
    return make(
        vocabulary_size=WORDS, dropout=0.0, max_sequence_length=LENGTH + 3, **sizes, **options
    )


def decoder(make, **options):
    """A backbone of a decoder, with what its class needs besides."""
    sizes = {"num_layers": 1, "num_query_heads": 2, "num_key_value_heads": 1}
    return make(vocabulary_size=WORDS, hidden_dim=8, intermediate_dim=12, **sizes, **options)


def bert():
    backbone = _encoder(models.BertBackbone, num_segments=2)
    return models.BertTextClassifier(backbone, 3, preprocessor=None, dropout=0.0), _with_segments()


def bert_masked_lm():
    backbone = _encoder(models.BertBackbone, num_segments=2)
    places = np.random.default_rng(1).integers(0, LENGTH, (ROWS, 2)).astype("int32")
    model = models.BertMaskedLM(backbone, preprocessor=None)
    return model, {**_with_segments(), "mask_positions": places}


def distil_bert():
    return _encoder(models.DistilBertBackbone), _tokens()


def roberta():
    return _encoder(models.RobertaBackbone), _tokens()


def deberta():
    return _encoder(models.DebertaV3Backbone, bucket_size=4), _tokens()


def gpt2():
    return models.GPT2CausalLM(_encoder(models.GPT2Backbone), preprocessor=None), _tokens()


def gemma():
    backbone = decoder(models.GemmaBackbone, head_dim=4)
    return models.GemmaCausalLM(backbone, preprocessor=None), _tokens()


def gemma3():
    backbone = decoder(
        models.Gemma3Backbone,
        head_dim=4,
        image_size=16,
        vision_encoder=None,
        use_query_key_norm=True,
    )
    return models.Gemma3CausalLM(preprocessor=None, backbone=backbone), _tokens()


def llama3():
    return models.Llama3CausalLM(decoder(models.Llama3Backbone), preprocessor=None), _tokens()


def mistral():
    return models.MistralCausalLM(decoder(models.MistralBackbone), preprocessor=None), _tokens()


def phi3():
    return models.Phi3CausalLM(decoder(models.Phi3Backbone), preprocessor=None), _tokens()


def qwen():
    return models.QwenCausalLM(decoder(models.QwenBackbone), preprocessor=None), _tokens()


def qwen3():
    backbone = decoder(models.Qwen3Backbone, head_dim=4)
    return models.Qwen3CausalLM(backbone, preprocessor=None), _tokens()


def t5():
    backbone = models.T5Backbone(
        vocabulary_size=WORDS,
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=12,
        key_value_dim=4,
        dropout=0.0,
    )
    x = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in _tokens().items()
    }
    return keras.Model(backbone.input, backbone.output["decoder_sequence_output"]), x


def whisper():
    backbone = models.WhisperBackbone(
        vocabulary_size=WORDS,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=12,
        num_mels=5,
        dropout=0.0,
        max_encoder_sequence_length=8,
        max_decoder_sequence_length=LENGTH,
    )
    x = {f"decoder_{name}": value for name, value in _tokens().items()}
    sound = np.random.default_rng(2).normal(size=(ROWS, 8, 5)).astype("float32")
    return keras.Model(backbone.input, backbone.output["decoder_sequence_output"]), {
        "encoder_features": sound,
        **x,
    }


def vit():
    backbone = models.ViTBackbone(
        image_shape=(8, 8, 3),
        patch_size=(4, 4),
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        mlp_dim=12,
    )
    return backbone, np.random.default_rng(2).normal(size=(ROWS, 8, 8, 3)).astype("float32")


def clip():
    from keras_hub.src.models.clip.clip_layers import CLIPVisionEmbedding

    inputs = keras.Input((8, 8, 3))
    outputs = CLIPVisionEmbedding(8, patch_size=4, image_size=8)(inputs)
    return keras.Model(inputs, outputs), vit()[1]


ALL = [
    bert,
    bert_masked_lm,
    distil_bert,
    roberta,
    deberta,
    gpt2,
    gemma,
    gemma3,
    llama3,
    mistral,
    phi3,
    qwen,
    qwen3,
    t5,
    whisper,
    vit,
    clip,
]
