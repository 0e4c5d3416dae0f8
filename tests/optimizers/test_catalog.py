"""One catalogue: what lists optimizers lists those, and a new one appears everywhere."""

import dataclasses

import keras
import pytest

import dp_keras_opt as dp
from dp_keras_opt import tuning
from dp_keras_opt.optimizers import PrivateOptimizer, catalog
from dp_keras_opt.references import REFERENCES


def subclasses(cls):
    for each in cls.__subclasses__():
        yield each
        yield from subclasses(each)


def test_every_registered_optimizer_is_in_the_catalogue():
    found = {
        cls.__name__
        for cls in subclasses(PrivateOptimizer)
        if cls.__module__.startswith("dp_keras_opt.")
        and keras.saving.get_registered_object(f"dp_keras_opt>{cls.__name__}") is cls
    }
    assert found == set(catalog.__all__) == {entry.name for entry in catalog.CATALOG}
    assert len(catalog.CATALOG) == len(found)


def test_the_public_names_are_those_of_the_catalogue():
    assert set(catalog.__all__) <= set(dp.optimizers.__all__)
    for entry in catalog.CATALOG:
        assert getattr(dp.optimizers, entry.name) is entry.cls
        assert dp.optimizers.classes()[entry.name.lower()] is entry.cls


def test_references_are_keys_of_the_list():
    for entry in catalog.CATALOG:
        assert entry.references and set(entry.references) <= set(REFERENCES), entry.name
        assert REFERENCES[entry.references[0]].identifier in entry.paper


def test_candidates_follow():
    searched = {entry.name for entry in catalog.CATALOG if entry.search}
    assert searched <= set(tuning.CANDIDATES)
    assert {entry.name for entry in catalog.CATALOG} - searched == {"DPOptimizer"}
    for entry in catalog.CATALOG:
        if entry.search:
            candidate = tuning.CANDIDATES[entry.name]
            assert candidate.space == entry.search.space
            plan = tuning.Plan(steps=80, batch_size=64, clip_norm=1.0)
            assert type(candidate.make(plan, **candidate.middle())) is entry.cls


@pytest.mark.parametrize("entry", catalog.CATALOG, ids=lambda entry: entry.name)
def test_entries_make_their_optimizer(entry):
    made = entry.make()
    assert type(made) is entry.cls
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.cls = PrivateOptimizer
