"""Every optimizer says all of its arguments: in signature, docstring and configuration."""

import contextlib
import inspect
import pydoc
import re
import typing
import unicodedata
import warnings

import keras
import pytest

import dp_keras_opt as dp
from dp_keras_opt.optimizers import GaLore, PrivateOptimizer, settings
from dp_keras_opt.optimizers.adaptive import AdaptiveOptimizer
from dp_keras_opt.optimizers.catalog import CATALOG
from dp_keras_opt.references import REFERENCES

ENTRIES = {entry.name: entry for entry in CATALOG}
KERAS = {
    "name": "mine",
    "weight_decay": 0.25,
    "use_ema": True,
    "ema_momentum": 0.5,
    "ema_overwrite_frequency": 3,
}
#: For each shared argument a value that is not its default.
OTHERS = {
    "clip_norm": 0.5,
    "batch_size": 7,
    "noise_multiplier": 1.5,
    "second_moment": "scale_then_privatize",
    "noise": "laplace",
    "noise_schedule": [1.0, 0.5],
    "clipping": {"dense": 1.0},
    "normalize": True,
    "gradient_filter": "f1",
    "projection": GaLore(2),
    "geometry": dp.geometries.Mean(0.5),
    "sparse_embeddings": dp.optimizers.SparseEmbeddings(2.0),
    "secure_noise": True,
    "seed": 3,
}
NEEDS_CRYPTOGRAPHY = ("secure_noise",)


def parameters(cls):
    return inspect.signature(cls.__init__).parameters


def shared(cls):
    """The parameters that optimizers share, as the class that declares them has them."""
    declaring = PrivateOptimizer
    found = {
        name: parameter
        for name, parameter in parameters(PrivateOptimizer).items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    if issubclass(cls, AdaptiveOptimizer):
        declaring = AdaptiveOptimizer
        found["second_moment"] = parameters(AdaptiveOptimizer)["second_moment"]
    hints = typing.get_type_hints(PrivateOptimizer.__init__)
    return found, hints | typing.get_type_hints(declaring.__init__)


def is_refused(entry, name):
    """Whether the optimizer refuses an argument, when it is made or when it is built."""
    with contextlib.suppress(TypeError, ValueError):
        optimizer = made(entry, **{name: OTHERS[name]})
        table = keras.layers.Embedding(4, 4)
        table.build()
        optimizer.build([table.embeddings])
        return False
    return True


def made(entry, **changes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of seeds
        private = {"clip_norm": 1.0, "batch_size": 2, "noise_multiplier": 1.0}
        return entry.cls(**dict(entry.arguments) | private | changes)


def description(cls, name):
    """What the docstring says of an argument, as one line; None where it does not."""
    found = re.search(rf"^( *){re.escape(name)}: (.*\n(?:\1 +.*\n)*)", cls.__doc__, re.M)
    return found and " ".join(found[2].split())


def width(line):
    return sum(not unicodedata.combining(character) for character in line)


@pytest.mark.parametrize("name", ENTRIES)
def test_the_signature_has_every_shared_argument(name):
    entry = ENTRIES[name]
    own, (expected, hints) = parameters(entry.cls), shared(entry.cls)
    own_hints = typing.get_type_hints(entry.cls.__init__)
    for argument, parameter in expected.items():
        if argument not in own:
            assert is_refused(entry, argument), f"{argument} is taken and not in the signature"
            continue
        assert own[argument].default == parameter.default, argument
        assert own_hints[argument] == hints[argument], argument
        assert own[argument].kind is parameter.KEYWORD_ONLY, argument
    left_out = set(expected) - set(own)
    assert left_out <= {
        "projection", "geometry", "sparse_embeddings", "noise_schedule", "second_moment"
    }  # fmt: skip
    assert not any(p.kind is p.VAR_POSITIONAL for p in own.values()), "*args hides arguments"
    assert all(p.annotation is not p.empty for n, p in own.items() if n != "self")


@pytest.mark.parametrize("name", ENTRIES)
def test_the_docstring_describes_every_argument(name):
    cls = ENTRIES[name].cls
    declared = settings.settings_of(cls)
    assert "{{" not in cls.__doc__
    for argument, parameter in parameters(cls).items():
        if argument == "self":
            continue
        label = "**kwargs" if parameter.kind is parameter.VAR_KEYWORD else argument
        text = description(cls, label)
        assert text, f"{argument} is not described"
        common = argument in declared and not (argument == "clip_norm" and "DP2" in name)
        if common:
            assert text.startswith(" ".join(declared[argument].__doc__.split())), argument
    if name != "DPOptimizer":
        for argument in KERAS:
            assert description(cls, argument), argument
    assert max(map(width, cls.__doc__.splitlines())) <= 100


@pytest.mark.parametrize("name", ENTRIES)
def test_help_shows_all_of_it(name):
    text = pydoc.render_doc(ENTRIES[name].cls, renderer=pydoc.plaintext)
    head = text[: text.index("Method resolution order")]
    for argument in ("clip_norm", "batch_size", "noise", "clipping", "gradient_filter", "seed"):
        assert re.search(rf"[(,]\s*{argument}: ", head), argument  # in the signature
        assert re.search(rf"^ \| *{argument}: ", head, re.M), argument  # in the docstring


@pytest.mark.parametrize("name", ENTRIES)
def test_the_configuration_has_every_argument(name):
    entry = ENTRIES[name]
    arguments = [a for a in parameters(entry.cls) if a in OTHERS]
    options = {a: {a: OTHERS[a]} for a in arguments}
    if name != "DPOptimizer":
        options |= {a: {a: KERAS[a]} for a in KERAS}
        options["ema_momentum"]["use_ema"] = True
    default = made(entry).get_config()
    for argument, given in options.items():
        if argument in NEEDS_CRYPTOGRAPHY:
            pytest.importorskip("cryptography")
        config = made(entry, **given).get_config()
        assert config[argument] != default[argument] or argument == "name", argument
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            again = entry.cls.from_config(config)
        assert again.get_config() == config, argument
    for argument in parameters(entry.cls):
        if argument not in ("self", "kwargs"):
            assert argument in default, argument


@pytest.mark.parametrize("name", ENTRIES)
def test_the_docstring_cites_the_papers_of_the_catalogue(name):
    entry = ENTRIES[name]
    text = " ".join(entry.cls.__doc__.split()).lower()
    assert "reference: " in text
    for key in entry.references:
        reference = REFERENCES[key]
        assert reference.title.lower() in text, key
        assert str(reference.year) in text, key
        for author in reference.authors:
            assert author.split()[-1].lower() in text, (key, author)
        if reference.arxiv or reference.doi:
            assert (reference.arxiv or "-") in text or (reference.doi or "-").lower() in text, key


SOURCES = {
    "moments.Joint", "moments.Independent", "moments.BiasCorrected", "moments.PostProcessing",
    "moments.ScaleThenPrivatize", "moments.SideInformation", "moments.Noiseless", "GaLore",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_sources_and_projections_cite_their_papers(name):
    assert re.search(
        r"arXiv:\d{4}\.\d{4,5}", pydoc.locate(f"dp_keras_opt.optimizers.{name}").__doc__
    )


@pytest.mark.parametrize("name", [n for n in dp.geometries.__all__ if n[0].isupper()])
def test_geometries_cite_their_papers(name):
    if name != "Geometry":  # which is none of them
        assert re.search(r"arXiv:\d{4}\.\d{4,5}", getattr(dp.geometries, name).__doc__)


@pytest.mark.parametrize("cls", [dp.filters.LowPass, dp.filters.OptimalFIR])
def test_filters_cite_their_papers(cls):
    assert "arXiv:2408.13460" in cls.__doc__


# The template.


def test_what_a_docstring_says_by_itself_is_not_said_again():
    class Own(PrivateOptimizer, keras.optimizers.Optimizer):
        """An optimizer.

        Args:
            clip_norm: C1.
            {{private_arguments}}
        """

    assert Own.__doc__.count("clip_norm:") == 1 and description(Own, "clip_norm") == "C1."
    assert description(Own, "seed").endswith("Defaults to None.")


def test_a_class_without_a_docstring_stays_without():
    """As all are under `python -OO`."""

    class Silent(PrivateOptimizer, keras.optimizers.Optimizer):
        pass

    assert not Silent.__doc__


def test_settings_are_described():
    for entry in CATALOG:
        for name, setting in settings.settings_of(entry.cls).items():
            assert setting.__doc__.endswith("."), name
