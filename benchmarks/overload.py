"""A server under ten times the load it can carry: ``python -m benchmarks.overload``.

First it is measured what the server carries when its seats are always full. Then ten times as many requests per second
are sent for a while (open loop: nobody waits for an answer), then a single request. Told are: how quickly those that
are turned away get their answer and when they are to come back, what becomes of those that are let in, the output per
second beside the best, the memory of the API process before and after, and whether the single request is served.

The model is the fake one of the tests, with steps of a fixed length, so that what is measured is the server and not
the machine's arithmetic; ``--url`` measures a running server instead. The client is a process of its own beside the
server's two; on two cores they share, so that latencies here are upper bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.measure import percentile

SEATS = 16
TOKENS = 32
STEP_SECONDS = 0.02


@dataclass(kw_only=True, slots=True)
class Answer:
    """What one request got; seconds."""

    status: int
    seconds: float
    first: float | None = None
    num_tokens: int = 0
    retry_after: int | None = None


@dataclass(kw_only=True, slots=True)
class Phase:
    """The answers of a phase, how long it took to send the requests, and how long until all had an answer."""

    seconds: float
    until_done: float
    answers: list[Answer] = field(default_factory=list)

    def of(self, status: int) -> list[Answer]:
        return [answer for answer in self.answers if answer.status == status]

    @property
    def output_per_second(self) -> float:
        return sum(answer.num_tokens for answer in self.of(200)) / self.until_done


class Client:
    """Sends streamed completions over connections of its own, with as little work per request as possible."""

    def __init__(self, host: str, port: int, max_tokens: int, **fields: object) -> None:
        self._address = host, port
        body = {"prompt": [100] * 8, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}  # a busy server sends several tokens at once
        content = json.dumps(body | fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        head += "connection: close\r\n"
        self._request = f"{head}content-length: {len(content)}\r\n\r\n".encode() + content

    async def send(self) -> Answer:
        """One request; a connection that fails has status 0."""
        begun = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection(*self._address)
        except OSError:
            return Answer(status=0, seconds=time.perf_counter() - begun)
        try:
            writer.write(self._request)
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            first = time.perf_counter() - begun
            status = int(head.split(" ", 2)[1])
            usage = re.search(rb'"completion_tokens": ?(\d+)', await reader.read())
            retry_after = next(
                (int(line.partition(":")[2]) for line in head.splitlines() if line.startswith("retry-after")), None
            )
            return Answer(
                status=status,
                seconds=time.perf_counter() - begun,
                first=first,
                num_tokens=int(usage[1]) if usage else 0,
                retry_after=retry_after,
            )
        except (OSError, asyncio.IncompleteReadError):
            return Answer(status=0, seconds=time.perf_counter() - begun)
        finally:
            writer.close()

    async def closed_loop(self, num_clients: int, seconds: float) -> Phase:
        """So many clients that send the next request when they have their answer."""
        phase = Phase(seconds=seconds, until_done=seconds)
        end = time.perf_counter() + seconds

        async def client() -> None:
            while time.perf_counter() < end:
                phase.answers.append(await self.send())

        begun = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(num_clients)))
        phase.seconds = phase.until_done = time.perf_counter() - begun
        return phase

    async def open_loop(self, rate: float, seconds: float) -> Phase:
        """So many requests per second, whatever becomes of them; then waits for all answers."""
        begun = time.perf_counter()
        tasks: list[asyncio.Task[Answer]] = []
        count = int(rate * seconds)
        for i in range(count):
            pause = begun + i / rate - time.perf_counter()
            if pause > 0:
                await asyncio.sleep(pause)
            tasks.append(asyncio.create_task(self.send()))
        sent = time.perf_counter() - begun
        answers = await asyncio.gather(*tasks)
        return Phase(seconds=sent, until_done=time.perf_counter() - begun, answers=list(answers))


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Figures of one run; times in seconds, memory in bytes."""

    best: Phase
    overload: Phase
    after: Answer
    memory_before: int
    memory_after: int

    def lines(self) -> Iterator[str]:
        """For people."""
        best, over = self.best, self.overload
        served, refused = over.of(200), over.of(429)
        good = best.of(200)
        rate = len(over.answers) / over.seconds
        statuses = dict(Counter(answer.status for answer in over.answers))
        yield f"sustainable: {len(good) / best.seconds:.1f} requests/s, {best.output_per_second:.0f} tokens/s"
        yield f"overload: {rate:.0f} requests/s for {over.seconds:.0f} s; statuses: {statuses}"
        share = over.output_per_second / best.output_per_second
        yield f"output under overload: {over.output_per_second:.0f} tokens/s, {share:.0%} of the best"
        yield _row("refusals answered in", [answer.seconds for answer in refused], 1e3, "ms")
        yield _row("told to come back in", [float(answer.retry_after or 0) for answer in refused], 1, "s")
        yield _row("sustained: first token", [a.first for a in good if a.first is not None], 1e3, "ms")
        yield _row("accepted: first token", [a.first for a in served if a.first is not None], 1e3, "ms")
        yield _row("sustained: per token", _per_token(good), 1e3, "ms")
        yield _row("accepted: per token", _per_token(served), 1e3, "ms")
        yield f"memory of the API process: {self.memory_before >> 20} MiB before, {self.memory_after >> 20} MiB after"
        yield f"a request afterwards: status {self.after.status}, first token in {(self.after.first or 0) * 1e3:.0f} ms"


def _per_token(answers: list[Answer]) -> list[float]:
    return [
        (answer.seconds - answer.first) / (answer.num_tokens - 1)
        for answer in answers
        if answer.first is not None and answer.num_tokens > 1
    ]


def _row(name: str, values: list[float], scale: float, unit: str) -> str:
    p50, p99 = (percentile(values, share) for share in (0.5, 0.99))
    return f"{name}: p50 {(p50 or 0) * scale:.1f} {unit}, p99 {(p99 or 0) * scale:.1f} {unit} (n={len(values)})"


async def run(
    host: str, port: int, pid: int | None, *, seats: int, seconds: float, factor: float, max_tokens: int
) -> Outcome:
    """Measure what is sustainable, then overload, then look whether all is well."""
    client = Client(host, port, max_tokens)
    await client.closed_loop(seats, min(2.0, seconds))
    best = await client.closed_loop(seats, max(2.0, seconds / 4))
    before = _memory(pid)
    rate = factor * len(best.of(200)) / best.seconds
    overload = await client.open_loop(rate, seconds)
    after = await client.send()
    return Outcome(
        best=best,
        overload=overload,
        after=after,
        memory_before=before,
        memory_after=_memory(pid),
    )


def _memory(pid: int | None) -> int:
    return 0 if pid is None else int(psutil.Process(pid).memory_info().rss)


@contextmanager
def fake_server(*, seats: int, queue: int) -> Iterator[tuple[str, int, int]]:
    """Host, port and process id of a server on the tests' fake model."""
    from tests.serve.conftest import write_model

    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "fake", fake={"step_time": STEP_SECONDS})
        # The KV cache has room for all seats at their longest.
        engine = {"max_num_seqs": seats, "enable_prefix_caching": False, "num_kv_blocks": seats * 64}
        options = {"engine": engine, "max_queued_requests": queue}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve.serve_fake", str(model), json.dumps(options)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            url = next(found["url"] for line in process.stdout if "url" in (found := json.loads(line)))
            host, _, port = url.removeprefix("http://").rpartition(":")
            yield host, int(port), process.pid
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the overload")
    parser.add_argument("--factor", type=float, default=10.0, help="times the sustainable rate")
    parser.add_argument("--url", help="of a running server; default: one on the fake model")
    parser.add_argument("--seats", type=int, default=SEATS)
    parser.add_argument("--queue", type=int, default=SEATS, help="max_queued_requests of the fake server")
    parser.add_argument("--max-tokens", type=int, default=TOKENS)
    args = parser.parse_args()
    sizes = {"seats": args.seats, "seconds": args.seconds, "factor": args.factor, "max_tokens": args.max_tokens}
    if args.url:
        host, _, port = args.url.removeprefix("http://").rstrip("/").rpartition(":")
        outcome = asyncio.run(run(host, int(port), None, **sizes))
    else:
        with fake_server(seats=args.seats, queue=args.queue) as (host, port, pid):
            outcome = asyncio.run(run(host, port, pid, **sizes))
    print("\n".join(outcome.lines()))


if __name__ == "__main__":
    main()
