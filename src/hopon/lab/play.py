"""A setting of the page -> the timelines of its presets. The simulator does the work."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, cast

import msgspec

from hopon.core.policy.preset import Card
from hopon.core.policy.presets import PRESETS, make_preset, parse_knobs, preset_class
from hopon.sim.command import make_config, make_machine
from hopon.sim.hardware import HARDWARE, MODELS, hardware
from hopon.sim.run import simulate
from hopon.sim.timeline import Timeline
from hopon.workload.ask import Workload
from hopon.workload.draw import draw
from hopon.workload.lengths import parse_lengths
from hopon.workload.skewed import skewed

MOST_REQUESTS = 1000
MOST_SEATS = 128
MOST_PRESETS = 6


class Setting(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """What the page's controls say; the defaults are its first view.

    Args:
        presets: each a name and perhaps knobs: ``static group_size=8``.
        trace: ``skewed`` (see :func:`hopon.workload.skewed.skewed`) or ``drawn``.
        seed: of the trace.
        requests: how many.
        skew: of skewed lengths.
        speed: arrivals so many times as fast.
        arrivals: of a drawn trace; so are the next three.
        rate: requests per second; 0 for all at once.
        inputs: lengths of prompts, as :func:`hopon.workload.lengths.parse_lengths` reads them.
        outputs: the same of outputs.
        seats: ``max_num_seqs``.
        chunk: most prompt tokens of one request in a pass; 0: no limit but the budget.
        budget: ``max_num_batched_tokens``.
        blocks: KV blocks of 16 tokens (or of the preset's size: the memory is the same).
        cost: ``passes``, ``linear``, ``distserve`` or ``roofline``.
        model: for the roofline.
        device: for the roofline.
    """

    presets: tuple[str, ...] = ("static", "hopon")
    trace: Literal["skewed", "drawn"] = "skewed"
    seed: int = 265056
    requests: int = 64
    skew: float = 0.6
    speed: float = 1.0
    arrivals: Literal["constant", "poisson", "gamma"] = "poisson"
    rate: float = 4.0
    inputs: str = "32-512"
    outputs: str = "exp:64:512"
    seats: int = 8
    chunk: int = 512
    budget: int = 4096
    blocks: int = 4096
    cost: Literal["passes", "linear", "distserve", "roofline"] = "passes"
    model: str = "llama-3-8b"
    device: str = "a100-80"

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("requests", self.requests, 1, MOST_REQUESTS),
            ("seats", self.seats, 1, MOST_SEATS),
            ("presets", len(self.presets), 1, MOST_PRESETS),
            ("speed", self.speed, 0.01, 1000.0),
            ("rate", self.rate, 0.0, 1e6),
        ):
            if not low <= value <= high:
                raise ValueError(f"{name} must be in [{low}, {high}], got {value}")


def workload_of(setting: Setting) -> Workload:
    """The requests. Raises ValueError as the workload's functions do."""
    if setting.trace == "skewed":
        workload = skewed(count=setting.requests, skew=setting.skew, seed=setting.seed)
    else:
        workload = draw(
            count=setting.requests,
            rate=setting.rate,
            inputs=parse_lengths(setting.inputs),
            outputs=parse_lengths(setting.outputs),
            arrivals=setting.arrivals,
            seed=setting.seed,
        )
    return workload.scaled(setting.speed, 1.0)


def run(setting: Setting) -> dict[str, Any]:
    """Timelines of all presets; one that cannot work with the setting has the reason as ``error`` instead.

    Raises:
        ValueError: names what is wrong and the limit.
    """
    workload = workload_of(setting)
    return {
        "workload": f"{len(workload)} requests, {workload.name}",
        "setting": msgspec.to_builtins(setting),
        "runs": [_run(name, setting, workload) for name in setting.presets],
    }


def _run(spec: str, setting: Setting, workload: Workload) -> dict[str, Any]:
    name, *words = spec.split() or [""]
    about = about_policy(name, spec)
    try:
        knobs = dict(parse_knobs(words))
        known = {field.name for field in fields(cast(Any, preset_class(name)))}
        if "run_max_tokens" in known:
            knobs.setdefault("run_max_tokens", str(max(workload.output_lengths)))
        preset = make_preset(name, knobs)
        device = hardware(setting.device)
        machine = make_machine(setting.cost, setting.model, device)
        length = machine.max_model_len or workload.longest
        size = int(preset.settings(length).get("block_size", 16))
        asked = {
            "max_num_seqs": setting.seats,
            "max_num_batched_tokens": setting.budget,
            "long_prefill_token_threshold": setting.chunk,
            "num_blocks": max(1, setting.blocks * 16 // size),
        }
        config = make_config(preset, machine, workload, asked)
        timeline = Timeline()
        result = simulate(
            workload,
            config,
            preset.policy,
            machine.with_blocks(config.block_size, device),
            block_bytes=machine.kv_bytes_per_token * config.block_size,
            about={"settings": msgspec.to_builtins(config)},
            timeline=timeline,
        )
    except ValueError as error:
        return about | {"error": str(error)}
    return about | {"command": _command(name, knobs, setting, asked)} | timeline.content(result)


def about_policy(name: str, label: str) -> dict[str, Any]:
    """What the page says of a preset: label, name and the sentences of its card, where it has one."""
    card = getattr(preset_class(name), "card", None)
    sentences = (
        {
            key: getattr(card, key)
            for key in ("system", "short_waits", "joins", "prefill", "memory", "eviction", "limits")
        }
        if isinstance(card, Card)
        else {}
    )
    return {"label": label, "policy": name, "card": sentences}


def _command(policy: str, knobs: Mapping[str, str], setting: Setting, asked: Mapping[str, int]) -> str:
    """The same run on the command line."""
    words = ["hopon", "simulate", "--policy", policy]
    for knob, value in knobs.items():
        words += ["--policy-knob", f"{knob}={value}"]
    if setting.trace == "skewed":
        words += ["--skew", f"{setting.skew:g}"]
    else:
        words += ["--arrivals", setting.arrivals, "--rate", f"{setting.rate:g}"]
        words += ["--input-len", setting.inputs, "--output-len", setting.outputs]
    words += ["--num-requests", str(setting.requests), "--seed", str(setting.seed)]
    if setting.speed != 1:
        words += ["--rate-scale", f"{setting.speed:g}"]
    words += ["--cost", setting.cost]
    if setting.cost == "roofline":
        words += ["--model", setting.model, "--hardware", setting.device]
    flags = {"num_blocks": "--num-kv-blocks"}
    for name, number in asked.items():
        words += [flags.get(name, "--" + name.replace("_", "-")), str(number)]
    return shlex.join(words)


def choices() -> dict[str, Any]:
    """What the controls offer."""
    presets = []
    for name in PRESETS:
        presets.append({"name": name, "system": about_policy(name, name)["card"].get("system", name)})
    return {
        "presets": presets,
        "models": list(MODELS),
        "devices": list(HARDWARE),
        "most": {"requests": MOST_REQUESTS, "seats": MOST_SEATS, "presets": MOST_PRESETS},
        "default": msgspec.to_builtins(Setting()),
    }
