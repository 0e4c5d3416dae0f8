"""What docstrings cite is in `references.py`, and what is there is well formed."""

import ast
import pathlib
import re

import pytest

import dp_keras_opt
from dp_keras_opt.references import REFERENCES

PACKAGE = pathlib.Path(dp_keras_opt.__file__).parent
ARXIV = re.compile(r"(?:arxiv:|arxiv\.org/(?:abs|pdf)/)\s*(\d{4}\.\d{4,5})", re.I)
DOI = re.compile(r"(?:doi:|doi\.org/)\s*(10\.\d{4,9}/[^\s,;\"'<>]+)", re.I)
KNOWN = {each.arxiv for each in REFERENCES.values()}, {each.doi for each in REFERENCES.values()}


def docstrings(path):
    """(name, docstring) of the module at `path` and of all its classes and functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node):
            yield getattr(node, "name", "the module"), ast.get_docstring(node)


def unknown(text):
    """The ids in a text that the list lacks."""
    arxiv, doi = KNOWN
    found = set(ARXIV.findall(text)) - arxiv
    return found | {each.rstrip(").") for each in DOI.findall(text)} - doi


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_every_id_in_a_docstring_is_in_the_list(path):
    missing = {name: unknown(text) for name, text in docstrings(path) if unknown(text)}
    assert not missing, f"Add these to dp_keras_opt/references.py: {missing}."


def test_an_id_that_is_not_in_the_list_is_found():
    assert unknown("Nobody, arXiv:9912.99999.") == {"9912.99999"}
    assert unknown("See https://doi.org/10.1000/nothing.") == {"10.1000/nothing"}
    assert not unknown("Abadi et al., CCS 2016, arXiv:1607.00133, doi:10.1145/2976749.2978318.")


@pytest.mark.parametrize("key", REFERENCES)
def test_references_are_complete(key):
    reference = REFERENCES[key]
    assert reference.authors and reference.title and str(reference.year) in reference.venue
    assert reference.arxiv or reference.doi or reference.url, "where can it be read?"
    assert reference.arxiv is None or re.fullmatch(r"\d{4}\.\d{4,5}", reference.arxiv)
    assert reference.doi is None or reference.doi.startswith("10.")
    assert key[-4:].isdigit() or "_" in key
    assert str(reference.year) in key, "keys are the first author's name and the year"
    assert reference.link.startswith("https://")
    assert reference.identifier in reference.short


def test_no_paper_is_listed_twice():
    titles = [each.title for each in REFERENCES.values()]
    identifiers = [each.identifier for each in REFERENCES.values()]
    assert len(set(titles)) == len(titles) and len(set(identifiers)) == len(identifiers)
