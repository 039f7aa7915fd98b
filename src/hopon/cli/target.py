"""Whom a measuring command asks: a server by its address, or a model that hopon then serves itself."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from hopon.cli.terminal import say

if TYPE_CHECKING:
    from hopon.bench.target import Target


def target_of(url: str, header: list[str] | None, common: dict[str, Any]) -> Target:
    """A server that runs already. ``common`` has further fields of the target.

    Raises:
        typer.BadParameter: a header is not NAME:VALUE.
    """
    from hopon.bench.target import Target

    headers = {}
    for line in header or ():
        name, colon, value = line.partition(":")
        if not colon:
            raise typer.BadParameter(f"a header is given as NAME:VALUE, got {line!r}")
        headers[name.strip()] = value.strip()
    return Target(url=url, headers=headers, **common)


@contextmanager
def served(server: str, flags: str, header: list[str] | None, common: dict[str, Any]) -> Iterator[Target]:
    """The target; a model is served as long as it is needed."""
    from hopon.bench.server import serve

    if server.startswith(("http://", "https://")):
        if flags:
            raise typer.BadParameter("--serve-flags belong to a model, not to an address")
        yield target_of(server, header, common)
        return
    say(f"starting hopon serve {server} {flags}".rstrip())
    with serve(server, shlex.split(flags)) as started:
        yield target_of(started.url, header, common)
