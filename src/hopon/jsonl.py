"""Batches in files: one prompt a line in, one answer a line out, in the same order.

A line is a JSON string, or an object with ``prompt`` (text or token ids) or ``messages`` (a conversation), and any
sampling field of its own. This module knows file formats; who answers is not its business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hopon.core.types import SamplingParams

if TYPE_CHECKING:
    from hopon.llm import RequestOutput

SHOWN_ERRORS = 5
"""How many bad lines an error names."""

_FIELDS = frozenset(field.name for field in fields(SamplingParams)) - {"prompt_logprobs"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of input: its number from 1, its ``id`` if it has one, and either a prompt or a conversation."""

    number: int
    id: str | int | None
    prompt: str | list[int] | None
    messages: list[Mapping[str, Any]] | None
    params: SamplingParams


def read_lines(path: Path, defaults: SamplingParams) -> list[Line]:
    """All prompts of a file; empty lines are skipped but counted.

    Raises:
        OSError: the file cannot be read.
        ValueError: names the bad lines by number; none of the file is used then.
    """
    lines: list[Line] = []
    errors: list[str] = []
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                lines.append(_line(number, json.loads(raw), defaults))
            except (ValueError, TypeError) as error:  # bad JSON, bad UTF-8, bad fields
                errors.append(f"line {number}: {error}")
    if errors:
        more = f"; and {len(errors) - SHOWN_ERRORS} more" if len(errors) > SHOWN_ERRORS else ""
        raise ValueError(f"{path}: {'; '.join(errors[:SHOWN_ERRORS])}{more}")
    if not lines:
        raise ValueError(f"{path}: no prompts in it")
    return lines


def _line(number: int, value: Any, defaults: SamplingParams) -> Line:
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON string or object, got {type(value).__name__}")
    prompt, messages = value.pop("prompt", None), value.pop("messages", None)
    if (prompt is None) == (messages is None):
        raise ValueError("must have either prompt or messages")
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if prompt is not None and not isinstance(prompt, str) and not is_ids:
        raise ValueError("prompt must be text or a list of token ids")
    is_conversation = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    if messages is not None and not is_conversation:
        raise ValueError("messages must be a list of objects with role and content")
    name = value.pop("id", None)
    unknown = sorted(value.keys() - _FIELDS)
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}; known: id, prompt, messages, {', '.join(sorted(_FIELDS))}")
    return Line(number=number, id=name, prompt=prompt, messages=messages, params=replace(defaults, **value))


class AnswerFile:
    """Writes answers in the order of the questions, each as early as that order allows.

    What is finished out of order is kept and written at the end, also when the end is an interrupt: nothing that was
    answered is lost, and every answer carries the number of its line.

    Raises:
        FileExistsError: the file is there already; it may hold answers.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("x", encoding="utf-8")
        self._ready: dict[int, str] = {}
        self._next = 0

    def add(self, index: int, answer: Mapping[str, Any]) -> None:
        """The answer to question ``index``, counted from 0."""
        self._ready[index] = json.dumps(answer, ensure_ascii=False)
        while self._next in self._ready:
            self._file.write(self._ready.pop(self._next) + "\n")
            self._next += 1
        self._file.flush()

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.writelines(self._ready[index] + "\n" for index in sorted(self._ready))
        self._file.close()


def answer(line: Line, output: RequestOutput) -> dict[str, Any]:
    """What is written for a line."""
    head: dict[str, Any] = {"line": line.number} | ({} if line.id is None else {"id": line.id})
    if output.error:
        return head | {"error": output.error}
    [completion] = output.outputs
    body: dict[str, Any] = {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(completion.token_ids),
    }
    if completion.logprobs is not None:
        chosen = zip(completion.token_ids, completion.logprobs, strict=True)
        body["token_ids"] = completion.token_ids
        body["logprobs"] = [entries[token].logprob for token, entries in chosen]
    return head | body
