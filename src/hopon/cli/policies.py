"""``hopon policies``: its flags. The pages are in :mod:`hopon.policies`."""

from __future__ import annotations

from typing import Annotated

import typer


def policies(
    name: Annotated[str | None, typer.Argument(help="A policy, or module:Class; all of them without.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/policies.md.")] = False,
) -> None:
    """List the batching systems, or print one system's page."""
    from rich.console import Console

    from hopon import policies as pages

    if markdown and name is not None:
        raise typer.BadParameter("--markdown prints all policies: give no name with it")
    if markdown:
        print(pages.markdown(), end="")
        return
    Console().print(pages.overview() if name is None else pages.leaf(pages.page(name)))
