"""Timelines say what the scheduler did: nothing is lost between steps and pictures, and looking changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from hopon.lab.play import Setting, run, workload_of
from hopon.sim.command import DEFAULTS
from hopon.sim.timeline import Kind

PRESETS = ("hopon", "static", "hf-pipeline", "orca", "vllm-v0", "vllm", "tgi", "sglang", "lmdeploy", "llama-cpp")
SHORT_OF_MEMORY = Setting(presets=PRESETS[:6], requests=24, blocks=96, seats=6, budget=1024, chunk=64, skew=0.3)


def cells(found: dict[str, Any]) -> list[tuple[int, int, int, int, int]]:
    """(step, row, request, kind, tokens) of every seat in every step."""
    return [
        (step, row, *flat[i + 2 : i + 5])
        for row, flat in enumerate(found["rows"])
        for i in range(0, len(flat), 5)
        for step in range(flat[i], flat[i] + flat[i + 1])
    ]


@pytest.mark.parametrize("found", run(SHORT_OF_MEMORY)["runs"], ids=lambda found: found["label"])
def test_a_timeline_adds_up(found: dict[str, Any]) -> None:
    """Every seat holds one request at a time, and no request two seats; tokens, padding, outputs and preemptions are
    those of the totals."""
    seen = cells(found)
    places = [(step, row) for step, row, *_ in seen]
    assert len(places) == len(set(places))
    sitting = [(step, request) for step, _, request, *_ in seen if request >= 0]
    assert len(sitting) == len(set(sitting))
    steps, totals = found["steps"], found["totals"]
    assert len(steps["start"]) == totals["passes"]
    assert sum(steps["tokens"]) == totals["scheduled_tokens"]
    assert sum(tokens for *_, kind, tokens in seen if kind != Kind.PADDING) == totals["scheduled_tokens"]
    assert sum(steps["padding"]) == totals["padding_tokens"]
    assert sum(steps["useful"]) == totals["useful_slot_steps"]
    assert len(found["evictions"]) == totals["preemptions"] == sum(row[7] for row in found["requests"])
    assert totals["output_tokens"] == sum(row[3] for row in found["requests"])
    for i, (first, queue) in enumerate(found["queue"]):
        end = found["queue"][i + 1][0] if i + 1 < len(found["queue"]) else totals["passes"]
        for step in range(first, end):
            assert len(queue) == steps["waiting"][step]
            assert bool(queue) == bool(steps["reason"][step])
            assert not {(step, request) for request in queue} & set(sitting)


def test_short_memory_shows() -> None:
    """The setting above evicts somewhere, and somebody computes again; elsewhere somebody waits for memory."""
    runs = run(SHORT_OF_MEMORY)["runs"]
    assert any(found["evictions"] for found in runs)
    assert any(kind == Kind.AGAIN for found in runs for *_, kind, _ in cells(found))
    assert any(3 in found["steps"]["reason"] for found in runs)


def test_a_timeline_that_takes_no_part() -> None:
    """Totals with a timeline are those without."""
    from hopon.core.policy.presets import make_preset
    from hopon.sim.command import make_config, make_machine
    from hopon.sim.hardware import hardware
    from hopon.sim.run import simulate

    setting = Setting(presets=("vllm",), requests=40, blocks=256)
    preset, workload = make_preset("vllm"), workload_of(setting)
    machine = make_machine("passes", "", hardware("a100-80"))
    asked = {"max_num_seqs": 8, "max_num_batched_tokens": 4096, "long_prefill_token_threshold": 512, "num_blocks": 256}
    config = make_config(preset, machine, workload, asked)
    plain = simulate(workload, config, preset.policy, machine.with_blocks(config.block_size, hardware("a100-80")))
    watched = run(setting)["runs"][0]["totals"]
    assert DEFAULTS["block_size"] == config.block_size
    for name in ("passes", "useful_slot_steps", "seat_steps", "preemptions", "recomputed_tokens", "kv_used"):
        assert getattr(plain.totals, name) == watched[name], name


def test_the_article() -> None:
    """The first view is the article's: 3,470 passes and .223, 1,122 and .691."""
    static, hopon = run(Setting())["runs"]
    assert (static["totals"]["passes"], round(static["totals"]["utilisation"], 3)) == (3470, 0.223)
    assert (hopon["totals"]["passes"], round(hopon["totals"]["utilisation"], 3)) == (1122, 0.691)
    assert (static["rule"], hopon["rule"]) == ("batch", "turn")
    assert 4 in static["steps"]["reason"]
    assert set(hopon["steps"]["reason"]) == {0, 1}
