"""``hopon reproduce``: its flags, and tables as claims are checked. The claims are in :mod:`hopon.reproduce`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hopon.cli.environment import cache_root


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
    check_and_print(full, only, json_file, model or _on_disk(cache_root()))


def _on_disk(root: Path) -> Path | None:
    from hopon.catalogue import cached

    return cached("smollm2-135m", root)


def check_and_print(full: bool, only: str | None, json_file: Path | None, model: Path | None) -> None:
    """Print a table per group as soon as it is checked; ends with status 1 when a claim fails."""
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
