"""Servers on the fake model, as processes of their own on free ports."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from hopon.serve.tokenizer import Tokenizer

T = TypeVar("T")

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).parents[2]


def vectors(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DATA / f"{name}.vectors.json").read_text())
    return content


def write_model(folder: Path, *, template: str | None = "", **files: dict[str, Any]) -> Path:
    """A folder with SmolLM's tokenizer. ``template`` "" is SmolLM's own, None is none; ``files`` are JSON files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(gzip.decompress((DATA / "smollm.tokenizer.json.gz").read_bytes()))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"} | files.pop("tokenizer_config", {})
    if template is not None:
        config["chat_template"] = template or vectors("smollm")["chat_template"]
    for name, content in (files | {"tokenizer_config": config}).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of most tests. Its files disagree about end tokens: 2, 0, and 0 or 17."""
    return write_model(
        tmp_path_factory.mktemp("models") / "fake",
        config={"eos_token_id": 0, "vocab_size": 49152},
        generation_config={"eos_token_id": [0, 17]},
    )


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


class Server:
    """A running server process."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.lines: list[dict[str, Any]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve.serve_fake", str(folder), json.dumps(options)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.url = ""
        self.http = self.client()

    def wait(self, key: str = "url") -> dict[str, Any]:
        """Read lines until one has this key."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))
            if key in self.lines[-1]:
                self.url = self.lines[-1].get("url", "")
                self.http = self.client()
                return self.lines[-1]
        raise AssertionError(f"the server has gone: {self.end()}")

    def end(self) -> tuple[int, str]:
        """Wait for the end; the exit status and what it said on stderr."""
        _, stderr = self.process.communicate(timeout=30)
        return self.process.returncode, stderr

    def stop(self) -> tuple[int, str]:
        self.http.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        return self.end()

    def engine_pid(self) -> int:
        """The engine process: the server's only child that runs its module."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    if parent == self.process.pid and b"hopon.serve.process" in (entry / "cmdline").read_bytes():
                        return int(entry.name)
        raise AssertionError("no engine process found")

    # ---- requests ----

    def client(self) -> httpx.Client:
        """A client for this server. (Setting up TLS, which nobody needs here, takes longer than most tests.)"""
        return httpx.Client(base_url=self.url, timeout=60, verify=False, limits=httpx.Limits())

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(f"/v1/{path}", json=body)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        response = self.post("completions", prompt=prompt, **fields)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def chat(self, messages: Any, **fields: Any) -> dict[str, Any]:
        """A chat that must succeed."""
        response = self.post("chat/completions", messages=messages, **fields)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stream(self, path: str = "completions", **body: Any) -> list[dict[str, Any]]:
        """All events of a stream, which must end with [DONE]."""
        with self.http.stream("POST", f"/v1/{path}", json={"stream": True, **body}) as response:
            assert response.status_code == 200, response.read()
            return list(events(response.iter_lines()))

    def refused(self, path: str = "completions", status: int = 400, **body: Any) -> dict[str, Any]:
        """The error of a request that must be refused."""
        response = self.post(path, **body)
        assert response.status_code == status, f"{response.status_code} {response.text[:500]}"
        error: dict[str, Any] = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @contextlib.contextmanager
    def begin(self, body: dict[str, Any], key: str = "none") -> Iterator[socket.socket]:
        """Send a completion request, read nothing, and leave at the end of the block."""
        url = httpx.URL(self.url)
        content = json.dumps(body).encode()
        with socket.create_connection((url.host, url.port)) as sock:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {url.host}\r\ncontent-type: application/json\r\n"
            head += f"authorization: Bearer {key}\r\n"
            sock.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            yield sock

    def metrics(self) -> dict[str, float]:
        """Metric name (with the label finished_reason, le, ...) to value; the constant labels are left out."""
        values = {}
        for line in self.http.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = re.sub(r'(engine="0"|model_name="fake"),?', "", name).replace(",}", "}")
                values[name.replace("{}", "")] = float(value)
        return values

    def num_busy(self) -> float:
        metrics = self.metrics()
        return metrics["vllm_num_requests_running"] + metrics["vllm_num_requests_waiting"]

    def check_alive(self) -> None:
        """Healthy, idle, and a request works."""
        assert self.http.get("/health").status_code == 200
        eventually(lambda: self.num_busy() == 0)
        assert self.complete("still alive?", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Data of server-sent events up to [DONE], which must come."""
    for line in lines:
        if line == "data: [DONE]":
            return
        if line:
            assert line.startswith("data: "), line
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")


def eventually(condition: Callable[[], bool], patience: float = 20.0) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "this never became true"
        time.sleep(0.01)


def at_once(count: int, task: Callable[[int], T]) -> list[T]:
    """Results of ``task(0)``, ``task(1)``, ... run at the same time; raises what one of them raises."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(task, range(count)))


def script(*tokens: int) -> list[int]:
    """A prompt that makes the fake model say these tokens and then its end token."""
    from tests.serve.fake import SCRIPT

    return [SCRIPT, *tokens]


def text_of(chunks: Sequence[dict[str, Any]]) -> str:
    """All text of a stream with one output."""
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(part["text"] if "text" in part else part["delta"].get("content", "") for part in parts)


@contextlib.contextmanager
def running(folder: Path, **options: Any) -> Iterator[Server]:
    """A server that is ready; killed at the end if it still runs."""
    server = Server(folder, {"served_model_names": ["fake"], **options})
    try:
        server.wait()
        yield server
    finally:
        server.http.close()
        if server.process.poll() is None:
            server.process.terminate()
            try:
                server.process.communicate(timeout=15)
            except subprocess.TimeoutExpired:
                os.kill(server.process.pid, signal.SIGKILL)
                server.process.communicate()


@pytest.fixture(scope="session")
def server(model_folder: Path) -> Iterator[Server]:
    """The server of most tests: quick steps, 1024 tokens of context, 64 seats, 8192 tokens of KV cache."""
    with running(model_folder) as server:
        yield server
        assert server.stop() == (0, ""), "the server must end quietly"


@pytest.fixture(scope="session")
def slow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One seat, 16 tokens per step, 20 ms per step; no chat template, sampling defaults of the model's own."""
    folder = write_model(
        tmp_path_factory.mktemp("models") / "slow",
        template=None,
        fake={"step_time": 0.02},
        generation_config={"temperature": 0.0, "top_k": 5, "repetition_penalty": 1.1, "eos_token_id": 2},
    )
    with running(folder, engine={"max_num_seqs": 1, "max_num_batched_tokens": 16}) as server:
        yield server
