"""``hopon policies`` and ``hopon reproduce``: their flags."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
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


def reproduce(cache_root: Callable[[], Path]) -> Callable[..., None]:
    """The command, for a way to find the folder that models are kept in."""

    def reproduce(
        full: Annotated[bool, typer.Option("--full", help="The slow ones, too.")] = False,
        only: Annotated[str | None, typer.Option(metavar="GROUP", help="One group of claims.")] = None,
        json_file: Annotated[Path | None, typer.Option("--json", help="A file for all that was found.")] = None,
        model: Annotated[
            Path | None, typer.Option(help="A model file for the real engine (default: smollm2-135m, if on disk).")
        ] = None,
        markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/reproduce.md.")] = False,
    ) -> None:
        """Check what articles and papers say about continuous batching: claim, published, ours, verdict."""
        from hopon.reproduce import command

        if markdown:
            print(command.markdown(), end="")
            return
        if json_file is not None and not json_file.absolute().parent.is_dir():
            raise FileNotFoundError(f"--json {json_file}: no such folder")
        _reproduce(full, only, json_file, model or _on_disk(cache_root()))

    return reproduce


def _on_disk(root: Path) -> Path | None:
    from hopon.catalogue import cached

    return cached("smollm2-135m", root)


def _reproduce(full: bool, only: str | None, json_file: Path | None, model: Path | None) -> None:
    from rich.console import Console

    from hopon.reproduce import command
    from hopon.reproduce.claim import Verdict

    console = Console()
    outcomes = []
    with Console(stderr=True).status("") as line:

        def report(what: str, share: float) -> None:
            line.update(f"{share:.0%} {what}")

        for group in command.chosen_groups(only, model, full):
            found = list(command.check([group], full, report))
            outcomes += found
            console.print(command.table(group, found))
    console.print(command.LEGEND, style="dim")
    if model is None:
        console.print(f"The group {command.ENGINE} was left out: no model on disk (hopon pull smollm2-135m).")
    console.print(command.summary(outcomes))
    if json_file is not None:
        json_file.write_text(command.to_json(outcomes), encoding="utf-8")
    if any(one.verdict is Verdict.FAILS for one in outcomes):
        sys.exit(1)
