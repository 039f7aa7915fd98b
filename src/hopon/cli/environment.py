"""What the command line takes from the environment: the one place that reads it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def cache_root() -> Path:
    """Root of hopon's cache: ``$HOPON_CACHE``, else the default one."""
    from hopon.catalogue import DEFAULT_CACHE

    return Path(os.environ.get("HOPON_CACHE") or DEFAULT_CACHE).expanduser()


def api_keys(given: Iterable[str], file: Path | None) -> tuple[str, ...]:
    """Keys from the command line, the environment and a file."""
    keys = list(given)
    if os.environ.get("HOPON_API_KEY"):
        keys.append(os.environ["HOPON_API_KEY"])
    if file is not None:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise ValueError(f"--api-key-file {file}: there is no key in it")
        keys += found
    return tuple(keys)
