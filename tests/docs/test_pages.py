"""The README and the pages of docs/: their links, their places, and what is promised of them."""

import json
import pathlib
import re
import runpy

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
CAPTIONS = {
    "Tutorials": "tutorials",
    "How to": "how_to",
    "Reference": "reference",
    "Explanation": "explanation",
}
_FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
_LINK = re.compile(r"\]\(((?:[^()\s]|\([^()\s]*\))+)\)")
_HEADING = re.compile(r"^#{1,6} +(.*?)\s*$", re.M)


def pages():
    """Every page in Markdown, and the notebooks."""
    top = sorted(ROOT.glob("*.md"))
    below = (page for page in DOCS.rglob("*.*") if "_build" not in page.parts)
    return top + sorted(page for page in below if page.suffix in (".md", ".ipynb"))


def prose(page):
    """The Markdown of a page or notebook without its blocks of code."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = (cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    return _FENCE.sub("", text)


def anchors(page):
    """The anchors that GitHub and MyST give the headings of a page."""
    found = []
    for heading in _HEADING.findall(prose(page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return found


def broken_links(page):
    broken = []
    for link in _LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        inside = target.is_relative_to(ROOT.resolve())
        if not (inside and target.exists() and (not anchor or anchor in anchors(target))):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert not broken_links(page)


def test_a_broken_link_would_be_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# Über C₁ (x)\n\n## Same\n\n## Same\n")
    assert anchors(page) == ["über-c₁-x", "same", "same-1"]
    links = ["page.md#same-1", "#same", "https://example.org/x", "none.md", "page.md#none", "../x"]
    page.write_text(page.read_text() + " ".join(f"[a\nb]({link})" for link in links))
    assert broken_links(page) == ["none.md", "page.md#none", "../x"]


def test_pages_that_files_name_are_there():
    files = [ROOT / "tox.ini", ROOT / "setup.cfg", ROOT / ".ci" / "run", *ROOT.glob("*.md")]
    for folder in ("dp_keras_opt", "dp_keras_opt_cli", "tests", "examples", "benchmarks", "docs"):
        files += (ROOT / folder).rglob("*.py")
        files += (ROOT / folder).rglob("*.md")
    named = re.compile(r"(?<![\w/])docs/[\w/.*-]*\w")
    missing = {
        (str(file.relative_to(ROOT)), name)
        for file in files
        for name in named.findall(file.read_text(encoding="utf-8"))
        if "_build" not in name and not list(ROOT.glob(name))
    }
    assert not missing


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "docs/reference/guarantees.md"])
def test_modules_that_readers_are_sent_to_are_there(name):
    found = re.findall(r"`([\w/]+\.py)`", prose(ROOT / name))
    rooms = [
        ROOT / room
        for room in ("dp_keras_opt", "dp_keras_opt_cli", "tests", "benchmarks", "examples")
    ]
    missing = [
        file
        for file in found
        if not ((ROOT / file).exists() or any(list(room.rglob(file)) for room in rooms))
    ]
    assert len(found) > 5 and not missing


def test_pages_lie_where_their_caption_says():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    trees = re.findall(r"^```\{toctree\}\n:caption: (.*)\n(?::.*\n)*\n([^`]*)```$", index, re.M)
    assert [caption for caption, _ in trees] == list(CAPTIONS)
    listed = []
    for caption, entries in trees:
        names = entries.split()
        assert all(name.startswith(f"{CAPTIONS[caption]}/") for name in names), caption
        listed += names
    there = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")}
    assert sorted(listed) == sorted(name for name in there if name != "index")


def readme_block(mark):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.search(rf"^<!-- {mark} -->\n```\w+\n(.*?)^```$", text, re.M | re.S).group(1)


def test_the_readme_is_read_in_a_minute():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert len(re.findall(r"^\|---", text, re.M)) == 1 and text.count("![") == 1
    table = re.search(r"^\|---.*\n((?:\|.*\n)*)", text, re.M).group(1)
    assert len(table.splitlines()) == 8
    for mark in ("main-command", "test-command"):
        (line,) = readme_block(mark).splitlines()
        assert line.startswith("python3.11 -m venv .venv && ")
    assert readme_block("main-command").endswith("examples/movielens.py\n")


def test_the_program_of_the_readme_says_every_number_once():
    program = readme_block("quick-example")
    compile(program, "README.md", "exec")
    code = re.sub(r"#.*", "", program)
    for argument in ("batch_size", "epochs", "epsilon", "delta", "clip_norm"):
        assert len(re.findall(rf"\b{argument}=", code)) == 1, argument
    assert "noise_multiplier" not in code and "steps" not in code


def test_the_glossary_has_the_words_that_readers_must_know():
    text = (DOCS / "explanation" / "concepts.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", text.split("\n## Glossary\n")[1], re.M)[1:]
    assert len(rows) == 20
    assert all(len(meaning) > 30 for _, meaning in rows)


def test_a_release_has_absolute_links(tmp_path, monkeypatch):
    for name in ("README.md", "setup.cfg"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    script = runpy.run_path(str(ROOT / ".ci" / "release_links.py"))
    script["main"]("https://example.org/owner/name/", "v1.2")
    readme = pathlib.Path("README.md").read_text(encoding="utf-8")
    links = _LINK.findall(_FENCE.sub("", readme))
    assert len(links) == len(_LINK.findall(prose(ROOT / "README.md")))
    base = "https://example.org/owner/name"
    assert all(link.startswith((f"{base}/blob/v1.2/", f"{base}/raw/v1.2/")) for link in links)
    assert f"![Test error against the ε spent]({base}/raw/v1.2/docs/images/" in readme
    assert f"project_urls =\n    Documentation = {base}/blob/v1.2/docs/index.md\n" in (
        pathlib.Path("setup.cfg").read_text(encoding="utf-8")
    )
    with pytest.raises(ValueError, match="no empty project_urls"):
        script["main"](base, "v1.2")
