"""Windows by candidate, on disk as they are measured: who asks again, gets what was measured before."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hopon.capacity import files
from hopon.capacity.knobs import Candidate
from hopon.capacity.search import Window

FORMAT = "hopon tune 1"

Measure = Callable[[Candidate, float, int, float], Window]
"""Candidate, requests per second, seed, seconds."""

_Key = tuple[str, Candidate, float, int, float]


class Trials:
    """All windows of a tuning, of several kinds (simulated, measured).

    Args:
        about: what is tuned; a file of something else is refused.
        path: where they are kept; None keeps them in memory.
        resume: begin with what the file has.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is something else, or of something else.
    """

    def __init__(self, about: Mapping[str, Any], path: Path | None = None, *, resume: bool = False) -> None:
        self._about, self._path = about, path
        self._windows: dict[_Key, Window] = {}
        if resume and path is not None:
            self._windows = {_key(kind, candidate, window): window for kind, candidate, window in self._read(path)}

    def __len__(self) -> int:
        return len(self._windows)

    def window(
        self, kind: str, measure: Measure, candidate: Candidate, rate: float, seed: int, seconds: float
    ) -> Window:
        """What became of a candidate; measured if it is not known yet."""
        key = (kind, candidate, rate, seed, seconds)
        if key not in self._windows:
            self._windows[key] = measure(candidate, rate, seed, seconds)
            self._write()
        return self._windows[key]

    def of(self, kind: str) -> Iterator[tuple[Candidate, Window]]:
        """All of a kind, in the order in which they were measured."""
        return ((key[1], window) for key, window in self._windows.items() if key[0] == kind)

    def _write(self) -> None:
        if self._path is None:
            return
        rows = [
            {"kind": key[0], "values": dict(key[1].values), "window": asdict(window)}
            for key, window in self._windows.items()
        ]
        files.replace_file(self._path, {"format": FORMAT, "about": dict(self._about), "windows": rows})

    def _read(self, path: Path) -> list[tuple[str, Candidate, Window]]:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']!r} is not {FORMAT!r}")
            found = [
                (row["kind"], Candidate.of(row["values"]), files.window(row["window"])) for row in content["windows"]
            ]
            before = content["about"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not a tuning: {error}") from error
        files.check_about(path, before, self._about)
        return found


def _key(kind: str, candidate: Candidate, window: Window) -> _Key:
    return (kind, candidate, window.rate, window.seed, window.seconds)
