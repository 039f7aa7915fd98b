"""CPU time of the API process per streamed token: ``python -m benchmarks.streaming_cost``.

So many streams at once on the fake model of the tests, whose steps take a fixed time; the engine's and the client's own
CPU time do not count. Told is user plus system time of the API process, divided by the tokens that the clients got, for
plain text and for text with log-probabilities and stop strings.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping

import psutil

from benchmarks.overload import Client, fake_server

KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "2 logprobs, 2 stop strings": {"logprobs": 2, "stop": ["a text that never comes", "\n\n\n\n"]},
}
"""What is asked for beside text."""


async def measure(
    host: str, port: int, pid: int, num_streams: int, max_tokens: int, fields: Mapping[str, object]
) -> tuple[float, int]:
    """CPU seconds of the process, and tokens, after a warm-up."""
    client = Client(host, port, max_tokens, **fields)
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
        for kind, fields in KINDS.items():
            seconds, num_tokens = asyncio.run(measure(host, port, pid, args.streams, args.max_tokens, fields))
            cost = seconds / num_tokens * 1e6
            print(f"{args.streams} streams, {kind}: {cost:.1f} us of CPU per token ({num_tokens} tokens)")


if __name__ == "__main__":
    main()
