"""``python -m benchmarks``: W1-W5 against hopon and, if told, against other servers, in alternation.

Every figure is the median of the runs that count. The prefix cache of hopon's own servers is off, except for W4, where
every run gets a fresh server so that no run knows an earlier one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from benchmarks.client import play
from benchmarks.measure import ForeignCpu, Run, median, summarise, wait_until_idle
from benchmarks.servers import Hopon, Memory, Running, Server
from benchmarks.workloads import NAMES, Codec, Crowd, Workload, workload
from hopon.bench.manifest import machine
from hopon.bench.target import TargetError
from hopon.catalogue import resolve
from hopon.cli.environment import cache_root
from hopon.serve.tokenizer import Tokenizer

FOREIGN_LIMIT = 0.05
"""Runs during which others used more of the machine are marked: they say little."""

_console = Console(stderr=True)


class _TokenizerCodec:
    """SmolLM2's tokenizer, as the workloads want it."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.load(path)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def main() -> int:
    arguments = _arguments()
    codec = _TokenizerCodec(resolve("smollm2-135m", cache_root()))
    own = [Hopon(label, arguments.model, tuple(shlex.split(flags))) for label, flags in arguments.hopon]
    if not own and not arguments.no_hopon:
        own = [Hopon("hopon", arguments.model, ())]
    others = [Running(label, url.rstrip("/")).look_up() for label, url in arguments.server]
    runs: list[Run] = []
    starts: dict[str, list[float]] = {}
    memory: dict[str, Memory] = {}
    facts: dict[str, str] = {}

    def note_start(server: Server) -> None:
        if server.seconds_to_ready is not None:
            starts.setdefault(server.label, []).append(server.seconds_to_ready)
            facts[server.label] = server.introduction()

    drawn = [workload(name, codec) for name in arguments.workloads]
    plain = [work for work in drawn if not work.reuses_prefixes]
    if plain:
        with ExitStack() as stack:
            servers = [stack.enter_context(hopon.start(prefix_caching=False)) for hopon in own] + others
            for server in servers:
                _warm_up(server, codec)
                note_start(server)
            for work in plain:
                for _ in range(arguments.runs):
                    runs += [_run(work, server, servers) for server in servers]
                if work.name == "W1":
                    memory |= {server.label: found for server in servers if (found := server.memory()) is not None}
    for work in (work for work in drawn if work.reuses_prefixes):
        for _ in range(arguments.runs):
            for hopon in own:
                with hopon.start(prefix_caching=True) as server:
                    _warm_up(server, codec)
                    note_start(server)
                    runs.append(_run(work, server, [server, *others]))
            runs += [_run(work, server, [server, *others]) for server in others]

    report = _report(arguments, own, runs, starts, memory)
    Console().print(Markdown(report)) if sys.stdout.isatty() else print(report)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "machine": machine(),
        "runs": [asdict(run) for run in runs],
        "seconds_to_ready": starts,
        "memory_after_w1": {label: asdict(found) for label, found in memory.items()},
        "introductions": facts,
    }
    arguments.output.write_text(json.dumps(content, indent=1) + "\n")
    _console.print(f"all runs: {arguments.output}")
    return 1 if any(run.void for run in runs) else 0


def _arguments() -> argparse.Namespace:
    def pair(text: str) -> tuple[str, str]:
        label, equals, rest = text.partition("=")
        if not equals or not label:
            raise argparse.ArgumentTypeError(f"expected LABEL=..., got {text!r}")
        return label, rest

    def names(text: str) -> list[str]:
        wanted = text.split(",")
        if unknown := sorted(set(wanted) - set(NAMES)):
            raise argparse.ArgumentTypeError(f"no workload {unknown[0]}; there are {', '.join(NAMES)}")
        return wanted

    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--workloads", type=names, default=list(NAMES), help="for example W1,W4 (default: all)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each workload and server (default: 3)")
    parser.add_argument("--model", default="smollm2-135m", help="what hopon serves (default: smollm2-135m)")
    parser.add_argument(
        "--hopon", type=pair, action="append", default=[], metavar="LABEL=FLAGS", help="a hopon with these serve flags"
    )
    parser.add_argument("--no-hopon", action="store_true", help="start no hopon of our own")
    parser.add_argument(
        "--server", type=pair, action="append", default=[], metavar="LABEL=URL", help="a server that runs already"
    )
    parser.add_argument("--output", type=Path, default=Path("build/bench.json"), help="default: build/bench.json")
    return parser.parse_args()


def _warm_up(server: Server, codec: Codec) -> None:
    """One prompt that belongs to no other workload, so that first-time costs are paid and no prefix is known."""
    single = workload("W2", codec)
    assert isinstance(single, Crowd), "W2 is a list of requests"
    played = asyncio.run(play(Crowd(name="warm-up", asks=single.asks[:1], concurrency=1), server.url, server.model))
    if played.records[0].error:
        raise TargetError(f"{server.label}: {played.records[0].error} {played.records[0].message}")


def _run(work: Workload, server: Server, all_servers: list[Server]) -> Run:
    """One run. Idle servers beside the one under test are foreign: what they burn is taken from it."""
    wait_until_idle()
    foreign = ForeignCpu([server.pid]) if server.pid is not None else None
    played = asyncio.run(play(work, server.url, server.model))
    run = summarise(work, server.label, played, foreign.share() if foreign else None)
    verdict = f"VOID: {run.void}" if run.void else f"{run.output_per_second:.1f} output tok/s"
    _console.print(f"{work.name} {server.label}: {verdict}", markup=False, highlight=False)
    return run


def _report(
    arguments: argparse.Namespace,
    own: list[Hopon],
    runs: list[Run],
    starts: dict[str, list[float]],
    memory: dict[str, Memory],
) -> str:
    """The table in markdown, with everything needed to repeat it."""
    lines = [
        f"`{shlex.join(['python', '-m', 'benchmarks', *sys.argv[1:]])}`",
        "",
        f"Machine: {machine()}. Medians of {arguments.runs} runs.",
        "",
    ]
    for hopon in own:
        label = hopon.label
        line = f"- {label}: `{hopon.shown(prefix_caching=False)}` (W4 with the prefix cache)"
        if label in starts:
            line += f"; ready after {sorted(starts[label])[len(starts[label]) // 2]:.2f} s"
        if label in memory:
            found = memory[label]
            line += f"; memory after W1 {_mib(found.total)} MiB = packed weights {_mib(found.weights)} + touched KV "
            line += f"{_mib(found.kv)} + rest {_mib(found.rest)}"
        lines.append(line)
    lines += [
        "",
        "| workload | server | output tok/s | prompt tok/s | TTFT p50 / p95 ms | ITL p50 / p95 / p99 / max ms "
        "| cached tokens | others' CPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.workload, run.server), []).append(run)
    notes: list[str] = []
    for (name, label), group in groups.items():
        middle = median(group)
        void = [run.void for run in group if run.void]
        mark = "" if not void else " VOID" if middle.void else " *"
        if void:
            notes.append(f"- {name} {label}: {len(void)} of {len(group)} runs are void: {void[0]}")
        if middle.foreign_share is not None and middle.foreign_share > FOREIGN_LIMIT:
            notes.append(f"- {name} {label}: other processes used {middle.foreign_share:.0%} of the machine")
        lines.append(
            f"| {name} | {label}{mark} | {middle.output_per_second:.1f} | {middle.prompt_per_second:.0f} "
            f"| {_ms(middle.ttft_p50)} / {_ms(middle.ttft_p95)} "
            f"| {_ms(middle.itl_p50)} / {_ms(middle.itl_p95)} / {_ms(middle.itl_p99)} / {_ms(middle.itl_max)} "
            f"| {middle.cached_tokens:.0f} | {_share(middle.foreign_share)} |"
        )
    explained = "In W5, TTFT is that of the long prompts; ITL and output tokens are those of the streams."
    return "\n".join([*lines, "", explained, *notes])


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TargetError as error:
        sys.exit(f"bench: {error}")
