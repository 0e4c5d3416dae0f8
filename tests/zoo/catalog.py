"""The models of the zoo, and what is expected of each."""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

from tests.zoo import applications, hub, objectives, pictures, series, tables, text
from tests.zoo.example import Example

RULE, ONE, FROZEN = "rule", "one example at a time", "frozen"
WHOLE = "whole model, one example at a time"
TRAINS, FIXED, REFUSED = "trains", "trains after fix", "refused"


class Expected(NamedTuple):
    """What comes of a model.

    Attributes:
        outcome: `TRAINS`; `FIXED`, refused as it comes and trained after `clipping.fix`; `REFUSED`.
        engines: those that serve its layers, and none else.
        message: a regular expression for why it is refused, with what is to be done instead.
    """

    outcome: str
    engines: frozenset = frozenset()
    message: str = ""

    def why_not(self, outcome, engines, message):
        """What is otherwise than expected, "" if nothing is."""
        if outcome != self.outcome:
            return f"{outcome}, expected: {self.outcome}"
        if self.engines != set(engines):
            return f"engines {sorted(engines)}, expected: {sorted(self.engines)}"
        if not re.search(self.message, message):
            return f"the message is not {self.message!r}"
        return ""


class Row(NamedTuple):
    """A model of the zoo.

    Attributes:
        family: what it is one of, the title of its table.
        name: unique.
        build: gives the `Example`.
        expected: what comes of it.
        needs: a package that must be installed for it.
    """

    family: str
    name: str
    build: Callable[[], Example]
    expected: Expected
    needs: str = "keras"


def trains(*engines):
    return Expected(TRAINS, frozenset(engines or [RULE]))


def fixed(*engines):
    return Expected(FIXED, frozenset(engines or [RULE]))


def refused(message):
    return Expected(REFUSED, message=message)


_SCALAR = "add_loss with a loss that depends on the data.* Add a vector .B,., one loss for each"
_IN_THE_BATCH = "mixes the examples of a batch.* Let each example's output and loss depend on"

#: The models by family.
_FAMILIES = {
    "Series and graphs": [
        (series.gru, trains()),
        (series.temporal_convolutions, trains()),
        (series.transformer_of_a_series, trains()),
        (series.conv_lstm, trains()),
        (series.cnn_lstm, trains()),
        (series.ctc, trains()),
        (series.graph_convolution, trains(RULE, ONE)),
    ],
    "Text": [
        (text.bag_of_words, trains()),
        (text.bidirectional_lstm, trains()),
        (text.strings, trains()),
        (text.tied_embeddings, trains()),
        (text.translation, trains()),
        (text.mixture_of_experts, trains()),
        (text.mixture_with_experts_first, trains(RULE, ONE)),
        (text.three_experts_first, trains(RULE, ONE)),
    ],
    "Tables": [
        (tables.subclassed, trains()),
        (tables.subclassed_batch_norm, fixed()),
        (tables.wide_and_deep, trains()),
        (tables.deep_fm, trains()),
        (tables.deep_and_cross, trains(RULE, ONE)),
        (tables.feature_space, trains(RULE, FROZEN)),
        (tables.several_inputs_and_outputs, trains()),
        (tables.frozen_with_lora, trains()),
        (tables.quantized_with_lora, trains()),
        (tables.quantized, trains()),  # its biases, as in Keras
        (tables.weight_normalization, trains(RULE, ONE)),
        (tables.activity_regularizer, refused("put the penalty into the per-example loss")),
        (tables.spectral_normalization, trains()),
    ],
    "Pictures": [
        (pictures.convolutions, trains()),
        (pictures.separable_convolutions, trains()),
        (pictures.augmentation, trains()),
        # Their histograms are those of a whole batch.
        (pictures.rand_augment, refused("RandAugment layer .* mixes .* map=lambda")),
        (pictures.aug_mix, refused("AugMix layer .* mixes .* map=lambda")),
        (pictures.mix_up, refused("MixUp layer 'mix_up' mixes .* Remove it from the model")),
        (pictures.cut_mix, refused("CutMix layer 'cut_mix' mixes .* Remove it from the model")),
        (pictures.vision_transformer, trains()),
        (pictures.u_net, fixed()),
        (pictures.autoencoder, trains()),
        (pictures.transfer, trains(RULE, FROZEN)),
        (pictures.fine_tuning, fixed()),
        (pictures.fine_tuning_beside_frozen_statistics, trains(RULE, FROZEN)),
    ],
    "Objectives": [
        (objectives.variational_autoencoder, trains()),
        (objectives.variational_autoencoder_by_add_loss, trains()),
        (objectives.variational_autoencoder_by_scalar_add_loss, refused(_SCALAR)),
        (
            objectives.variational_autoencoder_by_train_step,
            refused("overrides `train_step`.* Express the objective as a per-example loss"),
        ),
        (objectives.siamese, trains()),
        (objectives.triplets, trains()),
        (objectives.mixture_density, trains()),
        (objectives.two_towers, trains()),
        (objectives.two_towers_in_the_batch, refused(_IN_THE_BATCH)),
        (objectives.contrast_in_the_batch, refused(_IN_THE_BATCH)),
    ],
}

#: Networks of keras.applications, with the size of the smallest pictures if that is not 32.
_APPLICATIONS = [
    (("MobileNetV2",), fixed()),
    (("MobileNetV3Small",), fixed()),
    (("EfficientNetV2B0",), fixed()),
    (("NASNetMobile",), fixed()),
    (("DenseNet121",), fixed()),
    (("ResNet50",), fixed()),
    (("ResNet50V2",), fixed()),
    (("Xception", 71), fixed()),
    (("InceptionV3", 75), fixed()),
    (("ConvNeXtTiny",), trains()),
    (("VGG16",), trains()),
]

#: Models of tests/hub of which not all layers are trained by rules.
_HUB = {"deberta": trains(RULE, ONE), "whisper": trains(RULE, FROZEN)}


def _rows():
    for family, models in _FAMILIES.items():
        for build, expected in models:
            yield Row(family, build.__name__, build, expected)
    for arguments, expected in _APPLICATIONS:
        build = functools.partial(applications.application, *arguments)
        yield Row("keras.applications", arguments[0], build, expected)
    family = needs = "keras_hub"
    for name in hub.NAMES:
        build, expected = functools.partial(hub.of_tests, name), _HUB.get(name, trains())
        yield Row(family, f"hub_{name}", build, expected, needs)
    for name in ("bert", "gpt2", "gemma", "llama3"):
        build, expected = functools.partial(hub.of_tests, name, lora=2), trains(RULE, FROZEN)
        yield Row(family, f"hub_{name}_lora", build, expected, needs)
    yield Row(family, "hub_bert_with_head", hub.bert_with_head, trains(), needs)
    yield Row(family, "hub_gpt_oss", hub.gpt_oss, trains(RULE, ONE), needs)
    yield Row(family, "hub_mixtral", hub.mixtral, refused(_SCALAR), needs)
    for build in (hub.resnet, hub.segformer, hub.deeplab):
        yield Row(family, f"hub_{build.__name__}", build, fixed(), needs)


ROWS = {row.name: row for row in _rows()}
