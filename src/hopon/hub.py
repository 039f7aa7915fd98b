"""Models on the Hugging Face hub: one file, or the safetensors files of a repository.

A thin layer over ``huggingface_hub``, which brings the user's own cache, token, endpoint and proxy settings. The hub
is asked once, with a short timeout, before anything else happens: where there is no network the answer comes quickly.
This module knows nothing of hopon's catalogue.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

Progress = Callable[[str, int, int], None]
"""(what is being done, bytes done, bytes in all; 0 in all when unknown)."""

TIMEOUT = 4.0
"""Seconds until the hub must have answered the first question."""

_WEIGHTS = ".safetensors"
_COMPANIONS = (".json", ".jinja", ".txt", "LICENSE", "LICENSE.md")  # config, tokenizer, chat template, index


@dataclass(frozen=True, kw_only=True, slots=True)
class Hub:
    """A hub and a local cache of it; ``None`` means the hub client's own defaults."""

    endpoint: str | None = None
    cache_dir: Path | None = None

    def file(self, repo: str, file: str, progress: Progress, *, folder: Path | None = None) -> Path:
        """Download one file: into ``folder``, or into the hub cache. Raises whatever the hub client raises."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

        # The client retries for half a minute when it cannot connect; this question is asked once.
        size = get_hf_file_metadata(hf_hub_url(repo, file, endpoint=self.endpoint), timeout=TIMEOUT).size or 0
        with watched(folder or self._repo_cache(repo), lambda done: progress(file, done, size)), _without_bars():
            return Path(
                hf_hub_download(
                    repo,
                    file,
                    local_dir=folder,
                    cache_dir=None if folder else self.cache_dir,
                    endpoint=self.endpoint,
                    etag_timeout=TIMEOUT,
                )
            )

    def snapshot(self, repo: str, progress: Progress) -> Path:
        """Download what a safetensors model needs, at the repository's newest revision, into the hub cache.

        Raises:
            FileNotFoundError: the repository has no safetensors weights; names the GGUF files it has.
        """
        from huggingface_hub import HfApi, hf_hub_download

        info = HfApi(endpoint=self.endpoint).model_info(repo, timeout=TIMEOUT, files_metadata=True)
        sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
        wanted = [name for name in sizes if _belongs(name)]
        if not any(name.endswith(_WEIGHTS) for name in wanted):
            others = [name for name in sizes if name.endswith(".gguf")]
            hint = f"; pick a file: {', '.join(f'{repo}:{name}' for name in others)}" if others else ""
            raise FileNotFoundError(f"{repo} has no {_WEIGHTS} weights{hint}")
        total = sum(sizes[name] for name in wanted)
        with watched(self._repo_cache(repo), lambda done: progress(repo, done, total)), _without_bars():
            paths = [
                hf_hub_download(
                    repo,
                    name,
                    cache_dir=self.cache_dir,
                    endpoint=self.endpoint,
                    etag_timeout=TIMEOUT,
                )
                for name in wanted
            ]
        return Path(paths[0]).parent

    def cached_file(self, repo: str, file: str) -> Path | None:
        """The file in the local hub cache, without asking the hub."""
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(repo, file, cache_dir=self.cache_dir)
        return Path(path) if isinstance(path, str) else None

    def cached_snapshot(self, repo: str) -> Path | None:
        """The repository in the local hub cache if all its weights are there, without asking the hub."""
        config = self.cached_file(repo, "config.json")
        if config is None:
            return None
        folder = config.parent
        index = folder / f"model{_WEIGHTS}.index.json"
        sharded = index.is_file()
        shards = set(json.loads(index.read_text())["weight_map"].values()) if sharded else {f"model{_WEIGHTS}"}
        return folder if all((folder / shard).is_file() for shard in shards) else None

    def _repo_cache(self, repo: str) -> Path:
        from huggingface_hub.constants import HF_HUB_CACHE

        return (self.cache_dir or Path(HF_HUB_CACHE)) / f"models--{repo.replace('/', '--')}" / "blobs"


def _belongs(name: str) -> bool:
    """Top-level files only; "consolidated" weights are a second copy in another layout."""
    if "/" in name or name.startswith("consolidated"):
        return False
    return name.endswith((_WEIGHTS, *_COMPANIONS))


@contextmanager
def watched(folder: Path, report: Callable[[int], None]) -> Iterator[None]:
    """Report how many bytes a folder has gained, five times a second, while the body runs.

    Works with every downloader, whatever it offers for progress.
    """
    before = bytes_below(folder)
    done = Event()

    def watch() -> None:
        while not done.wait(0.2):
            report(max(0, bytes_below(folder) - before))

    watcher = Thread(target=watch, name="download-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def bytes_below(folder: Path) -> int:
    """Size of all files below a folder; 0 when it does not exist."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # it was renamed meanwhile
                continue
    return total


@contextmanager
def _without_bars() -> Iterator[None]:
    """Silence the hub client's own progress bars for a while."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, but not in the package's export list
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
