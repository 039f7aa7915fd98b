"""Searches on disk: what was measured, so that a search can go on, and its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hopon.capacity.promise import Share
from hopon.capacity.search import Answer, Plan, Window

FORMAT = "hopon capacity 1"


def write(path: Path, about: Mapping[str, Any], plan: Plan, windows: Sequence[Window], answer: Answer | None) -> None:
    """All of a search, complete or not; the file is replaced as a whole."""
    content: dict[str, Any] = {"format": FORMAT, "about": dict(about), "plan": asdict(plan)}
    if answer is not None:
        content["answer"] = {
            "estimate": None if answer.estimate is None else asdict(answer.estimate),
            "binding": answer.binding,
            "confirmed": answer.confirmed,
            "note": answer.note,
        }
    content["windows"] = [asdict(window) for window in windows]
    replace_file(path, content)


def replace_file(path: Path, content: Mapping[str, Any]) -> None:
    """As JSON, in one go: whoever reads it meanwhile sees the old one or the new one."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def window(entry: Mapping[str, Any]) -> Window:
    """From what ``asdict`` made of it."""
    return Window(**{**entry, "shares": tuple(Share(**share) for share in entry["shares"])})


def check_about(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ValueError unless a file is of the same thing; names what differs."""
    for name, value in json.loads(json.dumps(now)).items():
        if before.get(name) != value:
            raise ValueError(f"{path} is of another search: {name} was {before.get(name)!r} and is {value!r} now")


def read(path: Path, about: Mapping[str, Any]) -> tuple[Plan, list[Window]]:
    """Plan and windows of an interrupted search of the same thing.

    Raises:
        OSError: it cannot be read.
        ValueError: it is something else, or a search of something else; names what differs.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r} is not {FORMAT!r}")
        plan = Plan(**content["plan"])
        windows = [window(entry) for entry in content["windows"]]
        before = content["about"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a capacity search: {error}") from error
    check_about(path, before, about)
    return plan, windows
