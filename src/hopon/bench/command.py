"""What ``hopon bench`` does: from what was asked for to a schedule, a run, a table and a file."""

from __future__ import annotations

import asyncio
import math
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hopon.bench import report
from hopon.bench.manifest import Declared, describe
from hopon.bench.play import Watch, check, play
from hopon.bench.records import Records
from hopon.bench.schedule import MIXED, SHAREGPT, Schedule, Writer, conversations, from_lines, from_workload
from hopon.bench.summary import Slo, Summary, parse_slo, summarise
from hopon.bench.target import Target, TargetError, served_model
from hopon.sim.report import number
from hopon.workload.ask import Piece, Workload
from hopon.workload.draw import Arrivals, Kind, Sharing, arrival_times, draw_mix
from hopon.workload.lengths import parse_lengths
from hopon.workload.trace import read_trace

DEFAULT_REQUESTS = 100
CLOSED_REQUESTS = 100_000
"""Requests that are ready for a closed loop of a given duration."""

WorkloadName = Literal["random", "sharegpt", "mixed", "conversations"]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A run as the command line asks for it; see ``hopon bench --help``."""

    workload: WorkloadName = "random"
    input_len: str = "512"
    output_len: str = "128"
    prefix_groups: int = 0
    prefix_len: int = 0
    turns: str = "2-5"
    think: float = 1.0
    trace: Path | None = None
    prompts_file: Path | None = None
    length_scale: float = 1.0
    rate: float | None = None
    rate_scale: float = 1.0
    arrivals: Arrivals = "poisson"
    burstiness: float = 1.0
    ramp_to: float | None = None
    concurrency: int | None = None
    num_requests: int | None = None
    duration: float | None = None
    seed: int = 0
    cache: Literal["cold", "warm"] = "cold"
    vocab_size: int = 10_000
    warmup: int = 1
    as_text: bool = False
    slo: str = ""

    def __post_init__(self) -> None:
        if self.trace is not None and self.prompts_file is not None:
            raise ValueError("give either a trace or a file of prompts")
        if self.concurrency is not None and self.rate is not None:
            raise ValueError("a rate is an open loop and a concurrency a closed one: give one of them")
        if self.concurrency is None and self.rate is None and self.trace is None:
            raise ValueError("give --rate for an open loop or --concurrency for a closed one")
        if self.duration is not None and not self.duration > 0:
            raise ValueError(f"the duration must be above 0 seconds, got {self.duration}")
        if not self.burstiness > 0:
            raise ValueError(f"the burstiness must be above 0, got {self.burstiness}")
        if self.warmup < 1:
            raise ValueError(
                f"at least 1 request goes before the run, to see that the server answers, got {self.warmup}"
            )

    @property
    def load(self) -> str:
        """How requests are sent, for people."""
        span = f" for {self.duration:g} s" if self.duration else ""
        if self.concurrency is not None:
            return f"closed loop, {self.concurrency} at once{span}"
        if self.rate is None:
            return f"open loop, as recorded, {self.rate_scale:g} times as fast{span}"
        kind = f"gamma (burstiness {self.burstiness:g})" if self.arrivals == "gamma" else self.arrivals
        ramp = f" rising to {self.ramp_to:g}" if self.ramp_to is not None else ""
        return f"open loop, {kind} arrivals, {self.rate:g} requests/s{ramp}{span}"


def make_writer(asked: Asked) -> Writer:
    """Prompts of a run; in a cold one they are new to every server."""
    salt = f"{asked.seed}" if asked.cache == "warm" else f"{asked.seed} {secrets.token_hex(8)}"
    lowest = min(100, asked.vocab_size // 4)
    return Writer(as_text=asked.as_text, salt=salt, lowest=lowest, vocab_size=asked.vocab_size)


def make_schedule(asked: Asked, writer: Writer) -> Schedule:
    """What is asked for, drawn.

    Raises:
        ValueError: names what is wrong and the limit.
        OSError: a file cannot be read.
    """
    limit = asked.duration if asked.concurrency is not None else None
    load: dict[str, Any] = {"concurrency": asked.concurrency, "limit": limit}
    if asked.trace is not None:
        return from_workload(_traced(asked, asked.trace), writer, **load)
    times = _times(asked)
    if asked.prompts_file is not None:
        tokens = parse_lengths(asked.output_len)
        longest = getattr(tokens, "high", None)
        if longest is None:
            raise ValueError(f"--output-len is a number where prompts come from a file, got {asked.output_len!r}")
        return from_lines(asked.prompts_file, times, writer, max_tokens=longest, seed=asked.seed, **load)
    if asked.workload == "conversations":
        inputs = parse_lengths(asked.input_len)
        return conversations(
            times,
            writer,
            turns=parse_lengths(asked.turns),
            inputs=inputs,
            outputs=parse_lengths(asked.output_len),
            think=asked.think,
            seed=asked.seed,
            **load,
        )
    drawn = draw_mix(count=len(times), rate=0.0, kinds=_kinds(asked), sharing=_sharing(asked), seed=asked.seed).scaled(
        1.0, asked.length_scale
    )
    asks = tuple(replace(ask, arrival=time) for ask, time in zip(drawn, times, strict=True))
    name = f"{asked.workload}, {_shape(asked)}seed {asked.seed}"
    return from_workload(Workload(name=name, asks=asks, notes=drawn.notes), writer, **load)


def _kinds(asked: Asked) -> tuple[Kind, ...]:
    match asked.workload:
        case "mixed":
            return MIXED
        case "sharegpt":
            return (Kind(inputs=SHAREGPT[0], outputs=SHAREGPT[1]),)
        case _:
            return (Kind(inputs=parse_lengths(asked.input_len), outputs=parse_lengths(asked.output_len)),)


def _shape(asked: Asked) -> str:
    sharing = f"{asked.prefix_groups} shared prefixes of {asked.prefix_len}, " if asked.prefix_groups else ""
    if asked.workload != "random":
        return sharing
    return f"{asked.input_len} tokens in, {asked.output_len} out, {sharing}"


def _sharing(asked: Asked) -> Sharing | None:
    if not (asked.prefix_groups or asked.prefix_len):
        return None
    return Sharing(groups=asked.prefix_groups, tokens=asked.prefix_len)


def _times(asked: Asked) -> list[float]:
    """When sessions begin; with a duration, all that begin within it."""
    count = asked.num_requests
    if asked.concurrency is not None:
        return [0.0] * (count or (CLOSED_REQUESTS if asked.duration else DEFAULT_REQUESTS))
    assert asked.rate is not None, "an open loop without a trace has a rate"
    rate, duration = asked.rate, asked.duration
    if duration is None or count is not None:
        times = _draw_times(asked, count or DEFAULT_REQUESTS)
        return [time for time in times if duration is None or time < duration]
    if not rate:
        raise ValueError("a duration needs a rate above 0: at rate 0 all requests are sent at once")
    if asked.ramp_to is not None:  # whose slope depends on the count
        times = _draw_times(asked, max(1, round((rate + asked.ramp_to) / 2 * duration)))
    else:
        size = math.ceil(rate * duration) + 1
        while (times := _draw_times(asked, size))[-1] < duration:
            size *= 2
    return [time for time in times if time < duration]


def _draw_times(asked: Asked, count: int) -> list[float]:
    assert asked.rate is not None, "only an open loop has times"
    return arrival_times(
        rate=asked.rate,
        count=count,
        arrivals=asked.arrivals,
        variation=1 / math.sqrt(asked.burstiness),
        end_rate=asked.ramp_to,
        seed=asked.seed,
    )


def _traced(asked: Asked, path: Path) -> Workload:
    work = read_trace(path, asked.seed).scaled(asked.rate_scale, asked.length_scale)
    if asked.num_requests is not None:
        work = work.first(min(asked.num_requests, len(work)))
    if asked.rate is not None:
        times = _times(replace(asked, num_requests=len(work)))
        asks = tuple(replace(ask, arrival=time) for ask, time in zip(work, times, strict=False))
        return replace(work, asks=asks)
    if asked.duration is not None and asked.concurrency is None:
        work = work.first(max(1, sum(ask.arrival < asked.duration for ask in work)))
    return work


def shared_tokens(schedule: Schedule) -> int | None:
    """Prompt tokens that another prompt of the schedule begins with, too; None where that is not known."""
    known: set[tuple[int, ...]] = set()
    shared = 0
    for session in schedule.sessions:
        content = session.turns[0].content
        if len(session.turns) > 1 or isinstance(content, str) or not content or not isinstance(content[0], Piece):
            return None
        passed: tuple[int, ...] = ()
        for piece in content:
            assert isinstance(piece, Piece), "the first one is"
            passed += (piece.token,)
            if passed in known:
                shared += piece.count
            known.add(passed)
    return shared + math.ceil(schedule.writer.overhead) * len(schedule.sessions)


async def fit_words(target: Target, writer: Writer) -> Writer:
    """Ask the server how many tokens two texts of words have, so that the others get the length asked for.

    Raises:
        TargetError: it does not answer.
    """
    sizes = (8, 104)
    counts = []
    for place, size in enumerate(sizes, 1):
        text = replace(writer, tokens_per_word=1.0, overhead=0.0).words((Piece(-place, size),))
        counts.append((await check(target, text, max_tokens=1)).input_tokens)
    if not all(counts):
        return writer  # no usage: a word is taken for a token
    rate = (counts[1] - counts[0]) / (sizes[1] - sizes[0])
    if not rate > 0:
        raise TargetError(
            f"{target.base} counts {counts[0]} tokens for {sizes[0]} words and {counts[1]} for {sizes[1]}"
        )
    return replace(writer, tokens_per_word=rate, overhead=max(0.0, counts[0] - rate * sizes[0]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A run, its numbers, and all of it for a file."""

    records: Records
    summary: Summary
    text: str
    content: Mapping[str, Any] = field(repr=False)


async def named(target: Target) -> Target:
    """The target with the model that its server names, unless one is given."""
    return target if target.model else replace(target, model=await served_model(target))


async def measure(
    target: Target, asked: Asked, declared: Declared, *, stop: asyncio.Event | None = None, watch: Watch | None = None
) -> Measured:
    """One run against one server.

    Raises:
        TargetError: it does not answer at all.
        ValueError: names what is wrong and the limit.
    """
    slo = make_slo(asked)
    target = await named(target)
    writer = make_writer(asked)
    if asked.as_text:
        writer = await fit_words(target, writer)
    schedule = make_schedule(asked, writer)
    is_text = asked.as_text or asked.prompts_file is not None
    await check(target, replace(writer, as_text=is_text).prompt((Piece(-9, 16),)), count=asked.warmup)
    declared = replace(declared, load=asked.load, seed=asked.seed, cache=asked.cache, slo=asked.slo)
    manifest = await describe(target, schedule, declared)
    records = await play(target, schedule, stop=stop, watch=watch)
    cold = shared_tokens(schedule) if asked.cache == "cold" else None
    summary = summarise(records, slo, shared_tokens=cold)
    return Measured(
        records=records,
        summary=summary,
        text=report.text(manifest, summary),
        content=report.to_json(manifest, summary, records),
    )


def make_slo(asked: Asked) -> Slo | None:
    """What was promised.

    Raises:
        ValueError: it cannot be read, or names a class that the workload does not have.
    """
    if not asked.slo:
        return None
    slo = parse_slo(asked.slo)
    is_mixed = asked.workload == "mixed" and asked.trace is None and asked.prompts_file is None
    known = [kind.name for kind in MIXED] if is_mixed else []
    for name in slo.kinds:
        if name not in known:
            raise ValueError(f"--slo names a class {name!r}; this workload has {', '.join(known) or 'no classes'}")
    return slo


async def alternate(
    targets: tuple[Target, Target],
    asked: Asked,
    declared: Declared,
    *,
    windows: int,
    stop: asyncio.Event,
    watch: Watch | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[str, dict[str, Any]]:
    """One workload against two servers in turn, window by window: A B, B A, A B, ...

    Every window has a seed of its own and is the same for both. What is complete when ``stop`` is set is reported.
    """
    if windows < 1:
        raise ValueError(f"at least 1 window is needed, got {windows}")
    pairs: list[tuple[Measured, Measured]] = []
    for window in range(windows):
        ask = replace(asked, seed=asked.seed + window)
        found: dict[int, Measured] = {}
        for side in (0, 1) if window % 2 == 0 else (1, 0):
            found[side] = await measure(targets[side], ask, declared, stop=stop, watch=watch)
            served = found[side].summary.served
            say(
                f"window {window + 1} of {windows}, {targets[side].base}: "
                f"{number(served.output_tokens_per_second, 1)} output tok/s, {served.finishes}"
            )
            if stop.is_set():
                break
        if stop.is_set():
            break
        pairs.append((found[0], found[1]))
    if not pairs:
        raise TargetError("no window was complete")
    names = (targets[0].base, targets[1].base)
    table, ratios = report.spread([(asdict(a.summary), asdict(b.summary)) for a, b in pairs], names)
    manifest = pairs[0][0].content["manifest"]
    head = (
        f"{len(pairs)} windows of each server in alternation; ratio = second / first\n"
        f"workload: {manifest['workload']}\nload: {asked.load}"
        + (f"\ncapacity as declared: {declared.capacity}" if declared.capacity else "")
    )
    warnings = sorted({warning for pair in pairs for one in pair for warning in one.summary.warnings})
    text = "\n\n".join([head, table, *(f"warning: {warning}" for warning in warnings)])
    content = {
        "format": report.FORMAT,
        "servers": names,
        "ratios": ratios,
        "windows": [[one.content for one in pair] for pair in pairs],
    }
    return text, content


def run(work: Callable[[asyncio.Event], Any]) -> Any:
    """Run a coroutine function; the first Ctrl-C sets its event, the second one ends the process."""

    async def main() -> Any:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            loop.remove_signal_handler(signal.SIGINT)
            stop.set()

        loop.add_signal_handler(signal.SIGINT, on_signal)
        return await work(stop)

    return asyncio.run(main())


def compare_files(paths: Sequence[Path]) -> str:
    """Two files of runs side by side.

    Raises:
        OSError: one cannot be read.
        ValueError: one is something else.
    """
    first, second = paths
    return report.compare(report.read(first), report.read(second), (first.name, second.name))
