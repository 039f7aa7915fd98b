"""The pages of the presets: complete, true to the code, and the document that is made of them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import pytest

from hopon import policies
from hopon.core.config import SchedulerConfig
from hopon.core.policy.preset import Card, Policy
from hopon.core.policy.presets import PRESETS, preset_class

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_card_of_its_own(name: str) -> None:
    """Not inherited, no sentence left out, every sentence ends."""
    card = preset_class(name).__dict__["card"]
    assert isinstance(card, Card)
    assert card.aliases
    for field in policies.SENTENCES:
        assert getattr(card, field).endswith("."), f"{name}: {field}"
    for text in (card.system, card.source, card.date):
        assert text
        assert not text.endswith(".")


@pytest.mark.parametrize("name", PRESETS)
def test_flags_are_of_knobs_and_settings(name: str) -> None:
    """Every knob says what the original calls it, or that it has none; no flag is of something that does not exist."""
    found = cast(Any, preset_class(name))
    knobs = {field.name for field in fields(found)}
    settings = {field.name for field in fields(SchedulerConfig)}
    assert knobs <= found.card.flags.keys()
    assert found.card.flags.keys() <= knobs | settings


@pytest.mark.parametrize("name", PRESETS)
def test_every_knob_has_a_meaning(name: str) -> None:
    """It is what the docstring says; and a page shows the defaults of the class."""
    page = policies.page(name)
    assert all(knob.meaning for knob in page.knobs), [knob.name for knob in page.knobs if not knob.meaning]
    names = [knob.name for knob in page.knobs]
    assert len(names) == len(set(names))


def test_reasons_to_wait_differ() -> None:
    """No two systems give the same reason: a reader can tell them apart."""
    reasons = [policies.page(name).card.short_waits for name in PRESETS]
    assert len(set(reasons)) == len(reasons)


def test_defaults_are_read_from_the_code() -> None:
    """Of a knob, of a setting that is published, of one that follows the model, and of one that is left open."""
    vllm = {knob.name: knob for knob in policies.page("vllm").knobs}
    assert (vllm["max_num_seqs"].default, vllm["max_num_seqs"].original) == ("256", "--max-num-seqs")
    orca = {knob.name: knob for knob in policies.page("orca").knobs}
    assert orca["max_bs"].default == "128"
    assert orca["max_num_batched_tokens"].default == "follows max_model_len"
    hopon = {knob.name: knob for knob in policies.page("hopon").knobs}
    assert hopon["max_num_seqs"].default == "64"


def test_the_document_is_up_to_date() -> None:
    """docs/policies.md is what ``hopon policies --markdown`` prints."""
    command = [sys.executable, "-m", "hopon", "policies", "--markdown"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (ROOT / policies.DOCUMENT).read_text(encoding="utf-8") == printed, (
        f"run: hopon policies --markdown > {policies.DOCUMENT}"
    )


def test_links_and_tables_of_the_documents_are_whole() -> None:
    """Every link of the overview leads to a section, and every row of a table has as many cells as its head."""
    for name in ("policies.md", "glossary.md"):
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        heads = set(re.findall(r"^## (\S+)$", text, flags=re.M))
        assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= heads
        for linked in re.findall(r"\]\(([a-z]+\.md)\)", text):
            assert (ROOT / "docs" / linked).exists()
        width = 0
        for line in text.splitlines():
            if not line.startswith("|"):
                width = 0
                continue
            width = width or line.count("|")
            assert line.count("|") == width, line


def test_a_page_in_the_terminal() -> None:
    """``hopon policies NAME`` prints the sentences; an unknown name is one line."""
    command = [sys.executable, "-m", "hopon", "policies"]
    run = subprocess.run([*command, "trt-no-evict"], capture_output=True, text=True, check=True)
    words = " ".join(run.stdout.split())
    assert "in-flight batching" in words
    assert "max_num_tokens" in words
    run = subprocess.run([*command, "trt"], capture_output=True, text=True)
    assert run.returncode != 0
    assert "unknown policy 'trt'" in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1


@dataclass(frozen=True, kw_only=True)
class Bare:
    """A preset without a card."""

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        return {}

    def policy(self, config: SchedulerConfig) -> Policy:
        return preset_class("hopon")().policy(config)


def test_a_preset_without_a_card_is_named() -> None:
    """It still works as a policy; there is just no page."""
    with pytest.raises(ValueError, match=r"test_policies:Bare' has no card"):
        policies.page(f"{__name__}:Bare")
