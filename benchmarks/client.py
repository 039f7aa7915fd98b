"""Plays the fixed workloads to a server with hopon's own load generator, as crowds and as streams with interference.

It knows nothing of which server it is. Tokens are counted by the server's ``usage``; text is never tokenized again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from benchmarks.workloads import Ask, Crowd, Interference, Workload
from hopon.bench.records import Record
from hopon.bench.target import Client, Target

ARRIVAL = "arrival"
"""Kind of the long prompts of an :class:`Interference`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """A workload's records and how long it took, in seconds."""

    records: tuple[Record, ...]
    seconds: float


async def play(workload: Workload, base_url: str, model: str) -> Played:
    """Send a workload's requests to ``base_url``/v1/completions and wait for all answers."""
    player = _Player(Target(url=base_url, model=model, timeout=1200.0))
    match workload:
        case Crowd():
            records = await player.crowd(workload)
        case Interference():
            records = await player.interference(workload)
    return Played(records=tuple(records), seconds=player.close())


class _Player:
    def __init__(self, target: Target) -> None:
        self._loop = asyncio.get_running_loop()
        self._origin = self._loop.time()
        self._client = Client(target, self._origin)

    async def crowd(self, crowd: Crowd) -> list[Record]:
        places = asyncio.Semaphore(crowd.concurrency)

        async def take_a_place(ask: Ask) -> Record:
            async with places:
                return await self.send(ask)

        return await asyncio.gather(*(take_a_place(ask) for ask in crowd.asks))

    async def interference(self, plan: Interference) -> list[Record]:
        records: list[Record] = []
        end = self._loop.time() + plan.seconds

        async def client(index: int) -> None:
            while self._loop.time() < end:
                records.append(await self.send(plan.streams[index % len(plan.streams)]))
                index += plan.clients

        async def arrive(index: int) -> None:
            await asyncio.sleep(plan.interval * (index + 1))
            records.append(await self.send(plan.arrivals[index], ARRIVAL))

        await asyncio.gather(*map(client, range(plan.clients)), *map(arrive, range(len(plan.arrivals))))
        return records

    async def send(self, ask: Ask, kind: str = "") -> Record:
        """One streamed greedy completion of exactly ``ask.max_tokens`` tokens. A failure is noted in the record."""
        request = self._client.request(ask.text, ask.max_tokens, {})
        record = Record(number=0, kind=kind, asked=ask.max_tokens, arrival=self._loop.time() - self._origin)
        await self._client.ask(request, record)
        if not record.error and record.output_tokens != ask.max_tokens:
            record.error = f"asked for {ask.max_tokens} tokens, got {record.output_tokens}"
        return record

    def close(self) -> float:
        """Hang up; seconds since the beginning."""
        self._client.close()
        return self._loop.time() - self._origin
