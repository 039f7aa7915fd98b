"""The table of cases from the field is complete, and says where their tests are."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = TESTS / "field_cases.md"
COUNT = 116


def test_every_case_has_its_line_and_its_tests() -> None:
    """In order, none left out; each names exactly the files whose tests carry its id, or says why it does not apply."""
    lines = re.findall(r"^\| (V\d{3}) \| (.+) \| (.+) \|$", TABLE.read_text(), re.MULTILINE)
    assert [case for case, _, _ in lines] == [f"V{number:03}" for number in range(1, COUNT + 1)]
    carried: defaultdict[str, set[str]] = defaultdict(set)
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for case in re.findall(r"_(v\d{3})(?=_)", node.name):
                    carried[case.upper()].add(str(path.relative_to(TESTS)))
    for case, _, tests in lines:
        if tests.startswith("does not apply: "):
            assert case not in carried, case
        else:
            assert set(re.findall(r"`(.+?)`", tests)) == carried[case] != set(), case
    assert set(carried) <= {case for case, _, _ in lines}
