"""What commands say on stderr while they work, beside the answer that goes to stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from hopon.bench.play import Progress as Sent
    from hopon.bench.play import Watch
    from hopon.hub import Progress


def say(line: str) -> None:
    """Tell the user, beside what goes to stdout."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def download_bar() -> Iterator[Progress]:
    """A progress bar on stderr that appears, and is imported, with the first news: most starts have none."""
    with ExitStack() as stack:
        bars: list[Bar] = []
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            if not bars:
                bars.append(stack.enter_context(_new_bar()))
            if what not in tasks:
                tasks[what] = bars[0].add_task(what)
            bars[0].update(tasks[what], completed=done, total=total or None)

        yield progress


def _new_bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Bar(*columns, console=Console(stderr=True))


class LoadingLine:
    """What the engine is doing while it loads: one line on a terminal's stderr, nothing elsewhere."""

    def __init__(self) -> None:
        self._width = 0

    def show(self, what: str, share: float) -> None:
        """Overwrite the line."""
        if sys.stderr.isatty():
            text = f"{what}: {share:.0%}"
            print(f"\r{text:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(text)

    def replace(self, text: str) -> None:
        """Put a text where the line was."""
        if self._width:
            print(f"\r{'':<{self._width}}\r", end="", file=sys.stderr, flush=True)
        print(text, flush=True)


@contextmanager
def progress(title: str) -> Iterator[Watch | None]:
    """One line on a terminal's stderr, written once in a second: more would disturb what is measured."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:

        def watch(progress: Sent) -> None:
            failed = f", [red]{progress.failed} failed[/red]" if progress.failed else ""
            live.update(
                f"{title}: {progress.seconds:.0f} s, {progress.sent} sent, {progress.open} open, {progress.done} done"
                f"{failed}, {progress.tokens:,} tokens. Ctrl-C ends the run and keeps what was measured",
                refresh=True,
            )

        yield watch
