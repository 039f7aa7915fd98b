"""The trade-offs of docs/tuning.md, measured on this machine: ``python -m benchmarks.tradeoffs --output FILE``.

Four tables, a dozen minutes on an idle machine with two cores:

1. *budget*: the token budget of a step, on two mixes at fixed rates: gaps, first tokens, throughput, goodput.
2. *goodput*: more seats under overload: tokens/s rise, requests that are served as promised do not.
3. *one request*: its time from end to end alone, half and fully loaded, beside the throughput of all.
4. *queue*: low load gains nothing from batching; overload makes the queue grow by arrivals minus service.

Every window is written when it is measured; the same command goes on where an interrupted one ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.plot import chart, write
from hopon.bench.schedule import Writer
from hopon.bench.server import serve
from hopon.bench.target import Target
from hopon.capacity.knobs import Candidate
from hopon.capacity.load import Load, parse_kinds
from hopon.capacity.promise import parse_promise
from hopon.capacity.search import Window
from hopon.capacity.trials import Measure, Trials
from hopon.capacity.tune import goodput
from hopon.capacity.tune_command import Engines, Site
from hopon.sim.report import table

MIXES = {
    "chat": Load(kinds=parse_kinds("random", ("chat 1 20-100 exp:40:120",), "1", "1")),
    "documents": Load(kinds=parse_kinds("random", ("chat 9 20-100 exp:40:120", "document 1 600-1000 10-30"), "1", "1")),
}
PROMISE = "ttft<1s tpot<60ms"
GAPS = "tpot<30ms"
SEEDS = (1, 2)


class Bench:
    """Measures windows, or remembers them."""

    def __init__(self, model: str, path: Path, seconds: float, runner: asyncio.Runner) -> None:
        self._model, self._seconds = model, seconds
        self._trials = Trials({"model": model, "seconds": seconds}, path, resume=path.exists())
        self._engines = Engines(serve=self._serve, writer=Writer(lowest=100, vocab_size=10_000), runner=runner)

    @contextmanager
    def _serve(self, candidate: Candidate) -> Iterator[Target]:
        with serve(self._model, candidate.flags) as started:
            yield Target(url=started.url)

    def windows(self, title: str, mix: str, candidate: Candidate, rate: float, promise: str = PROMISE) -> list[Window]:
        """One for each seed."""
        site = Site(load=MIXES[mix], promise=parse_promise(promise), cost="", model="", hardware="")
        measure: Measure = self._engines.measure(site)
        print(f"{title}: {mix}, {candidate}, {rate:.3g}/s", flush=True)
        return [self._trials.window(f"{title} {mix}", measure, candidate, rate, s, self._seconds) for s in SEEDS]

    def capacity(self, mix: str) -> float:
        """Requests per second that a server without flags answers when far more than it can are offered."""
        windows = self.windows("crowd", mix, Candidate(), CROWD[mix])
        return float(median(window.figures["answered_per_second"] for window in windows))


CROWD = {"chat": 60.0, "documents": 30.0}
"""Requests per second that no two cores serve with a model of 135 M parameters."""


def _cells(windows: Sequence[Window]) -> list[str]:
    def figure(name: str, factor: float = 1e3) -> str:
        values = [value for w in windows if (value := w.figures.get(name)) is not None]
        return f"{factor * median(values):.0f}" if values else "-"

    spread = [goodput(window) for window in windows]
    return [
        *(figure(name) for name in ("ttft_p50", "ttft_p95", "itl_p50", "itl_p95", "itl_p99", "e2e_p50")),
        figure("output_tokens_per_second", 1.0),
        f"{median(spread):.2f} ({min(spread):.2f}-{max(spread):.2f})",
        figure("running", 1.0),
        figure("waiting", 1.0),
    ]


HEAD = ["TTFT p50", "TTFT p95", "ITL p50", "ITL p95", "ITL p99", "E2E p50 ms"]
HEAD += ["tokens/s", "goodput/s", "running", "waiting"]


def budget(bench: Bench) -> str:
    """ITL against TTFT: small budgets keep gaps short, large ones let prompts through."""
    rows = []
    for mix in MIXES:
        rate = round(0.8 * bench.capacity(mix), 1)
        for tokens in (64, 128, 256, 512, 1024):
            windows = bench.windows("budget", mix, Candidate.of({"max_num_batched_tokens": tokens}), rate)
            rows.append([mix, f"{rate:g}", str(tokens), *_cells(windows)])
    return table(["mix", "requests/s", "budget", *HEAD], rows)


def _by_seats(bench: Bench) -> tuple[float, dict[int, list[Window]]]:
    rate = round(1.3 * bench.capacity("chat"), 1)
    counts = (4, 8, 16, 32, 64)
    return rate, {n: bench.windows("seats", "chat", Candidate.of({"max_num_seqs": n}), rate, GAPS) for n in counts}


def seats(bench: Bench) -> str:
    """More seats under overload: larger batches make more tokens and longer gaps."""
    rate, found = _by_seats(bench)
    rows = [[f"{rate:g}", str(count), *_cells(windows)] for count, windows in found.items()]
    return table(["requests/s", "seats", *HEAD], rows)


def seats_plot(bench: Bench) -> str:
    """The same as a picture: what is made and what is made in time."""
    _, found = _by_seats(bench)
    made = {n: median(w.figures["output_tokens_per_second"] for w in windows) for n, windows in found.items()}
    kept = {n: median(goodput(w) for w in windows) for n, windows in found.items()}
    lines = {
        name: [(float(n), 100 * value / max(values.values())) for n, value in values.items()]
        for name, values in (("tokens/s", made), ("goodput", kept))
    }
    return chart("More seats under overload", "seats (--max-num-seqs)", "percent of the most", lines)


def one_request(bench: Bench) -> str:
    """What a user waits for an answer while the machine is empty, half full and full; what the machine makes."""
    full = bench.capacity("chat")
    rows = []
    for name, share in (("alone", 0.03), ("a tenth", 0.1), ("half", 0.5), ("full", 0.95), ("overloaded", 1.3)):
        rate = round(share * full, 2)
        rows.append([name, f"{rate:g}", *_cells(bench.windows("load", "chat", Candidate(), rate))])
    return table(["load", "requests/s", *HEAD], rows)


def queue(bench: Bench) -> str:
    """Rows that one can take batching away from: one seat against many, at little load; and the backlog of overload."""
    full = bench.capacity("chat")
    rows = []
    for name, count, share in (("little load", 1, 0.03), ("little load", 64, 0.03), ("overload", 64, 1.5)):
        rate = round(share * full, 2)
        windows = bench.windows("queue", "chat", Candidate.of({"max_num_seqs": count}), rate)
        growth = median(w.figures["backlog_growth"] / (0.75 * w.seconds) for w in windows)
        expected = max(0.0, rate - median(window.figures["answered_per_second"] for window in windows))
        rows.append([name, f"{rate:g}", str(count), *_cells(windows), f"{growth:.2f}", f"{expected:.2f}"])
    return table(["load", "requests/s", "seats", *HEAD, "backlog grows/s", "arrivals - service/s"], rows)


TABLES: dict[str, Callable[[Bench], str]] = {
    "budget": budget,
    "goodput": seats,
    "one request": one_request,
    "queue": queue,
}


def main() -> None:
    """Measure what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--output", type=Path, required=True, help="JSON of all windows; goes on with what it has")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a window")
    parser.add_argument("--tables", default=",".join(TABLES), help="which, of: " + ", ".join(TABLES))
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="also a picture of the goodput table")
    arguments = parser.parse_args()
    wanted = arguments.tables.split(",")
    if unknown := [name for name in wanted if name not in TABLES]:
        parser.error(f"unknown table {unknown[0]!r}; known: {', '.join(TABLES)}")
    texts = []
    with asyncio.Runner() as runner:
        bench = Bench(arguments.model, arguments.output, arguments.seconds, runner)
        for name in wanted:
            texts.append(f"{name}\n{TABLES[name](bench)}")
        if arguments.plots is not None:
            write(arguments.plots, "goodput-by-seats", seats_plot(bench))
    print("\n\n".join(texts))
    print(f"\n{len(json.loads(arguments.output.read_text())['windows'])} windows in {arguments.output}")


if __name__ == "__main__":
    main()
