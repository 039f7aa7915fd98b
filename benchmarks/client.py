"""An HTTP client that plays a workload to an OpenAI-compatible server and notes when each piece of an answer came.

It knows nothing of which server it is. Tokens are counted by the server's ``usage``; text is never tokenized again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.workloads import Ask, Crowd, Interference, Workload


@dataclass(kw_only=True, slots=True)
class Record:
    """What became of one request. Times are seconds on ``time.perf_counter``.

    Args:
        sent: when it was sent.
        pieces: when each piece of text came; one token per piece for a server that does not merge tokens.
        num_prompt: prompt tokens by the server's count.
        num_output: output tokens by the server's count; 0 if it failed.
        num_cached: prompt tokens that came from a prefix cache; None when the server does not say.
        error: what went wrong, or empty.
        is_arrival: it is one of the long prompts of an :class:`Interference`.
    """

    sent: float
    pieces: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_output: int = 0
    num_cached: int | None = None
    error: str = ""
    is_arrival: bool = False

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first piece of text."""
        return self.pieces[0] - self.sent if self.pieces else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive pieces."""
        return [later - earlier for earlier, later in zip(self.pieces, self.pieces[1:], strict=False)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """A workload's records and how long it took, in seconds."""

    records: tuple[Record, ...]
    started: float
    seconds: float


async def play(workload: Workload, base_url: str, model: str) -> Played:
    """Send a workload's requests to ``base_url``/v1/completions and wait for all answers."""
    # No limit of its own on connections, and none is reused: what waits, waits in the server.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=1200)) as session:
        started = time.perf_counter()
        match workload:
            case Crowd():
                records = await _play_crowd(workload, session, base_url, model)
            case Interference():
                records = await _play_interference(workload, session, base_url, model)
        return Played(records=tuple(records), started=started, seconds=time.perf_counter() - started)


async def _play_crowd(crowd: Crowd, session: aiohttp.ClientSession, base_url: str, model: str) -> list[Record]:
    places = asyncio.Semaphore(crowd.concurrency)

    async def take_a_place(ask: Ask) -> Record:
        async with places:
            return await send(session, base_url, model, ask)

    return await asyncio.gather(*(take_a_place(ask) for ask in crowd.asks))


async def _play_interference(
    plan: Interference, session: aiohttp.ClientSession, base_url: str, model: str
) -> list[Record]:
    records: list[Record] = []
    end = time.perf_counter() + plan.seconds

    async def client(index: int) -> None:
        while time.perf_counter() < end:
            records.append(await send(session, base_url, model, plan.streams[index % len(plan.streams)]))
            index += plan.clients

    async def arrive(index: int) -> None:
        await asyncio.sleep(plan.interval * (index + 1))
        record = await send(session, base_url, model, plan.arrivals[index])
        record.is_arrival = True
        records.append(record)

    await asyncio.gather(*map(client, range(plan.clients)), *map(arrive, range(len(plan.arrivals))))
    return records


async def send(session: aiohttp.ClientSession, base_url: str, model: str, ask: Ask) -> Record:
    """One streamed greedy completion of exactly ``ask.max_tokens`` tokens. A failure is noted in the record."""
    body = {
        "model": model,
        "prompt": ask.text,
        "max_tokens": ask.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    record = Record(sent=time.perf_counter())
    try:
        async with session.post(f"{base_url}/v1/completions", json=body) as response:
            if response.status != 200:
                record.error = f"status {response.status}: {(await response.text())[:200]}"
                return record
            async for data in events(response.content.iter_any()):
                if data != "[DONE]":
                    _note(record, json.loads(data), time.perf_counter())
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"[:200]
    if not record.error and record.num_output != ask.max_tokens:
        record.error = f"asked for {ask.max_tokens} tokens, got {record.num_output}"
    return record


def _note(record: Record, chunk: dict[str, Any], now: float) -> None:
    if chunk.get("error"):
        record.error = str(chunk["error"])[:200]
    if any(choice.get("text") for choice in chunk.get("choices") or ()):
        record.pieces.append(now)
    if usage := chunk.get("usage"):
        record.num_prompt = usage["prompt_tokens"]
        record.num_output = usage["completion_tokens"]
        record.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


async def events(reads: AsyncIterator[bytes] | Iterable[bytes]) -> AsyncIterator[str]:
    """The data of server-sent events, however the network cut or merged them.

    By the WHATWG rules: lines end with LF, CRLF or CR, data lines of one event are joined with LF, an empty line ends
    the event, comments and other fields are of no interest here. Bytes are decoded line by line, so that a cut within
    a character does no harm.
    """
    buffer = b""
    data: list[str] = []
    async for read in _chained(reads):
        buffer += read
        while (cut := _line_end(buffer)) is not None:
            line, buffer = buffer[: cut[0]], buffer[cut[1] :]
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" ").decode())
            elif not line and data:
                yield "\n".join(data)
                data = []


def _line_end(buffer: bytes) -> tuple[int, int] | None:
    """Where the first line ends and the next one starts; None when that is not known yet."""
    ends = [position for position in (buffer.find(b"\n"), buffer.find(b"\r")) if position >= 0]
    if not ends:
        return None
    end = min(ends)
    if buffer[end : end + 1] == b"\n":
        return end, end + 1
    if end + 1 == len(buffer):  # a CR at the very end: an LF may still belong to it
        return None
    return end, end + (2 if buffer[end + 1 : end + 2] == b"\n" else 1)


async def _chained(reads: AsyncIterator[bytes] | Iterable[bytes]) -> AsyncIterator[bytes]:
    if isinstance(reads, AsyncIterator):
        async for read in reads:
            yield read
    else:
        for read in reads:
            yield read
