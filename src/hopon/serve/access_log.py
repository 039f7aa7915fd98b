"""One line per request: who asked for what, how much it was, how long it took, how it ended. Never what was said."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import IO, Literal

LogFormat = Literal["none", "text", "json"]

LONGEST_PATH = 200


@dataclass(kw_only=True, slots=True)
class Facts:
    """What becomes known of a request on its way. Times are in seconds, None where there was no such moment.

    Args:
        status: HTTP status; 499 where the client left before there was one.
        id: of the answer.
        key: name of the API key, not the key.
        num_outputs: outputs asked for.
        prompt_tokens, cached_tokens, output_tokens: counts.
        queued: from arrival to the first seat.
        first_token: from arrival to the first token.
        finish: how the outputs ended.
        error: what the client was told, or the name under which a failure is logged.
    """

    status: int | None = None
    id: str | None = None
    key: str | None = None
    num_outputs: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    queued: float | None = None
    first_token: float | None = None
    finish: str | None = None
    error: str | None = None


class AccessLog:
    """Writes lines to stderr, or wherever it is told.

    Args:
        form: "text" is ``name=value`` words, "json" one object a line, "none" nothing.
        stream: where to; None is stderr.
    """

    def __init__(self, form: LogFormat, stream: IO[str] | None = None) -> None:
        self._form = form
        self._stream = stream

    def write(self, method: str, path: str, seconds: float, facts: Facts) -> None:
        """Tell of a request that has ended. Facts that are not known are left out."""
        if self._form == "none":
            return
        entry: dict[str, str | int | float] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "method": method,
            "path": path[:LONGEST_PATH],
            "seconds": round(seconds, 6),
        }
        for field in fields(facts):
            value = getattr(facts, field.name)
            if value is not None:
                entry[field.name] = round(value, 6) if isinstance(value, float) else value
        print(self._line(entry), file=self._stream or sys.stderr, flush=True)

    def _line(self, entry: dict[str, str | int | float]) -> str:
        if self._form == "json":
            return json.dumps(entry)
        # Words with spaces, quotes or control characters are quoted as JSON, so that a line stays one line.
        plain = (str(value) for value in entry.values())
        words = (text if text.isalnum() or _is_plain(text) else json.dumps(text) for text in plain)
        return "request " + " ".join(f"{name}={word}" for name, word in zip(entry, words, strict=True))


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and not set(text) & set(' "\\=')
