"""The example of docs/writing-a-policy.md is a preset like any other."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hopon.core.policy.presets import make_preset
from tests.core.systems.drive import check_identity, check_no_peeking, run_trace

PAGE = Path(__file__).parents[3] / "docs" / "writing-a-policy.md"
NAME = "my_policies:Refill"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The page's module where an outsider would have it; yields the program that tries it."""
    module, program = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_policies.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    yield program
    sys.modules.pop("my_policies", None)


def test_the_page_is_true(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The program on the page runs as it stands, and its assertion about the passes holds."""
    exec(compile(example, str(PAGE), "exec"), {})
    assert capsys.readouterr().out.splitlines()[0] == "pass 2: request 0 ends, length"


def test_an_outsiders_preset_passes_the_general_tests(example: str, effort: Callable[[int, int], int]) -> None:
    """Named as module:Class it goes through random traces, identity and the look-ahead test like any system."""
    count = effort(15, 300)
    for seed in range(count):
        run_trace(NAME, seed)
        check_identity(NAME, seed)
    assert sum(check_no_peeking(NAME, seed) for seed in range(count)) > count // 3


def test_an_outsiders_knobs_are_knobs(example: str) -> None:
    """They are set from text, and what is wrong with them is said by name."""
    assert make_preset(NAME, {"low": "5"}) == make_preset(NAME, {"low": "05"})
    with pytest.raises(ValueError, match=r"my_policies:Refill.* no knob 'high'; its knobs: low"):
        make_preset(NAME, {"high": "5"})
    with pytest.raises(ValueError, match=r"low must be at least 0, got -1"):
        make_preset(NAME, {"low": "-1"})
