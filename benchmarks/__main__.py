"""``python -m benchmarks``: W1-W5 against hopon and, if told, against other servers, in alternation.

Every figure is the median of the runs that count. The prefix cache of hopon's own servers is off, except for W4, where
every run gets a fresh server so that no run knows an earlier one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from benchmarks.client import play
from benchmarks.measure import ForeignCpu, Run, summarise, wait_until_idle
from benchmarks.peaks import peaks
from benchmarks.quality import TOKENS, Cost, compare, first_tokens, score
from benchmarks.report import Found, report
from benchmarks.servers import Hopon, Running, Server
from benchmarks.workloads import NAMES, Codec, Crowd, Workload, workload
from hopon.bench.target import TargetError
from hopon.catalogue import resolve
from hopon.cli.environment import cache_root
from hopon.model.source import open_source
from hopon.native.build import BuildError
from hopon.serve.tokenizer import Tokenizer

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
    wait_until_idle()
    found = Found(
        command=shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        own=own,
        repeats=arguments.runs,
        config=open_source(str(resolve(arguments.model, cache_root()))).config,
        peaks=_peaks(),
    )

    drawn = [workload(name, codec) for name in arguments.workloads]
    plain = [work for work in drawn if not work.reuses_prefixes]
    if plain:
        with ExitStack() as stack:
            servers = [stack.enter_context(hopon.start(prefix_caching=False)) for hopon in own] + others
            for server in servers:
                _warm_up(server, codec)
                found.note_start(server)
            for work in plain:
                for _ in range(arguments.runs):
                    for server in servers:
                        found.add(_run(work, server, servers))
                if work.name == "W1":
                    found.memory |= {server.label: taken for server in servers if (taken := server.memory())}
    for work in (work for work in drawn if work.reuses_prefixes):
        for _ in range(arguments.runs):
            for hopon in own:
                with hopon.start(prefix_caching=True) as server:
                    _warm_up(server, codec)
                    found.note_start(server)
                    found.add(_run(work, server, [server, *others]))
            for server in others:
                found.add(_run(work, server, [server, *others]))
    if arguments.quality:
        found.quality |= _quality(own)

    text = report(found)
    Console().print(Markdown(text)) if sys.stdout.isatty() else print(text)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(found.content(), indent=1) + "\n")
    _console.print(f"all runs: {arguments.output}")
    return 1 if any(run.void for run in found.runs) else 0


def _peaks() -> Mapping[str, float]:
    """Of this machine; none where the probe does not compile or run, which is said."""
    try:
        return peaks()
    except (BuildError, subprocess.CalledProcessError) as error:
        _console.print(f"the machine's peaks are not known, nor fractions of them: {error}", markup=False)
        return {}


def _quality(own: Sequence[Hopon]) -> dict[str, dict[str, Cost]]:
    """By label and text, what the precision of each hopon's flags costs against f32 on the same weights."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--level")
    found: dict[str, dict[str, Cost]] = {}
    for hopon in own:
        model = resolve(hopon.model, cache_root())
        samples = first_tokens(model, TOKENS)
        precision, _ = parser.parse_known_args(hopon.flags)
        exact = score(model, list(samples.values()), dtype="f32", level=precision.level)
        other = score(model, list(samples.values()), **vars(precision))
        found[hopon.label] = {name: compare(*pair) for name, *pair in zip(samples, exact, other, strict=True)}
        _console.print(f"quality {hopon.label}: {found[hopon.label]}", markup=False, highlight=False)
    return found


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
    parser.add_argument(
        "--quality", action="store_true", help="also what each hopon's precision costs, beside its speed"
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


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TargetError as error:
        sys.exit(f"bench: {error}")
