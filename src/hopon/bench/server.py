"""A hopon of one's own, started to be measured."""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hopon.bench.target import TargetError

START_TIMEOUT = 120.0
"""Seconds within which a server must be ready."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A server that was started and is ready.

    Args:
        url: its address.
        pid: its process.
        seconds_to_ready: from starting the command to the first good answer of /health.
        log: the file that it prints to.
    """

    url: str
    pid: int
    seconds_to_ready: float
    log: Path


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # see prctl(2)


def _end_with_parent() -> None:
    """In the new process: a measurement that is killed leaves no server behind, with all its memory."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def serve(model: str, flags: Sequence[str] = ()) -> Iterator[Started]:
    """``hopon serve MODEL FLAGS`` for a while, on a free port of the loopback.

    Raises:
        TargetError: it is not ready in time, or ends before; the message has what it said.
    """
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "hopon", "serve", model, "--port", str(port), *flags]
    with tempfile.NamedTemporaryFile() as log:
        begun = time.perf_counter()
        # A session of its own: Ctrl-C ends the measurement, which then ends the server.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        try:
            while not _is_healthy(url):
                seconds = time.perf_counter() - begun
                if process.poll() is not None or seconds > START_TIMEOUT:
                    raise TargetError(f"not ready after {seconds:.0f} s: {Path(log.name).read_text().strip()}")
                time.sleep(0.01)
            ready = time.perf_counter() - begun
            yield Started(url=url, pid=process.pid, seconds_to_ready=ready, log=Path(log.name))
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
