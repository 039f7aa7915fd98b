"""``hopon pull``: a model is on disk before it is needed."""

from __future__ import annotations

from typing import Annotated

import typer

from hopon.cli.engine_flags import CacheDir
from hopon.cli.environment import cache_root
from hopon.cli.terminal import download_bar


def pull(
    model: Annotated[str, typer.Argument(help="A catalogue name, or a hub id: org/repo or org/repo:file.gguf.")],
    cache_dir: CacheDir = None,
) -> None:
    """Download a model, unless it is on disk; prints its path."""
    from hopon.catalogue import resolve

    with download_bar() as progress:
        path = resolve(model, cache_dir or cache_root(), progress, refresh=True)
    print(path)
