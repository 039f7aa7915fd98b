"""The servers of a comparison: those that run already, and hopon's own that are started for it."""

from __future__ import annotations

import asyncio
import re
import shlex
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path

import psutil

from hopon.bench.sampling import read_settings
from hopon.bench.server import serve
from hopon.bench.target import Target, TargetError, served_model


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of all processes of a server, as proportional set size: shared pages are divided among those that share.

    Args:
        total: everything.
        weights: packed weights; 0 when the server does not tell.
        kv: pages of the KV cache that were touched; 0 when the server does not tell.
    """

    total: int
    weights: int
    kv: int

    @property
    def rest(self) -> int:
        """Everything but weights and KV."""
        return self.total - self.weights - self.kv


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A server that answers.

    Args:
        label: its name in the table.
        url: without a path.
        model: the name it wants in requests.
        pid: its process, whose children belong to it; None when that is not known (a server elsewhere).
        seconds_to_ready: from starting the command to the first good answer of /health; None when it ran already.
        log: the file that it prints to; None when that is not known.
    """

    label: str
    url: str
    model: str
    pid: int | None
    seconds_to_ready: float | None = None
    log: Path | None = None

    def introduction(self) -> str:
        """What it has printed: it introduces itself soon after its first good answer, not before."""
        return self.log.read_text() if self.log is not None else ""

    def memory(self) -> Memory | None:
        """What it takes now; None when its process is not known."""
        if self.pid is None:
            return None
        process = psutil.Process(self.pid)
        mappings = [found for member in (process, *process.children(recursive=True)) for found in _mappings(member.pid)]
        facts = self.settings()
        # The pool is an anonymous mapping of its own, a little larger than its usable blocks; untouched pages are free.
        usable = float(facts.get("hopon_kv_bytes", inf))
        pools = [found for found in mappings if found.is_anonymous and found.size >= usable]
        return Memory(
            total=sum(found.share for found in mappings),
            weights=int(facts.get("hopon_weight_bytes", 0)),
            kv=min(pools, key=lambda found: found.size).share if pools else 0,
        )

    def settings(self) -> dict[str, str]:
        """What it tells of itself in its metrics; empty where a server tells nothing."""
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
                return read_settings(response.read())
        except OSError:
            return {}


@dataclass(frozen=True, slots=True)
class Running:
    """A server that somebody else started."""

    label: str
    url: str

    def look_up(self) -> Server:
        """Ask for its model, and find its process on this machine.

        Raises:
            TargetError: it does not answer.
        """
        model = _served_model(self.label, self.url)
        port = int(self.url.rsplit(":", 1)[-1])
        listening = [
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
        ]
        return Server(label=self.label, url=self.url, model=model, pid=next(filter(None, listening), None))


@dataclass(frozen=True, slots=True)
class Hopon:
    """A hopon of its own: a label and the flags of ``hopon serve``."""

    label: str
    model: str
    flags: tuple[str, ...]

    def shown(self, *, prefix_caching: bool) -> str:
        """The command as a person would type it."""
        flags = [*self.flags, *([] if prefix_caching else ["--no-enable-prefix-caching"])]
        return shlex.join(["hopon", "serve", self.model, *flags])

    @contextmanager
    def start(self, *, prefix_caching: bool) -> Iterator[Server]:
        """Run it for a while, on a free port of the loopback.

        Raises:
            TargetError: it is not ready in time, or ends before; the message has what it said.
        """
        flags = self.flags if prefix_caching else (*self.flags, "--no-enable-prefix-caching")
        try:
            with serve(self.model, flags) as started:
                yield Server(
                    label=self.label,
                    url=started.url,
                    model=_served_model(self.label, started.url),
                    pid=started.pid,
                    seconds_to_ready=started.seconds_to_ready,
                    log=started.log,
                )
        except TargetError as error:
            raise TargetError(f"{self.label}: {error}") from error


def _served_model(label: str, url: str) -> str:
    """The first model that a server names."""
    try:
        return asyncio.run(served_model(Target(url=url)))
    except TargetError as error:
        raise TargetError(f"{label}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Mapping:
    """A piece of a process's address space; bytes. ``share`` is its proportional set size."""

    size: int
    share: int
    is_anonymous: bool


def _mappings(pid: int) -> list[_Mapping]:
    found = []
    for text in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text(), flags=re.MULTILINE)[1:]:
        head, rest = text.split("\n", 1)
        size, share = (re.search(rf"^{name}: +(\d+) kB", rest, re.MULTILINE) for name in ("Size", "Pss"))
        assert size is not None, "every mapping has a size"
        assert share is not None, "every mapping has a proportional set size"
        found.append(_Mapping(int(size[1]) * 1024, int(share[1]) * 1024, len(head.split()) == 5))
    return found
