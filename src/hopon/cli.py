"""The ``hopon`` command: the one place that reads the environment and wires the parts together.

Imports of parts happen inside the commands, so that ``hopon --help`` is quick and ``hopon serve`` starts its engine
process before it loads anything else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import hopon

if TYPE_CHECKING:
    from hopon.hub import Progress

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

CacheDir = Annotated[
    Path | None,
    typer.Option(help="Where models and packed weights are kept [default: $HOPON_CACHE or ~/.cache/hopon]."),
]


def main() -> None:
    """Run the command line; an error is one line on stderr and a non-zero status."""
    from hopon.catalogue import HashMismatchError, ModelNotFoundError

    try:
        app()
    except (ModelNotFoundError, HashMismatchError, ValueError, OSError) as error:
        sys.exit(f"hopon: {' '.join(str(error).split()) or type(error).__name__}")


def cache_root() -> Path:
    """Root of hopon's cache: ``HOPON_CACHE``, else ``hopon`` in the user's cache directory."""
    if chosen := os.environ.get("HOPON_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hopon"


def _version(wanted: bool) -> None:
    if wanted:
        print(f"hopon {hopon.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Continuous batching for language models on CPUs."""


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="A catalogue name, or a hub id: org/repo or org/repo:file.gguf.")],
    cache_dir: CacheDir = None,
) -> None:
    """Download a model, unless it is on disk; prints its path."""
    from hopon.catalogue import resolve

    with _download_bar() as progress:
        path = resolve(model, cache_dir or cache_root(), progress, refresh=True)
    print(path)


@contextmanager
def _download_bar() -> Iterator[Progress]:
    """A progress bar on stderr that appears with the first news."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, int] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what)
            bar.update(tasks[what], completed=done, total=total or None)  # type: ignore[arg-type]

        yield progress
