"""The engine process: loads a model and runs :class:`hopon.core.engine.Engine` on requests from a socket.

``python -m hopon.serve.process FD`` is started by :func:`hopon.serve.link.launch`. It owns weights, KV cache and
compute threads; it knows token ids only. Before a step it says whose step that is. When the other end of the socket
closes, it leaves.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

from hopon.core.clock import WallClock
from hopon.core.engine import Abort, Command, Engine, EngineStats, Shutdown
from hopon.core.plan import Deployment, Executor, ExecutorFactory
from hopon.core.policy.preset import Observer
from hopon.core.policy.presets import policy_of
from hopon.core.scheduler import Scheduler
from hopon.core.step import Step
from hopon.core.types import Delta
from hopon.serve import wire
from hopon.serve.notes import Notebook, NotedExecutor, NotedInbox
from hopon.tracing import StepFile, TracedExecutor


class SocketInbox:
    """Commands from a socket; a closed socket is a Shutdown."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._frames = wire.Frames()

    def drain(self, timeout: float | None) -> list[Command]:
        """See :class:`hopon.core.engine.Inbox`."""
        commands: list[Command] = []
        patience = None if timeout is None else timeout * 1000
        while self._poll.poll(patience):
            data = self._socket.recv(1 << 20)
            if not data:
                return [*commands, Shutdown()]
            commands.extend(_command(wire.to_engine.decode(body)) for body in self._frames.feed(data))
            if commands or timeout is not None:
                patience = 0
        return commands

    def receive(self) -> wire.ToEngine:
        """The first message; waits for it.

        Raises:
            ConnectionError: the other end closed first.
        """
        while True:
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the API process left before it said what to load")
            for body in self._frames.feed(data):
                return wire.to_engine.decode(body)


def _command(message: wire.ToEngine) -> Command:
    match message:
        case wire.Submit(request=request):
            return request
        case wire.Cancel(request_id=request_id):
            return Abort(request_id)
        case wire.Stop():
            return Shutdown()
        case _:
            raise AssertionError("an engine process is started once")


def import_factory(name: str) -> ExecutorFactory:
    """The function behind "package.module:function".

    Raises:
        ValueError: the name has no such form, or there is no such function.
        ImportError: the module cannot be imported.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"an executor factory is named as 'package.module:function', got {name!r}")
    factory = getattr(importlib.import_module(module), attribute, None)
    if not callable(factory):
        raise ValueError(f"module {module} has no executor factory {attribute!r}")
    return cast(ExecutorFactory, factory)


class Announcer(Observer):
    """Says before a step runs whose step it is, when they are others than those of the last one.

    With 64 rows it costs 3 us per step, and 4 us more (and 2 us in the API process) where it has something to say.
    """

    def __init__(self, tell: Callable[[tuple[str, ...]], None]) -> None:
        self._tell = tell
        self._told: tuple[str, ...] = ()

    def stepped(self, step: Step) -> None:
        """See base."""
        members = tuple([sequence.request.request_id for sequence, _ in step.chunks.values()])
        if members != self._told:
            self._told = members
            self._tell(members)


class EngineProcess:
    """One engine at the end of a socket.

    Args:
        sock: a connected stream socket, blocking.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._inbox = SocketInbox(sock)

    def send(self, message: wire.FromEngine) -> None:
        """Tell the API process; waits while its buffer is full."""
        self._socket.sendall(wire.frame(message))

    def run(self) -> int:
        """Load what the first message names, then serve until Stop or the end of the socket. Returns the exit status.

        Bad files and values end the start with one line; whatever a step raises ends the engine with a traceback.
        """
        start = self._inbox.receive()
        assert isinstance(start, wire.Start), "the first message says what to load"
        try:
            deployment = import_factory(start.factory)(start.options, self._report)
            policy = policy_of(start.options, deployment.config)
            steps = self._step_file(start, deployment)
        except ConnectionError:
            raise
        except (ValueError, OSError, ImportError) as error:
            self.send(wire.Failed(str(error), expected=True))
            return 1
        try:
            notebook = Notebook(with_chunks=start.traces)
            announcer = Announcer(lambda members: self.send(wire.Step(start.incarnation, members)))
            policy = replace(policy, observers=(*policy.observers, notebook, announcer))
            executor: Executor = NotedExecutor(deployment.executor, notebook)
            if steps is not None:
                executor = TracedExecutor(executor, WallClock(), steps.add)
            engine = Engine(Scheduler(deployment.config, policy), executor)
            gc.collect()
            gc.freeze()  # what was loaded stays; collections need not look at it again
            self.send(wire.Ready(deployment.config, deployment.summary, start.incarnation))

            def emit(deltas: Sequence[Delta], stats: EngineStats) -> None:
                self.send(wire.News(start.incarnation, list(deltas), stats, notebook.take()))
                notebook.told()

            engine.run(NotedInbox(self._inbox, notebook), emit)
        finally:
            deployment.executor.close()
            if steps is not None:
                steps.close()
        return 0

    def _step_file(self, start: wire.Start, deployment: Deployment) -> StepFile | None:
        """Where steps are recorded, if that was asked for; a successor of a dead engine has a file of its own."""
        path = start.options.step_records
        if path is None:
            return None
        later = f".{start.incarnation}" if start.incarnation > 1 else ""
        return StepFile(Path(path + later), {"config": asdict(deployment.config), "summary": deployment.summary})

    def _report(self, what: str, share: float) -> None:
        self.send(wire.Loading(what, share))


PR_SET_PDEATHSIG = 1
"""See prctl(2)."""


def know_its_place() -> None:
    """On Linux: be the process that goes when memory runs out, and go when the API process goes, whatever runs.

    The API process can replace an engine without anybody's loss, but nothing replaces an API process.
    """
    if sys.platform != "linux":
        return
    Path("/proc/self/oom_score_adj").write_text("1000")
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(fd: int) -> int:
    """Run on an inherited socket; the exit status is 0 after a Stop and 1 after a failure."""
    know_its_place()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the API process, which then says Stop
    process = EngineProcess(socket.socket(fileno=fd))
    try:
        return process.run()
    except ConnectionError:
        return 1  # the API process is gone; there is nobody to tell
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(ConnectionError):
            process.send(wire.Failed(f"{type(error).__name__}: {error}", expected=False))
        return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
