"""What all of them are asked: a workload in words, or a trace's file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, cast

from hopon.core.policy.presets import parse_knobs
from hopon.workload.ask import Workload
from hopon.workload.draw import Sharing, draw
from hopon.workload.lengths import parse_lengths
from hopon.workload.trace import read_trace

DEFAULT_WORKLOAD = "input=32-256 output=exp:32:128"
DEFAULT_REQUESTS = 32


def make_workload(
    spec: str, *, requests: int | None = None, rate: float | None = None, length_scale: float = 1.0, seed: int = 0
) -> Workload:
    """A trace's file, or words that say what to draw.

    Args:
        spec: a path that :func:`hopon.workload.trace.read_trace` reads, or any of ``input=LENGTHS output=LENGTHS
            arrivals=constant|poisson|gamma variation=X groups=N prefix=N`` (see
            :func:`hopon.workload.lengths.parse_lengths`; ``groups`` shared beginnings of ``prefix`` tokens). What is
            left out is as in the default workload.
        requests: how many to draw, or the first so many of a trace; None for 32, or all.
        rate: requests per second: of a drawn workload, or what a trace is scaled to. 0 sends all at once. None: at
            once, or as recorded.
        length_scale: prompts and outputs so many times as long.
        seed: of what is drawn.

    Raises:
        ValueError: names what is wrong and the limit.
        OSError: the trace cannot be read.
    """
    if rate is not None and not 0 <= rate < inf:
        raise ValueError(f"the rate must be at least 0 requests per second, got {rate}")
    words = spec.split()
    if words and all("=" in word for word in words):
        count = DEFAULT_REQUESTS if requests is None else requests
        return _drawn(words, count, rate or 0.0, seed).scaled(1.0, length_scale)
    workload = read_trace(Path(spec), seed)
    workload = workload.scaled(1.0, length_scale)
    if requests is not None:
        workload = workload.first(requests)
    if rate is None:
        return workload
    if rate == 0:
        asks = tuple(replace(ask, arrival=0.0) for ask in workload)
        return replace(workload, asks=asks, notes=(*workload.notes, "all at once"))
    span = workload.asks[-1].arrival
    if not span:
        raise ValueError(f"{spec}: all requests arrive at once, which no factor scales to {rate:g} per second")
    return workload.scaled(rate * span / (len(workload) - 1))


def _drawn(words: Sequence[str], requests: int, rate: float, seed: int) -> Workload:
    given = dict(parse_knobs(DEFAULT_WORKLOAD.split())) | dict(parse_knobs(words))
    known = ("input", "output", "arrivals", "variation", "groups", "prefix")
    for name in given:
        if name not in known:
            raise ValueError(f"a workload has no {name!r}; it has {', '.join(known)}")
    numbers: dict[str, float] = {}
    for name, default in (("variation", 1.0), ("groups", 0), ("prefix", 0)):
        try:
            numbers[name] = type(default)(given.get(name, default))
        except ValueError:
            raise ValueError(f"a workload's {name} must be a number, got {given[name]!r}") from None
    groups, prefix = int(numbers["groups"]), int(numbers["prefix"])
    workload = draw(
        count=requests,
        rate=rate,
        inputs=parse_lengths(given["input"]),
        outputs=parse_lengths(given["output"]),
        arrivals=cast(Any, given.get("arrivals", "poisson")),
        variation=numbers["variation"],
        sharing=Sharing(groups=groups, tokens=prefix) if groups or prefix else None,
        seed=seed,
    )
    words = [f"{name}={value}" for name, value in given.items()]
    when = workload.name if rate else f"all at once, seed {seed}"
    return replace(workload, name=f"{' '.join(words)}, {when}")
