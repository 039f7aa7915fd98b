"""The picture of runs as a file: a page that needs nothing else, and a still of it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hopon.lab.page import render

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")


@dataclass(frozen=True, slots=True)
class Picture:
    """Where it goes; checked before anything is run.

    Args:
        html: a page; None for none.
        png: a still; None for none.

    Raises:
        FileNotFoundError: there is no such folder, or no browser for the still.
    """

    html: Path | None
    png: Path | None

    def __post_init__(self) -> None:
        for flag, path in (("--html", self.html), ("--png", self.png)):
            if path is not None and not path.absolute().parent.is_dir():
                raise FileNotFoundError(f"{flag} {path}: no such folder")
        if self.png is not None:
            find_browser()

    @property
    def wanted(self) -> bool:
        """Any file at all."""
        return self.html is not None or self.png is not None

    def write(self, workload: str, runs: Sequence[Mapping[str, Any]], *, clock: str = "simulated") -> None:
        """Make the files.

        Args:
            workload: what was played, for the title.
            runs: what :func:`hopon.lab.play.about_policy` says of each, and its timeline's content.
            clock: what its times are: ``simulated`` or ``measured``.

        Raises:
            OSError: a file cannot be written, or the browser failed; with its words.
        """
        page = render("file", {"workload": workload, "clock": clock, "runs": runs})
        if self.html is not None:
            self.html.write_text(page, encoding="utf-8")
        if self.png is not None:
            _shoot(page, self.png, 340 + 690 * -(-len(runs) // 3))


def find_browser() -> str:
    """A Chromium on the path. Raises FileNotFoundError without one."""
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    raise FileNotFoundError(f"--png needs Chromium, and none of these is on the path: {', '.join(BROWSERS)}")


def _shoot(page: str, target: Path, height: int) -> None:
    with tempfile.TemporaryDirectory(prefix="hopon-lab-") as folder:
        source = Path(folder) / "page.html"
        source.write_text(page, encoding="utf-8")
        command = [find_browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        command += [f"--user-data-dir={folder}/profile", "--hide-scrollbars", f"--window-size=1600,{height}"]
        command += ["--virtual-time-budget=3000", f"--screenshot={target.absolute()}", source.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode or not target.exists():
            raise OSError(f"--png {target}: {command[0]} failed ({done.returncode}): {done.stderr.strip()[-400:]}")
