"""Models of keras_hub: those of tests/hub with a loss, with LoRA, and some with pictures."""

import importlib

import keras
import numpy as np

from tests.zoo.example import BATCH_SIZE, Example, classes, classifier, integers, numbers

#: The models of tests/hub.
NAMES = (
    "bert", "bert_masked_lm", "distil_bert", "roberta", "deberta", "gpt2", "gemma", "gemma3",
    "llama3", "mistral", "phi3", "qwen", "qwen3", "t5", "whisper", "vit", "clip",
)  # fmt: skip


def of_tests(name, lora=None):
    """A model of tests/hub."""
    task, x = getattr(importlib.import_module("tests.hub.models"), name)()
    if lora:
        task.backbone.enable_lora(lora)
    return _to_random_numbers(task, x)


def _to_random_numbers(task, x):
    """A model whose outputs are to be as random numbers are."""
    model = keras.Model(task.input, task.output)  # without a `train_step` of its own
    y = np.random.default_rng(4).normal(size=model(x).shape).astype("float32")
    return Example(model, x, y)


def bert_with_head():
    """A backbone with its dropout, and a head that is no class of keras_hub."""
    import keras_hub

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=40, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=12
    )
    x = _tokens() | {"segment_ids": integers(2, 6)}
    inputs = {name: keras.Input((6,), dtype="int32", name=name) for name in x}
    return classifier(inputs, backbone(inputs)["pooled_output"], x)


def _tokens():
    return {"token_ids": integers(40, 6), "padding_mask": np.ones((BATCH_SIZE, 6), "int32")}


def gpt_oss():
    return _of_experts("GptOss")


def mixtral():
    """Adds a loss for experts that the whole batch uses unequally."""
    return _of_experts("Mixtral", dropout=0.0)


def _of_experts(family, **options):
    import keras_hub

    from tests.hub.models import decoder

    make = getattr(keras_hub.models, f"{family}Backbone")
    backbone = decoder(make, num_experts=4, top_k=2, **options)
    task = getattr(keras_hub.models, f"{family}CausalLM")(backbone=backbone, preprocessor=None)
    return _to_random_numbers(task, _tokens())


def _with_head(backbone, size=32):
    inputs = keras.Input((size, size, 3))
    hidden = backbone(inputs)
    pooled = keras.layers.GlobalAveragePooling2D()(hidden)
    return classifier(inputs, pooled, numbers(size, size, 3))


def _resnet():
    import keras_hub

    return keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 64],
        stackwise_num_blocks=[1, 1],
        stackwise_num_strides=[1, 2],
        block_type="basic_block",
        image_shape=(32, 32, 3),
    )


def resnet():
    return _with_head(_resnet())


def segformer():
    """Segmentation of pictures; batch normalization is in its decoder."""
    import keras_hub

    encoder = keras_hub.models.MiTBackbone(
        layerwise_depths=[1, 1, 1, 1],
        num_layers=4,
        layerwise_num_heads=[1, 2, 2, 2],
        layerwise_sr_ratios=[4, 2, 1, 1],
        max_drop_path_rate=0.0,
        layerwise_patch_sizes=[7, 3, 3, 3],
        layerwise_strides=[4, 2, 2, 2],
        image_shape=(64, 64, 3),
        hidden_dims=[4, 8, 12, 16],
    )
    backbone = keras_hub.models.SegFormerBackbone(image_encoder=encoder, projection_filters=8)
    return _segments(backbone, 64)


def deeplab():
    """Segmentation by pooling over wider and wider neighbourhoods."""
    import keras_hub

    backbone = keras_hub.models.DeepLabV3Backbone(
        image_encoder=_resnet(),
        spatial_pyramid_pooling_key="P3",
        low_level_feature_key="P2",
        dilation_rates=[2, 4],
        upsampling_size=2,
        projection_filters=8,
        image_shape=(32, 32, 3),
    )
    return _segments(backbone)


def _segments(backbone, size=32):
    inputs = keras.Input((size, size, 3))
    model = keras.Model(inputs, keras.layers.Conv2D(3, 1, name="head")(backbone(inputs)))
    y = integers(3, *model.output_shape[1:3], seed=1)
    return Example(model, numbers(size, size, 3), y, classes())
