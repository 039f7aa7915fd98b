"""Traces of real traffic, read into workloads: plain CSV, Azure's and Mooncake's."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import gcd, isfinite
from pathlib import Path
from random import Random
from typing import Any

from hopon.workload.ask import Ask, Piece, Workload

MOONCAKE_BLOCK = 512
"""Prompt tokens that one hash of a Mooncake trace stands for."""


def read_trace(path: Path, seed: int = 0) -> Workload:
    """A trace: CSV with ``arrival_s,input_tokens,output_tokens`` or Azure's ``TIMESTAMP,ContextTokens,GeneratedTokens``
    in its first line, or Mooncake's JSON lines; any of them compressed when the name ends in .gz.

    Time begins at the first request. ``max_tokens`` is the true length. Mooncake's blocks of equal hashes become equal
    token ids; where all its times are multiples of a second or more, requests are spread inside that tick (``seed``),
    in order.

    Raises:
        OSError: it cannot be read.
        ValueError: names the file, the line and the value.
    """
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", newline="") as file:
        lines = ((number, line.strip()) for number, line in enumerate(file, 1))
        rows = iter([(number, line) for number, line in lines if line])
    head = next(rows, None)
    if head is None:
        raise ValueError(f"{path}: no requests in it")
    if head[1].startswith("{"):
        return _mooncake(path, [head, *rows], seed)
    return _csv(path, head, rows)


_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_PLAIN = ("arrival_s", "input_tokens", "output_tokens")


def _csv(path: Path, head: tuple[int, str], rows: Iterable[tuple[int, str]]) -> Workload:
    columns = [name.strip() for name in head[1].split(",")]
    found = next((names for names in (_PLAIN, _AZURE) if set(names) <= set(columns)), None)
    if found is None:
        missing = ", ".join(name for name in _PLAIN if name not in columns)
        raise ValueError(
            f"{path}, line {head[0]}: no column {missing}: expected {','.join(_PLAIN)} or {','.join(_AZURE)}, "
            f"got {head[1]!r}"
        )
    places = [columns.index(name) for name in found]
    moment = _azure_ticks if found is _AZURE else float
    entries: list[_Entry] = []
    for number, line in rows:
        cells = line.split(",")
        with _At(path, number):
            if len(cells) != len(columns):
                raise ValueError(f"{len(cells)} cells in {line!r}, but {len(columns)} columns")
            time, inputs, outputs = (cells[place].strip() for place in places)
            entries.append(_Entry(number, moment(time), time, int(inputs), int(outputs)))
    # ticks are whole numbers: the difference is exact
    scale = 1e7 if found is _AZURE else 1.0
    return _workload(path, entries, scale)


def _azure_ticks(text: str) -> int:
    """Units of 100 ns; the file has seven digits behind the point, and datetime takes six."""
    whole, _, fraction = text.partition(".")
    seconds = datetime.fromisoformat(whole) - datetime(1970, 1, 1)
    return (seconds.days * 86400 + seconds.seconds) * 10**7 + int((fraction or "0").ljust(7, "0")[:7])


def _mooncake(path: Path, rows: Sequence[tuple[int, str]], seed: int) -> Workload:
    entries = []
    for number, line in rows:
        with _At(path, number):
            row = json.loads(line)
            missing = [name for name in ("timestamp", "input_length", "output_length") if name not in row]
            if missing:
                raise ValueError(f"no field {', '.join(missing)} in {line[:80]!r}")
            for name in ("input_length", "output_length"):
                if type(row[name]) is not int:
                    raise ValueError(f"{name} must be a whole number, got {row[name]!r}")
            inputs = row["input_length"]
            hashes = row.get("hash_ids", [])
            if hashes and len(hashes) != -(-inputs // MOONCAKE_BLOCK):
                raise ValueError(f"{len(hashes)} hash_ids for {inputs} tokens: one for each {MOONCAKE_BLOCK} is needed")
            shared = tuple(
                Piece(2 * int(one) + 1, min(MOONCAKE_BLOCK, inputs - MOONCAKE_BLOCK * i))
                for i, one in enumerate(hashes)
            )
            time = float(row["timestamp"])
            entries.append(_Entry(number, time, str(row["timestamp"]), inputs, row["output_length"], shared))
    _check_order(path, entries)
    tick = gcd(*(int(entry.moment) for entry in entries)) if len(entries) > 1 else 0
    if tick < 1000:
        return _workload(path, entries, 1000.0)
    random = Random(f"{seed} tick")
    spread: dict[float, list[float]] = {}
    for entry in entries:
        spread.setdefault(entry.moment, []).append(random.random() * tick)
    for offsets in spread.values():
        offsets.sort(reverse=True)
    moved = [replace(entry, moment=entry.moment + spread[entry.moment].pop()) for entry in entries]
    work = _workload(path, moved, 1000.0)
    note = f"times are multiples of {tick / 1000:g} s: requests are spread inside them, seed {seed}"
    return replace(work, notes=(note,))


@dataclass(frozen=True, slots=True)
class _Entry:
    line: int
    moment: float
    text: str  # of the moment
    inputs: int
    outputs: int
    shared: tuple[Piece, ...] = ()


class _At:
    """Adds file and line to a bad value."""

    def __init__(self, path: Path, line: int) -> None:
        self._where = f"{path}, line {line}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError | TypeError):
            raise ValueError(f"{self._where}: {error}") from error


def _check_order(path: Path, entries: Sequence[_Entry]) -> None:
    before = None
    for entry in entries:
        with _At(path, entry.line):
            if not (isfinite(entry.moment) and entry.moment >= 0):
                raise ValueError(f"time {entry.text} is not at least 0")
            if before is not None and entry.moment < before.moment:
                raise ValueError(f"time {entry.text} is before the {before.text} of line {before.line}")
        before = entry


def _workload(path: Path, entries: Sequence[_Entry], per_second: float) -> Workload:
    if not entries:
        raise ValueError(f"{path}: no requests in it")
    _check_order(path, entries)
    origin = entries[0].moment
    asks = []
    for number, entry in enumerate(entries):
        with _At(path, entry.line):
            asks.append(
                Ask(
                    number=number,
                    arrival=(entry.moment - origin) / per_second,
                    input_tokens=entry.inputs,
                    output_tokens=entry.outputs,
                    max_tokens=entry.outputs,
                    shared=entry.shared,
                )
            )
    return Workload(name=path.name, asks=tuple(asks))
