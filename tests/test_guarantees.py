"""The figures of docs/guarantees.md that can be checked here."""

import ast
import io
import pathlib
import re
import tokenize

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
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


def test_the_code_to_read_is_as_long_as_the_page_says():
    total = 0
    for row in re.findall(r"^\| (?:clipping|noise|ledger): (.*) \| (\d+) \|$", PAGE, re.M):
        names, stated = re.findall(r"`([\w/]+\.py)`", row[0]), int(row[1])
        folder = names[0].split("/")[0]
        paths = [ROOT / "dp_keras_opt" / folder / name.split("/")[-1] for name in names]
        assert sum(map(lines_of_code, paths)) == stated, row[0]
        total += stated
    assert f"is {total:,} lines" in PAGE and 0 < total < 1650
