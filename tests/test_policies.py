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
from hopon.core.policy.presets import PRESETS, make_preset, preset_class
from hopon.core.scheduler import Scheduler
from hopon.core.types import FinishReason
from hopon.reproduce.play import Played, ask, crowd, play
from hopon.workload.ask import Workload
from hopon.workload.draw import draw
from hopon.workload.lengths import Uniform

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
    assert knobs <= found.card.flags.keys(), "a knob that the original does not have gets an empty name in the card"
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


def _play(name: str, workload: Workload, capacity: int) -> Played:
    """Four seats, blocks of one token, and a budget that is never reached; a pass a second."""
    knobs = {"run_max_tokens": max(workload.output_lengths)} if name == "hf-pipeline" else {}
    if name == "dynamic":
        knobs = {"max_batch_size": 4}
    if name in ("static", "hf-pipeline"):
        knobs |= {"max_wait": 0}
    return play(
        workload,
        name,
        seats=4,
        capacity=capacity,
        budget=1024,
        knobs=knobs,
        block_size=1,
        enable_prefix_caching=False,
        enable_chunked_prefill=True,
    )


@pytest.mark.parametrize("name", PRESETS)
def test_the_reason_to_wait_is_the_longest_answer_where_it_is(name: str) -> None:
    """A request for one token comes beside one for 50 that runs: it waits for that one exactly where its card says that
    the longest answer is what a request waits for."""
    workload = Workload(name="made by hand", asks=(ask(0, 4, 50), ask(1, 4, 1, arrival=1.0)))
    admitted = _play(name, workload, 4096).records[1].admitted
    assert admitted is not None
    assert (admitted >= 50) is ("longest" in policies.page(name).card.short_waits)


@pytest.mark.parametrize("name", PRESETS)
def test_memory_is_taken_as_the_card_says(name: str) -> None:
    """Where a card speaks of the whole possible output, all of it is reserved in the first pass; elsewhere less is."""
    settings = SchedulerConfig(num_blocks=512, block_size=1, max_model_len=256, max_num_batched_tokens=256)
    preset = make_preset(name, {"run_max_tokens": "100"} if name == "hf-pipeline" else {})
    scheduler = Scheduler(settings, preset.policy(settings))
    scheduler.add(ask(0, 20, 100).request(), 0.0)
    scheduler.close_input()
    scheduler.plan(0.0)
    memory = policies.page(name).card.memory
    says = any(words in memory for words in ("Prompt and max_tokens", "Prompt + max_tokens", "longest output"))
    assert (scheduler.pool.num_used >= 119) is says, scheduler.pool.num_used


@pytest.mark.parametrize("name", PRESETS)
def test_prompts_run_beside_decodes_as_the_card_says(name: str) -> None:
    """Passes with both are seen where the card does not say that prompts have passes of their own."""
    workload = draw(count=40, rate=0.5, inputs=Uniform(2, 40), outputs=Uniform(2, 20), seed=1)
    steps = _play(name, workload, 4096).steps
    mixed = any(step.features.num_decodes and step.features.prefill_tokens for step in steps)
    prefill = policies.page(name).card.prefill
    apart = any(words in prefill for words in ("prompts only", "nobody decodes", "nobody joins"))
    assert mixed is not apart


@pytest.mark.parametrize("name", PRESETS)
def test_memory_is_lost_as_the_card_says(name: str) -> None:
    """Four prompts that fit and outgrow the pool: nobody is preempted where the card says "never"; elsewhere somebody
    is, ends with an error, or waits."""
    found = _play(name, crowd([(20, 40)] * 4), 150)
    eviction = policies.page(name).card.eviction
    assert not found.totals.preemptions or not eviction.startswith(("Never", "None"))
    if eviction.startswith("None"):
        assert any(record.finish is FinishReason.ERROR for record in found.records)
    else:
        assert [record.output_tokens for record in found.records] == [40] * 4
    if not eviction.startswith(("Never", "None")) and not name.startswith("lightllm") and name != "sglang":
        assert found.totals.preemptions, "these two foresee it and do not let everybody in"


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
