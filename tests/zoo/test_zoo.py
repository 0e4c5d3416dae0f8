"""One model for each way through the engines; `python -m tests.zoo` runs all that there are."""

import pathlib

import pytest

from tests.zoo import __main__ as command
from tests.zoo import page
from tests.zoo.catalog import REFUSED, ROWS
from tests.zoo.trial import LARGEST_ERROR, Result, error_of_a_clipped_sum, tried

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "models.md"

#: A way through the engines, and a model that goes it.
WAYS = {
    "rules": "convolutions",
    "a call of its own": "subclassed",
    "a loop": "gru",
    "a loop, one example at a time": "cnn_lstm",
    "a layer of one's own": "deep_and_cross",
    "a table that is used twice": "tied_embeddings",
    "strings": "wide_and_deep",
    "frozen, with LoRA": "frozen_with_lora",
    "of keras_hub, with LoRA": "hub_gpt2_lora",
    "after fix": "u_net",
    "refused before anything runs": "mix_up",
    "refused by the check": "two_towers_in_the_batch",
}


@pytest.mark.parametrize("name", WAYS.values(), ids=WAYS)
def test_a_model_does_what_the_catalog_says(name):
    row = ROWS[name]
    pytest.importorskip(row.needs)
    model = tried(row)
    assert not model.differs_from(row.expected), model.message
    if model.outcome != REFUSED:
        assert error_of_a_clipped_sum(model) < LARGEST_ERROR


def test_the_page_is_that_of_the_results():
    results = page.read(PAGE.with_suffix("") / "results.csv")
    assert list(results) == list(ROWS)
    assert PAGE.read_text(encoding="utf-8") == page.text(list(results.values()))


def test_results_are_kept_for_what_is_not_run(tmp_path, monkeypatch):
    seen = []

    def run(name, timeout):
        seen.append(name)
        return Result(name, REFUSED, message="why | `not`")

    monkeypatch.setattr(command, "run", run)
    arguments = ["--output", str(tmp_path / "models.md")]
    assert command.main(["gru", *arguments]) == 0
    assert command.main(["gru", "ctc", "--only-missing", *arguments]) == 0
    assert seen == ["gru", "ctc"]
    results = page.read(tmp_path / "models" / "results.csv")
    assert list(results) == list(ROWS)
    assert [r.name for r in results.values() if r.outcome == REFUSED] == ["gru", "ctc"]
    written = (tmp_path / "models.md").read_text(encoding="utf-8")
    assert r"why \| \`not\`" in written and "## Not run yet\n\n`temporal" in written
    with pytest.raises(SystemExit, match="No such models: grue"):
        command.main(["grue", *arguments])


def test_a_model_that_ends_its_process_is_a_failure(monkeypatch):
    monkeypatch.setattr(command.sys, "executable", "false")
    result = command.run("gru", timeout=60)
    assert (result.outcome, result.message) == (page.FAILED, "status 1")
