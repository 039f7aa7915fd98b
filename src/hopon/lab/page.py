"""The page as one string: markup, style and script of ``static/`` with data put in. It fetches nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Literal

Mode = Literal["lab", "file", "live"]


def render(mode: Mode, data: Mapping[str, Any]) -> str:
    """HTML without any other file.

    Args:
        mode: ``lab`` asks its server for runs, ``file`` shows the runs in ``data``, ``live`` follows a server.
        data: what the script finds when it starts.
    """
    folder = files("hopon.lab") / "static"

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    content = json.dumps({"mode": mode} | dict(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    scripts = ("draw.js", "live.js") if mode == "live" else ("draw.js", "lab.js")
    return (
        read("lab.html")
        .replace("/*STYLE*/", read("lab.css"))
        .replace("/*SCRIPT*/", "\n".join(map(read, scripts)))
        .replace("/*DATA*/", content)
    )
