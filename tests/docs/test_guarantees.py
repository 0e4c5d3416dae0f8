"""The figures of docs/reference/guarantees.md that can be checked here."""

import ast
import io
import pathlib
import re
import tokenize

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "guarantees.md").read_text(encoding="utf-8")
#: Lines of the trusted files at version 0.1.0, without what is there twice and is compared: the
#: rules of layers with plain gradients in each model, draws by NumPy with the graph's in tests.
BASELINE = 1441
_NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
)  # fmt: skip


def lines_of_code(path):
    """Lines of a module without comments, docstrings and empty ones."""
    source = path.read_text(encoding="utf-8")
    strings = [
        node.body[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and ast.get_docstring(node) is not None
    ]
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for string in strings:
        lines.difference_update(range(string.lineno, string.end_lineno + 1))
    return len(lines)


def rooms():
    """[(names of the trusted files of a room, their lines as stated)], as the page has them."""
    found = []
    kinds = "clipping|rules|noise|draws by NumPy|numbers|ledger"
    for row in re.findall(rf"^\| (?:{kinds}): (.*) \| (\d+) \|$", PAGE, re.M):
        names = re.findall(r"`([\w/]+\.py)`", row[0])
        folder = names[0].split("/")[0]
        found.append(([f"{folder}/{name.split('/')[-1]}" for name in names], int(row[1])))
    return found


def test_the_code_to_read_is_as_long_as_the_page_says():
    assert len(rooms()) == 6
    for names, stated in rooms():
        assert sum(lines_of_code(ROOT / "dp_keras_opt" / name) for name in names) == stated, names
    assert f"is {sum(stated for _, stated in rooms()):,} lines" in PAGE


def test_the_code_to_read_stays_short():
    """Whoever adds a capability may add 150 lines to what must be trusted, and not more.

    Besides, 60 are for the proof of the bound where products are taken in TF32, for two routes of
    the draw, and for the risk; 50 for counts beside the sum, by which a clip norm finds itself; 110
    for what is released beside the training (draws for numbers, thresholds, entries in the ledger)
    and for privacy filters, which a ledger holds its steps to; 60 for gradients at several points,
    150 for a centre and for geometries that are matrices, 170 for tables of which a step releases
    some rows, 30 against half bits that add up and products at the ends of float32, 35 for sums of
    many rows, 25 against threads that meet within an entry of the ledger, and 8 against a ledger
    that goes to another process without its file.
    """
    clipping, _, noise, by_numpy, numbers, ledger = (stated for _, stated in rooms())
    allowed = 150 + 60 + 50 + 110 + 60 + 150 + 170 + 30 + 35 + 25 + 8
    assert 0 < clipping + noise + ledger <= BASELINE + allowed
    assert by_numpy <= 80
    assert numbers <= 600


def test_the_threat_model_names_the_same_files():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    section = text.split("## Trusted code\n")[1].split("\n## ")[0]
    table = "".join(line for line in section.splitlines() if line.startswith("|"))
    named = re.findall(r"`([\w/]+\.py)`", table)
    assert sorted(named) == sorted(name for names, _ in rooms() for name in names)
