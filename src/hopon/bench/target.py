"""One server, as a client of its OpenAI-compatible API sees it: how a request is written and its stream is read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hopon.bench.http import BrokenError, Connections, get
from hopon.bench.records import CUT, Record
from hopon.bench.sse import EventReader

Message = Mapping[str, Any]
Prompt = str | tuple[int, ...] | tuple[Message, ...]
"""Text, token ids, or a conversation."""

MAX_CHARS = 200
"""Characters of a server's message that a record keeps."""


UNSTATED = "unstated"
"""The finish reason of a stream that ends properly and gives none."""


class TargetError(ConnectionError):
    """The server cannot be measured; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server and how it is to be asked.

    Args:
        url: without the path of an endpoint; a trailing ``/v1`` is dropped.
        model: the name it wants in requests.
        chat: ask /v1/chat/completions instead of /v1/completions.
        ignore_eos: ask for exactly ``max_tokens`` tokens (an extension that most servers know).
        temperature: 0 is greedy; None leaves it to the server.
        headers: further ones, such as an authorization.
        fields: further fields of every body.
        timeout: seconds until a request is given up.
    """

    url: str
    model: str = ""
    chat: bool = False
    ignore_eos: bool = True
    temperature: float | None = 0.0
    headers: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 600.0

    @property
    def base(self) -> str:
        """The address before ``/v1``."""
        return self.url.rstrip("/").removesuffix("/v1")

    def body(self, prompt: Prompt, max_tokens: int | None, fields: Mapping[str, Any]) -> bytes:
        """A streamed request as JSON; ``fields`` are of this request alone."""
        body: dict[str, Any] = {"model": self.model}
        if self.chat:
            is_text = isinstance(prompt, str)
            body["messages"] = [{"role": "user", "content": prompt}] if is_text else list(prompt)
        else:
            body["prompt"] = prompt
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos:
            body["ignore_eos"] = True
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(body | dict(self.fields) | dict(fields))


class Client:
    """Sends requests to a target from within an event loop.

    Args:
        target: whom.
        origin: the loop's time that records call 0.
    """

    def __init__(self, target: Target, origin: float) -> None:
        self.target = target
        self._origin = origin
        self._connections = Connections(target.base)
        self._path = "/v1/chat/completions" if target.chat else "/v1/completions"

    def request(self, prompt: Prompt, max_tokens: int | None, fields: Mapping[str, Any]) -> bytes:
        """A request's bytes, made before its time has come."""
        body = self.target.body(prompt, max_tokens, fields)
        return self._connections.request("POST", self._path, self.target.headers, body)

    async def ask(self, request: bytes, record: Record, *, keep_text: bool = False) -> str:
        """Send a request and note all that comes of it, failures included; the text of the answer where it is kept.

        A cancelled request is noted as cut.
        """
        answer = _Answer(record, self._origin, keep_text)
        try:
            async with asyncio.timeout(self.target.timeout):
                await self._connections.exchange(request, answer)
            answer.end()
        except TimeoutError:
            answer.fail("timeout", f"no end within {self.target.timeout:g} s")
        except asyncio.CancelledError:
            answer.fail(CUT)
            raise
        except ConnectionRefusedError as error:
            answer.fail("connection refused", str(error))
        except BrokenError as error:
            answer.fail("connection broken", str(error))
        except OSError as error:
            answer.fail("connection failed", str(error))
        return answer.text

    async def get(self, path: str) -> bytes | None:
        """A page; None when it does not answer with 200."""
        return await get(self._connections, path, self.target.headers)

    def close(self) -> None:
        """Hang up."""
        self._connections.close()


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class _Answer:
    """Reads one stream into a record. A role frame, an empty piece and the usage frame are no tokens."""

    __slots__ = ("_body", "_events", "_is_stream", "_keep", "_last", "_origin", "_record", "_status", "_texts")

    def __init__(self, record: Record, origin: float, keep_text: bool) -> None:
        self._record = record
        self._origin = origin
        self._keep = keep_text
        self._events = EventReader()
        self._is_stream = True
        self._status = 0
        self._body = b""
        self._texts: list[str] = []
        self._last = 0.0  # when anything came, or when its end was told

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(self._texts)

    def on_sent(self, now: float) -> None:
        """See Reader."""
        self._record.sent = self._last = now - self._origin

    def on_status(self, status: int, headers: Mapping[str, str]) -> None:
        """See Reader."""
        self._status = status
        self._is_stream = status == 200 and "json" not in headers.get("content-type", "")

    def on_body(self, data: bytes, now: float) -> None:
        """See Reader."""
        self._last = now - self._origin
        if not self._is_stream:
            self._body += data
            return
        for event in self._events.feed(data):
            if event == b"[DONE]":
                self._record.reason = self._record.reason or UNSTATED
            else:
                self._take(event)

    def end(self) -> None:
        """The answer is complete."""
        record = self._record
        if self._status != 200:
            self.fail(f"HTTP {self._status}", self._body.decode(errors="replace"))
            return
        if self._body:  # a server that does not stream
            self._take(self._body)
        if not record.piece_times and record.output_tokens:  # tokens without a text, such as an end token alone
            record.piece_times.append(self._last)
        if record.error:
            record.ended = self._last
        elif not record.piece_times:
            self.fail("empty answer")
        elif record.reason is None:
            self.fail("broken off", "the stream ended with neither a finish reason nor [DONE]")
        else:
            record.ended = self._last

    def fail(self, kind: str, message: str = "") -> None:
        """It failed."""
        self._record.error = kind
        self._record.message = message[:MAX_CHARS]
        self._record.ended = asyncio.get_running_loop().time() - self._origin

    def _take(self, event: bytes) -> None:
        record = self._record
        try:
            chunk = _decode(event)
        except msgspec.DecodeError as error:
            record.error, record.message = "not OpenAI's stream", f"{error}: {event[:80]!r}"
            return
        if chunk.error is not None:
            record.error, record.message = "error in the stream", str(chunk.error)[:MAX_CHARS]
        has_content = False
        for choice in chunk.choices or ():
            delta = choice.delta or choice.message
            text = choice.text or (delta and (delta.content or delta.reasoning or delta.reasoning_content)) or ""
            if choice.token_ids:
                if record.counted_by == "pieces":
                    record.counted_by, record.output_tokens = "token ids", 0
                record.output_tokens += len(choice.token_ids) if record.counted_by == "token ids" else 0
            has_content |= bool(text or choice.token_ids or (delta and delta.tool_calls))
            if self._keep and text:
                self._texts.append(text)
            if choice.finish_reason:
                record.reason = choice.finish_reason
        if has_content:
            record.piece_times.append(self._last)
            if record.counted_by == "pieces":
                record.output_tokens += 1
        if chunk.usage is not None and chunk.usage.completion_tokens is not None:
            record.counted_by, record.output_tokens = "usage", chunk.usage.completion_tokens
            record.input_tokens = chunk.usage.prompt_tokens
            details = chunk.usage.prompt_tokens_details
            record.cached_tokens = (details.cached_tokens if details else 0) or 0


async def served_model(target: Target) -> str:
    """The first model that a server names.

    Raises:
        TargetError: it does not answer.
    """
    page = await _page(target, "/v1/models")
    try:
        return str(msgspec.json.decode(page)["data"][0]["id"])
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise TargetError(f"{target.base}/v1/models names no model: {error}") from error


async def _page(target: Target, path: str) -> bytes:
    connections = Connections(target.base)
    page = await get(connections, path, target.headers)
    connections.close()
    if page is None:
        raise TargetError(f"{target.base}{path} does not answer")
    return page


def is_conversation(prompt: Sequence[Any]) -> bool:
    """A prompt made of messages."""
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
