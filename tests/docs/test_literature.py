"""docs/reference/references.md lists what `dp_keras_opt.references` has, and pages cite from it.

`python -m tests.docs.test_literature` writes the page anew.
"""

import pathlib
import re

from dp_keras_opt.references import REFERENCES

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = DOCS / "reference" / "references.md"
_INTRODUCTION = """\
# Literature

What the library follows: the papers and books behind its optimizers, noise, sampling and
accounting. Docstrings give the same arXiv ids and DOIs, with the number of the algorithm, equation
or theorem; `dp_keras_opt.references` has the list as data. Where versions of a paper differ, the
numbers are those of the version that is named here. Where a paper contradicts itself,
[corrections](corrections.md) says so.
"""


def heading(key):
    """How pages call an entry: "Abadi et al. 2016"."""
    reference = REFERENCES[key]
    who, _, _ = reference.short.partition(f", {reference.title}")
    _, _, which = key.partition("_")  # tells two of one year apart
    return f"{who} {reference.year}" + (f", {which}" if which else "")


def entry(key):
    """The section of the page on one paper."""
    reference = REFERENCES[key]
    links = []
    if reference.arxiv:
        links.append(f"[arXiv:{reference.arxiv}](https://arxiv.org/abs/{reference.arxiv})")
    if reference.doi:
        links.append(f"[doi:{reference.doi}](https://doi.org/{reference.doi})")
    if reference.url:
        links.append(f"<{reference.url}>")
    version = f" Numbers are those of {version_of(reference)}." if reference.version else ""
    authors = ", ".join(reference.authors)
    return (
        f"## {heading(key)}\n\n{authors}. *{reference.title}*. {reference.venue}. "
        f"{', '.join(links)}.{version}\n"
    )


def version_of(reference):
    if re.fullmatch(r"v\d+", reference.version):
        return f"{reference.version} of arXiv"
    return "the published version" if reference.version == "as published" else reference.version


def page():
    keys = sorted(REFERENCES, key=lambda key: (heading(key).casefold(), key))
    return "\n".join([_INTRODUCTION, *map(entry, keys)])


def test_the_page_lists_all_of_them():
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "The list of references has changed: run `python -m tests.docs.test_literature`."
    )


def test_no_two_entries_have_one_name():
    assert len({heading(key) for key in REFERENCES}) == len(REFERENCES)


def test_pages_cite_what_is_listed():
    known = {name for each in REFERENCES.values() for name in (each.arxiv, each.doi) if name}
    # Where the figures of others are from, which the library does not follow.
    figures = (ROOT / "examples" / "records" / "published.csv").read_text(encoding="utf-8")
    identifiers = re.compile(r"(?:arXiv:|arXiv |arxiv\.org/abs/|doi:|doi\.org/)(\d[\w./()-]*\w)")
    cited = {
        (name, str(file.relative_to(DOCS)))
        for file in DOCS.rglob("*.md")
        for name in identifiers.findall(file.read_text(encoding="utf-8"))
    }
    known |= set(identifiers.findall(figures))
    assert cited and not {(name, file) for name, file in cited if name not in known}


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
