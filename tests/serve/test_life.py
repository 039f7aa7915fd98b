"""Start, failure and end of servers: exit codes, signals, engines that die, API processes that die."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hopon.core.config import EngineOptions
from hopon.serve.server import ReadyServer, ServerOptions, run_server
from tests.serve.conftest import Server, events, eventually, running, text_of, write_model
from tests.serve.fake import DIE, HANG, RAISE, SLOW


@pytest.fixture
def fresh(model_folder: Path) -> Iterator[Server]:
    """A server that a test may break."""
    with running(model_folder, stall_timeout=1.0) as server:
        yield server


def errors(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event["error"] for event in events if "error" in event]


class Follower:
    """Reads a stream in a thread, because its server is about to fail."""

    def __init__(self, server: Server, **body: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.begun = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._reading = self._pool.submit(self._read, server, body)

    def _read(self, server: Server, body: dict[str, Any]) -> None:
        with (
            server.client() as http,
            http.stream("POST", "/v1/completions", json={"stream": True, **body}) as response,
        ):
            for event in events(response.iter_lines()):
                self.events.append(event)
                self.begun.set()

    def end(self) -> list[dict[str, Any]]:
        """All events; the stream must have ended with [DONE]."""
        self._reading.result(timeout=30)
        self._pool.shutdown()
        return self.events


def long_stream(server: Server, max_tokens: int = 1000) -> Follower:
    follower = Follower(server, prompt=[99, SLOW], max_tokens=max_tokens, ignore_eos=True, temperature=0)
    assert follower.begun.wait(20)
    return follower


def restarts(server: Server) -> float:
    return server.metrics()["hopon_engine_restarts_total"]


def test_v082_a_killed_engine_is_replaced(fresh: Server) -> None:
    """kill -9 of the engine: the open stream goes on as if nothing had been, a request that comes meanwhile is
    answered, and the server is healthy with another engine."""
    undisturbed = long_stream(fresh, 40).end()
    follower = long_stream(fresh, 40)
    engine = fresh.engine_pid()
    os.kill(engine, signal.SIGKILL)
    assert fresh.complete("meanwhile", max_tokens=3)["usage"]["completion_tokens"] == 3
    disturbed = follower.end()
    assert text_of(disturbed) == text_of(undisturbed)
    assert len(disturbed) == len(undisturbed), "one event per token: none is lost, none is doubled"
    assert fresh.engine_pid() != engine
    assert restarts(fresh) == 1
    assert fresh.metrics()["hopon_replayed_requests_total"] >= 1
    fresh.check_alive()
    status, stderr = fresh.stop()
    assert status == 0
    assert "signal 9" in stderr


@pytest.mark.parametrize(("marker", "words"), [(RAISE, "the model broke"), (DIE, "status 7")])
def test_v013_v065_a_request_that_kills_engines_fails_alone(fresh: Server, marker: int, words: str) -> None:
    """A step that raises, or an engine that exits: the request that causes it is found and fails, streams with an error
    too; its neighbours go on. The log says what happened, the client only that it did."""
    undisturbed = long_stream(fresh, 60).end()
    follower = long_stream(fresh, 60)
    response = fresh.post("completions", prompt=[marker], stream=True)
    assert response.status_code == 500, "nothing had been sent, so the status says it; a 503 would be tried again"
    assert response.headers["x-should-retry"] == "false"
    assert "died twice" in response.json()["error"]["message"]
    assert words not in response.text
    assert text_of(follower.end()) == text_of(undisturbed)
    assert restarts(fresh) >= 3, "one death with a neighbour, two alone"
    fresh.check_alive()
    status, stderr = fresh.stop()
    assert status == 0
    assert words in stderr


def test_v065_v083_an_engine_that_cannot_be_replaced_ends_the_server(tmp_path: Path) -> None:
    """The model cannot be loaded any more: after five deaths open streams get an error and [DONE], health says 503, the
    status is 1 and the log has the reason."""
    folder = write_model(tmp_path)
    with running(folder) as server:
        follower = long_stream(server)
        (folder / "fake.json").write_text(json.dumps({"load_error": "model.gguf has gone"}))
        os.kill(server.engine_pid(), signal.SIGKILL)
        eventually(lambda: server.http.get("/health").status_code == 503)
        assert server.post("completions", prompt="x").status_code == 503
        [error] = errors(follower.end())
        assert error["code"] == 503
        assert "model.gguf" not in error["message"]
        status, stderr = server.end()
        assert status == 1
        assert "model.gguf has gone" in stderr
        assert "5 deaths" in stderr


def test_v082_a_hung_engine_is_noticed(fresh: Server) -> None:
    """No step is completed for longer than the stall timeout: health says 503. When the engine has been killed and the
    request that hangs it has been found, health is back. Idle silence is no stall."""
    time.sleep(1.2)  # longer than the stall timeout
    assert fresh.http.get("/health").status_code == 200
    with fresh.begin({"prompt": [HANG], "max_tokens": 5}) as sock:
        assert fresh.http.get("/health").status_code == 200
        for _ in range(2):
            engine = fresh.engine_pid()
            eventually(lambda: fresh.http.get("/health").status_code == 503)
            assert "has not reported" in fresh.http.get("/health").json()["reason"]
            os.kill(engine, signal.SIGKILL)
            eventually(lambda: fresh.http.get("/health").status_code == 200)
        assert b"500" in sock.recv(12)
    fresh.check_alive()


def test_v082_a_stopped_engine_recovers(fresh: Server) -> None:
    """SIGSTOP: health goes red. SIGCONT: it is green again and the stream goes on."""
    undisturbed = long_stream(fresh, 60).end()
    follower = long_stream(fresh, 60)
    os.kill(fresh.engine_pid(), signal.SIGSTOP)
    eventually(lambda: fresh.http.get("/health").status_code == 503)
    os.kill(fresh.engine_pid(), signal.SIGCONT)
    eventually(lambda: fresh.http.get("/health").status_code == 200)
    assert text_of(follower.end()) == text_of(undisturbed)
    assert restarts(fresh) == 0


def test_v013_a_step_that_takes_too_long_is_a_death(model_folder: Path) -> None:
    """With a step timeout a hung engine, and a stopped one, is replaced without anybody's help."""
    with running(model_folder, step_timeout=0.5) as server:
        undisturbed = long_stream(server, 40).end()
        follower = long_stream(server, 40)
        os.kill(server.engine_pid(), signal.SIGSTOP)
        assert text_of(follower.end()) == text_of(undisturbed)
        assert restarts(server) == 1
        assert server.post("completions", prompt=[HANG], max_tokens=5).status_code == 500
        assert restarts(server) == 3
        server.check_alive()


def test_v086_interrupt_ends_a_working_server(fresh: Server) -> None:
    """Ctrl-C in the middle of a stream: the stream gets an error and [DONE], the engine is gone, the status is 0."""
    follower = long_stream(fresh)
    engine = fresh.engine_pid()
    fresh.process.send_signal(signal.SIGINT)
    assert fresh.end() == (0, "")
    [error] = errors(follower.end())
    assert "shutting down" in error["message"]
    assert not alive(engine)


def test_sigterm_drains(fresh: Server) -> None:
    """What is open ends as it would have, new requests are refused with the reason, the log says what is going on."""
    undisturbed = long_stream(fresh, 60).end()
    follower = long_stream(fresh, 60)
    engine = fresh.engine_pid()
    fresh.process.send_signal(signal.SIGTERM)
    eventually(lambda: fresh.post("completions", prompt="x", max_tokens=1).status_code == 503)
    assert "shutting down" in fresh.post("completions", prompt="x").json()["error"]["message"]
    assert text_of(follower.end()) == text_of(undisturbed)
    status, stderr = fresh.end()
    assert status == 0
    # A request that came before the signal was looked at is one of them.
    assert re.search(r"stopping: [12] requests are open, they have 25 s to end", stderr)
    assert "all requests have ended" in stderr
    assert not alive(engine)


def test_sigterm_survives_a_death(fresh: Server) -> None:
    """An engine that dies while the server drains is replaced: what was accepted is finished."""
    undisturbed = long_stream(fresh, 60).end()
    follower = long_stream(fresh, 60)
    fresh.process.send_signal(signal.SIGTERM)
    os.kill(fresh.engine_pid(), signal.SIGKILL)
    assert text_of(follower.end()) == text_of(undisturbed)
    assert fresh.end()[0] == 0


def test_sigterm_cuts_off_what_takes_too_long(model_folder: Path) -> None:
    """Behind the drain timeout open requests get an error, and the log counts them."""
    with running(model_folder, drain_timeout=0.3) as server:
        follower = long_stream(server)
        server.process.send_signal(signal.SIGTERM)
        [error] = errors(follower.end())
        assert "shutting down" in error["message"]
        status, stderr = server.end()
        assert status == 0
        assert "1 requests are cut off" in stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_a_drain(fresh: Server, number: int, status: int) -> None:
    """Who cannot wait says so again; the engine goes too."""
    long_stream(fresh)
    engine = fresh.engine_pid()
    fresh.process.send_signal(signal.SIGTERM)
    eventually(lambda: fresh.post("completions", prompt="x", max_tokens=1).status_code == 503)
    fresh.process.send_signal(number)
    assert fresh.end()[0] == status
    eventually(lambda: not alive(engine))


def test_v086_interrupt_while_loading(tmp_path: Path) -> None:
    """Ctrl-C while the model loads ends the server and the loading engine."""
    server = Server(write_model(tmp_path, fake={"load_time": 600}), {})
    assert server.wait("what")["what"] == "thinking up a model"
    engine = server.engine_pid()
    server.process.send_signal(signal.SIGINT)
    assert server.end() == (0, "")
    assert not alive(engine)


def test_v086_second_interrupt_ends_at_once(fresh: Server) -> None:
    """While the first Ctrl-C waits for an engine that hangs, a second one ends everything."""
    engine = fresh.engine_pid()
    with fresh.begin({"prompt": [HANG], "max_tokens": 5}):
        eventually(lambda: fresh.http.get("/health").status_code == 503)
        fresh.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert fresh.process.poll() is None, "it waits for the engine"
        fresh.process.send_signal(signal.SIGINT)
        assert fresh.end()[0] == 130
    eventually(lambda: not alive(engine))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_engine_ends_with_the_api_process(fresh: Server) -> None:
    """kill -9 of the API process: the engine sees the closed socket and leaves, in the middle of work too."""
    engine = fresh.engine_pid()
    with fresh.begin({"prompt": [99, SLOW], "max_tokens": 1000, "ignore_eos": True}):
        eventually(lambda: fresh.metrics()["vllm_num_requests_running"] == 1)
        fresh.process.kill()
        fresh.end()
    eventually(lambda: not alive(engine))


def test_a_hung_engine_ends_with_the_api_process(fresh: Server) -> None:
    """kill -9 of the API process while the engine is stuck in a step and reads nothing."""
    engine = fresh.engine_pid()
    with fresh.begin({"prompt": [HANG], "max_tokens": 5}):
        eventually(lambda: fresh.http.get("/health").status_code == 503)
        fresh.process.kill()
        fresh.end()
    eventually(lambda: not alive(engine))


def test_memory_runs_out_for_the_engine_first(fresh: Server) -> None:
    """Of the two processes the kernel's out-of-memory killer takes the one that can be replaced."""

    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score").read_text())

    assert score(fresh.engine_pid()) > score(fresh.process.pid) + 300


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    """The factory's error goes to stderr as it is, and the status is 1."""
    server = Server(write_model(tmp_path, fake={"load_error": "model.gguf: shard 3 is missing"}), {})
    status, stderr = server.end()
    assert status == 1
    assert stderr == "hopon: model.gguf: shard 3 is missing\n"


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    """The missing file is named, and the status is not 0."""
    (tmp_path / "fake.json").write_text(json.dumps({"load_time": 600}))
    server = Server(tmp_path, {})
    status, stderr = server.end()
    assert status != 0
    assert "tokenizer.json" in stderr


def test_a_port_in_use_is_an_error_before_anything_is_started(model_folder: Path) -> None:
    """The address is named; no engine is started for it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ServerOptions(
            factory="tests.serve.fake:load",
            engine=EngineOptions(model=str(model_folder)),
            port=taken.getsockname()[1],
        )
        with pytest.raises(OSError, match=rf"cannot listen on 127\.0\.0\.1:{options.port}"):
            run_server(options)


def test_v086_progress_then_a_curl_line_that_works_then_interrupt(fresh: Server) -> None:
    """Progress is told while loading, then a command to try; Ctrl-C ends an idle server quietly with status 0."""
    assert [line.get("share") for line in fresh.lines] == [0.0, 1.0, None]
    curl = fresh.lines[-1]["curl"]
    body = json.loads(curl[curl.index("{") : curl.rindex("}") + 1])
    url = curl.split()[1]
    answer = fresh.http.post(url, json=body | {"max_tokens": 2})
    assert answer.json()["usage"]["completion_tokens"] == 2
    fresh.process.send_signal(signal.SIGINT)
    assert fresh.end() == (0, "")


def test_curl_line_quotes_names() -> None:
    """The curl line is JSON whatever the model is called."""
    ready = ReadyServer(url="http://h:1", model_names=('a"b',), summary={})
    assert '"model": "a\\"b"' in ready.curl()
