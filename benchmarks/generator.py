"""``python -m benchmarks.generator``: how fast the load generator is, on one core, against a server that costs little.

The server is a process of its own that answers every request with a prepared stream, one piece after another at a fixed
gap. The generator sends at a rate and says what it cost: processor time, late sends, lag of its event loop. With
``--aiohttp`` the same schedule is also played by a plain aiohttp client that reads lines and decodes JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time

from hopon.bench.play import play
from hopon.bench.schedule import Writer, from_workload
from hopon.bench.summary import summarise
from hopon.bench.target import Target
from hopon.sim.report import number
from hopon.workload.ask import Workload
from hopon.workload.draw import draw
from hopon.workload.lengths import Uniform

PIECE = b'data: {"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, "text": " word"}]}\n\n'
END = b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}\n\n'


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pieces: int, gap: float) -> None:
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            size = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(size)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(pieces):
                await asyncio.sleep(gap)
                writer.write(b"%x\r\n%s\r\n" % (len(PIECE), PIECE))
            usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": pieces}}
            last = END + b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n"
            writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(last), last))
    except (asyncio.IncompleteReadError, ConnectionError, StopIteration):
        writer.close()


async def _serve(pieces: int, gap: float) -> None:
    server = await asyncio.start_server(lambda r, w: _answer(r, w, pieces, gap), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _play_aiohttp(url: str, work: Workload) -> tuple[float, float]:
    """Processor and wall seconds of the same load with aiohttp."""
    import aiohttp

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(body: dict[str, object]) -> None:
            async with session.post(f"{url}/v1/completions", json=body) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        json.loads(line[6:])

        cpu, begun = time.process_time(), time.perf_counter()
        tasks = []
        for one in work:
            await asyncio.sleep(max(0.0, begun + one.arrival - time.perf_counter()))
            tasks.append(asyncio.create_task(ask({"prompt": list(one.prompt(1000)), "max_tokens": one.max_tokens})))
        await asyncio.gather(*tasks)
        return time.process_time() - cpu, time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--pieces", type=int, default=20, help="of each answer")
    parser.add_argument("--gap", type=float, default=0.02, help="seconds between them")
    parser.add_argument("--aiohttp", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        asyncio.run(_serve(asked.pieces, asked.gap))
        return
    command = [sys.executable, "-m", "benchmarks.generator", "--serve"]
    command += ["--pieces", str(asked.pieces), "--gap", str(asked.gap)]
    cores = sorted(os.sched_getaffinity(0))
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None, "a pipe was asked for"
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        os.sched_setaffinity(server.pid, {cores[0]})
        os.sched_setaffinity(0, {cores[-1]})
        tokens = Uniform(asked.pieces, asked.pieces)
        count = round(asked.rate * asked.seconds)
        work = draw(count=count, rate=asked.rate, inputs=Uniform(100, 100), outputs=tokens)
        records = asyncio.run(play(Target(url=url, model="m"), from_workload(work, Writer())))
        summary = summarise(records)
        late, lag = summary.send_delay, summary.lag
        print(
            f"hopon bench: {number(summary.sent_rate, 1)} of {number(summary.offered_rate, 1)} requests/s sent, "
            f"{sum(summary.errors.values())} failed, {summary.peak_open} open at once\n"
            f"  processor time: {records.cpu_seconds:.2f} s of {records.seconds:.1f} s, "
            f"{1e6 * records.cpu_seconds / summary.pieces:.0f} us for each of {summary.pieces:,} pieces\n"
            f"  sent late by p50 {1000 * (late.p50 or 0):.2f} ms, p99 {1000 * (late.p99 or 0):.2f} ms; "
            f"event loop late by p99 {1000 * (lag.p99 or 0):.2f} ms\n"
            f"  warnings: {'; '.join(summary.warnings) or 'none'}"
        )
        if asked.aiohttp:
            cpu, wall = asyncio.run(_play_aiohttp(url, work))
            print(f"aiohttp: processor time {cpu:.2f} s of {wall:.1f} s")
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
