"""CPU time of the API process per streamed token: ``python -m benchmarks.streaming_cost``.

So many streams at once on the fake model of the tests, whose steps take a fixed time; the engine's and the client's own
CPU time do not count. Told is user plus system time of the API process, divided by the tokens that the clients got.
"""

from __future__ import annotations

import argparse
import asyncio

import psutil

from benchmarks.overload import Client, fake_server


async def measure(host: str, port: int, pid: int, num_streams: int, max_tokens: int) -> tuple[float, int]:
    """CPU seconds of the process, and tokens, after a warm-up."""
    client = Client(host, port, max_tokens)
    process = psutil.Process(pid)
    await asyncio.gather(*(client.send() for _ in range(num_streams)))
    before = process.cpu_times()
    answers = await asyncio.gather(*(client.send() for _ in range(num_streams)))
    after = process.cpu_times()
    assert {answer.status for answer in answers} == {200}, "every stream must be served"
    return after.user + after.system - before.user - before.system, sum(answer.num_tokens for answer in answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=400)
    args = parser.parse_args()
    with fake_server(seats=args.streams, queue=args.streams) as (host, port, pid):
        seconds, num_tokens = asyncio.run(measure(host, port, pid, args.streams, args.max_tokens))
    print(f"{args.streams} streams: {seconds / num_tokens * 1e6:.1f} us of CPU per token ({num_tokens} tokens)")


if __name__ == "__main__":
    main()
