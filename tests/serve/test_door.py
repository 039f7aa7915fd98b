"""Doors closed: keys, origins, sizes, depths, slow clients, and what a client is told when the server errs."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from hopon.serve.access_log import AccessLog
from hopon.serve.door import Door
from hopon.serve.keys import Keys
from tests.serve.conftest import Server, at_once, eventually, running, write_model
from tests.serve.fake import SLOW

KEYS = ("sk-first", "sk-second")


@pytest.fixture(scope="module")
def closed(model_folder: Path) -> Iterator[Server]:
    """A server with two keys, caches of their own, one allowed origin, short patience and a log in JSON."""
    with running(
        model_folder,
        api_keys=KEYS,
        isolate_keys=True,
        allowed_origins=["https://app.example"],
        read_timeout=1.0,
        max_body_bytes=200_000,
        log_format="json",
    ) as server:
        server.http.headers["authorization"] = f"Bearer {KEYS[0]}"
        yield server


def connect(server: Server) -> socket.socket:
    url = httpx.URL(server.url)
    sock = socket.create_connection((url.host, url.port or 0))
    sock.settimeout(10)
    return sock


def read_all(sock: socket.socket) -> bytes:
    """What comes until the other end closes."""
    content = b""
    while chunk := sock.recv(1 << 16):
        content += chunk
    return content


# ---- keys ----


def test_every_route_but_the_probes_needs_a_key(closed: Server) -> None:
    """All routes of the OpenAPI document, unknown ones too, say 401 without a key and with a wrong one."""
    paths = closed.http.get("/openapi.json").json()["paths"]
    assert "/v1/completions" in paths
    for path in [*paths, "/openapi.json", "/docs", "/nowhere"]:
        for headers in ({}, {"authorization": "Bearer sk-wrong"}, {"authorization": KEYS[0]}, {"x-api-key": ""}):
            for method in ("GET", "POST"):
                status = httpx.request(method, closed.url + path, headers=headers, verify=False).status_code
                assert status == (401 if path not in ("/health", "/ready") else status), (path, headers)
    assert httpx.get(closed.url + "/health", verify=False).status_code == 200


def test_each_key_opens(closed: Server) -> None:
    """As a bearer token, whatever the case of the word, and as x-api-key."""
    for headers in (
        {"authorization": f"Bearer {KEYS[1]}"},
        {"authorization": f"bearer {KEYS[0]}"},
        {"x-api-key": KEYS[0]},
    ):
        assert httpx.get(closed.url + "/v1/models", headers=headers, verify=False).status_code == 200
    error = httpx.get(closed.url + "/v1/models", verify=False)
    assert error.headers["www-authenticate"] == "Bearer"
    assert error.json()["error"]["type"] == "AuthenticationError"


def test_keys_are_compared_with_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever key fits, and where none does, as many comparisons of equal length are made."""
    calls: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        calls.append((a, b))
        return a == b

    monkeypatch.setattr("hopon.serve.keys.hmac.compare_digest", compare)
    keys = Keys(["one", "two", "three"])
    for sent, known in (("one", True), ("three", True), ("fourteen", False), ("", False)):
        calls.clear()
        assert (keys.name([(b"authorization", f"Bearer {sent}".encode())]) is not None) == known
        assert len(calls) == 3
        assert {len(part) for pair in calls for part in pair} == {32}


@pytest.mark.parametrize("key", ["", "two words", "ключ", "tab\t"])
def test_keys_that_cannot_be_sent_are_refused(key: str) -> None:
    """At the start, and without showing the key."""
    with pytest.raises(ValueError, match="printable ASCII"):
        Keys([key])


def test_caches_are_isolated_by_key_and_salt(closed: Server) -> None:
    """What one key has cached is no hit for another, nor for the same key under another salt."""

    def cached(key: str, **fields: Any) -> int:
        headers = {"authorization": f"Bearer {key}"}
        body = {"prompt": list(range(200, 250)), "max_tokens": 1, **fields}
        answer = closed.http.post("/v1/completions", json=body, headers=headers).json()
        count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    assert cached(KEYS[0]) == 0
    assert cached(KEYS[0]) == 48
    assert cached(KEYS[1]) == 0
    assert cached(KEYS[1]) == 48
    assert cached(KEYS[0], cache_salt="a") == 0
    # A salt that spells another key's name must not reach its cache.
    name = Keys(KEYS).name([(b"x-api-key", KEYS[1].encode())])
    assert cached(KEYS[0], cache_salt=f"{name}/") == 0


# ---- origins ----


def test_other_origins_are_not_let_in(closed: Server, server: Server) -> None:
    """The allowed origin gets its headers, without a key for the preflight; others, and all by default, get none."""
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    good = {"origin": "https://app.example"}
    bad = {"origin": "https://evil.example"}
    allowed = httpx.options(closed.url + "/v1/completions", headers=good | preflight, verify=False)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert closed.http.get("/v1/models", headers=good).headers["access-control-allow-origin"] == "https://app.example"
    refused = httpx.options(closed.url + "/v1/completions", headers=bad | preflight, verify=False)
    assert refused.status_code == 400
    for response in (
        closed.http.get("/v1/models", headers=bad),
        server.http.get("/v1/models", headers=good),
        server.http.options("/v1/completions", headers=good | preflight),
    ):
        assert "access-control-allow-origin" not in response.headers


# ---- bodies ----


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("depth", [80, 900, 50_000])
@pytest.mark.parametrize("field", ["prompt", "chat_template_kwargs", "logit_bias", "nonsense"])
def test_deep_bodies_are_refused(closed: Server, depth: int, field: str) -> None:
    """Lists within lists, in whatever field: a 400, never a 500, and the server goes on."""
    content = (
        f'{{"prompt": "x", "{field}": {nested(depth)}}}' if field != "prompt" else f'{{"prompt": {nested(depth)}}}'
    )
    response = closed.http.post(
        "/v1/completions", content=content, headers={"content-type": "application/json", **closed.http.headers}
    )
    assert response.status_code == 400
    assert "64 lists and objects" in response.json()["error"]["message"]


def test_many_shallow_lists_are_fine(closed: Server) -> None:
    """The limit is on depth, not on number."""
    answer = closed.complete([[100 + i] for i in range(100)], max_tokens=1)
    assert len(answer["choices"]) == 100


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b"\xff\xfe{}",
        b'{"prompt": "x"',
        b"",
        b"null",
        b"7",
    ],
)
def test_odd_bodies_are_refused(closed: Server, content: bytes) -> None:
    """Numbers without end, lone surrogates, other encodings, cut and empty bodies: never a 5xx."""
    response = closed.http.post(
        "/v1/completions", content=content, headers={"content-type": "application/json", **closed.http.headers}
    )
    assert response.status_code in (200, 400), response.text
    assert "Traceback" not in response.text


def test_v075_long_bodies_are_refused_before_they_are_read(closed: Server) -> None:
    """By the announced length at once, and as soon as what has come is too long."""
    error = closed.refused(status=413, prompt="x" * 300_000)
    assert "at most 200000" in error["message"]

    def chunks() -> Iterator[bytes]:
        for _ in range(30):
            yield b"x" * 10_000

    response = closed.http.post("/v1/completions", content=chunks())
    assert response.status_code == 413


def test_slow_bodies_are_cut_off(closed: Server) -> None:
    """A body that does not come in time is a 408, and the connection ends."""
    with connect(closed) as sock:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS[0]}\r\ncontent-length: 100\r\n"
        sock.sendall(f"{head}\r\n{{".encode())
        assert read_all(sock).startswith(b"HTTP/1.1 408")


def test_slow_headers_are_cut_off(closed: Server) -> None:
    """A connection that says nothing, or that dribbles headers, is closed; the second request of one too."""
    with connect(closed) as sock:
        assert read_all(sock).startswith(b"HTTP/1.1 408")
    with connect(closed) as sock:
        begun = time.monotonic()
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        try:
            for i in range(100):
                sock.sendall(f"x-{i}: y\r\n".encode())
                time.sleep(0.1)
        except OSError:
            pass
        assert time.monotonic() - begun < 9, "the dribbling went on to its end"
    with connect(closed) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /heal")
        content = read_all(sock)
        assert content.startswith(b"HTTP/1.1 200")
        assert b"HTTP/1.1 408" in content


def test_endless_headers_are_cut_off(closed: Server) -> None:
    """One header without end, and many: 431, and nothing is kept of them."""
    for filler in (b"a" * 1024, b"x-many: headers\r\n" * 64):
        with connect(closed) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: ")
            received = b""
            try:
                for _ in range(10_000):
                    sock.sendall(filler)
            except OSError:
                pass
            try:
                received = read_all(sock)
            except ConnectionError:
                received = b""
            assert received == b"" or received.startswith(b"HTTP/1.1 431")
    assert closed.http.get("/health").status_code == 200


def test_a_long_lived_stream_outlives_the_read_timeout(closed: Server) -> None:
    """The limits are on what the client sends, not on what it waits for."""
    begun = time.monotonic()
    events = closed.stream(prompt=[99, SLOW], max_tokens=50, ignore_eos=True)
    assert time.monotonic() - begun > 1.2
    assert "error" not in events[-1]


# ---- what is told ----


async def test_a_failure_is_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake in the server: the client gets a name for it, the log has that name and the traceback."""

    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("/home/somebody/model.gguf: a sentence that only the log shows")

    door = Door(
        broken,
        keys=Keys(),
        admit=lambda now: None,
        busy_paths=frozenset(),
        max_body_bytes=1,
        read_timeout=1,
        log=AccessLog("none"),
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://x") as http:
        response = await http.get("/v1/models")
    assert response.status_code == 500
    name = re.search(r"failure [0-9a-f]{12}", response.json()["error"]["message"])
    assert name is not None
    assert "model.gguf" not in response.text
    log = capsys.readouterr().err
    assert name[0] in log
    assert "Traceback" in log
    assert "a sentence that only the log shows" in log


def test_no_answer_shows_a_path(closed: Server, model_folder: Path) -> None:
    """Neither metrics, nor models, nor errors show where the model lies."""
    shown = [
        closed.http.get(path).text for path in ("/metrics", "/v1/models", "/health", "/openapi.json", "/v1/models/x")
    ]
    shown += [closed.post("completions", **body).text for body in ({}, {"prompt": "x"}, {"prompt": "x", "model": "y"})]
    for text in shown:
        assert str(model_folder) not in text
        assert "site-packages" not in text


def test_prompts_and_keys_are_not_logged(model_folder: Path) -> None:
    """A line per request with id, counts, times and status; nothing that was said, and no key."""
    with running(model_folder, api_keys=KEYS, log_format="json") as server:
        server.http.headers["authorization"] = f"Bearer {KEYS[0]}"
        answer = server.complete("xylophone sentence", max_tokens=3, user="somebody")
        server.stream(prompt="xylophone stream", max_tokens=4)
        server.refused(prompt="xylophone", top_p=7)
        server.http.get("/health?xylophone")
        httpx.get(server.url + "/v1/models", headers={"authorization": "Bearer xylophone"}, verify=False)
        _, stderr = server.stop()
    lines = [json.loads(line) for line in stderr.splitlines()]
    assert [line["status"] for line in lines] == [200, 200, 400, 200, 401]
    first = lines[0]
    assert first["id"] == answer["id"]
    assert (first["prompt_tokens"], first["output_tokens"], first["finish"]) == (
        answer["usage"]["prompt_tokens"],
        3,
        "length",
    )
    assert 0 < first["queued"] <= first["first_token"] <= first["seconds"]
    assert lines[1]["output_tokens"] == 4
    assert "top_p" in lines[2]["error"]
    for secret in ("xylophone", *KEYS):
        assert secret not in stderr


def test_log_lines_stay_lines(model_folder: Path) -> None:
    """As text, a path with spaces, quotes and line ends is quoted, and cut where it is long."""
    with running(model_folder, log_format="text") as server:
        server.http.get('/a%20b%0Arequest time="now"' + "x" * 1000)
        _, stderr = server.stop()
    [line] = stderr.splitlines()
    assert line.startswith("request time=")
    assert "\\nrequest time" in line
    assert len(line) < 700


# ---- time limits and full queues through HTTP ----


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One seat, two places in the queue, one second in it, three seconds for everything."""
    folder = write_model(tmp_path_factory.mktemp("models") / "narrow", fake={"step_time": 0.02})
    with running(
        folder,
        engine={"max_num_seqs": 1, "max_num_batched_tokens": 16},
        max_queued_requests=2,
        queue_timeout=1.0,
        request_timeout=3.0,
    ) as server:
        yield server


def queued(server: Server) -> tuple[float, float]:
    """Who runs and who waits."""
    metrics = server.metrics()
    return metrics["vllm_num_requests_running"], metrics["hopon_queue_places"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One seat, two places in the queue, no hurry."""
    folder = write_model(tmp_path_factory.mktemp("models") / "packed", fake={"step_time": 0.02})
    with running(folder, engine={"max_num_seqs": 1, "max_num_batched_tokens": 16}, max_queued_requests=2) as server:
        yield server


LONG: dict[str, Any] = {"prompt": [99], "max_tokens": 1000, "ignore_eos": True}


def test_v026_late_requests_end_with_a_reason(narrow: Server) -> None:
    """Those that get no seat in time are a 503 with the numbers, before headers; the one that runs too long a 504."""

    def one(i: int) -> tuple[httpx.Response, float]:
        time.sleep(i * 0.1)
        begun = time.monotonic()
        with narrow.client() as http:
            response = http.post("/v1/completions", json={**LONG, "stream": i == 1})
            return response, time.monotonic() - begun

    answers = at_once(3, one)
    assert [response.status_code for response, _ in answers] == [504, 503, 503]
    assert "request_timeout" in answers[0][0].json()["error"]["message"]
    assert answers[0][1] >= 3
    for response, seconds in answers[1:]:
        assert "no seat within 1 s (queue_timeout)" in response.json()["error"]["message"]
        assert int(response.headers["retry-after"]) >= 1
        assert seconds >= 1
    narrow.check_alive()
    metrics = narrow.metrics()
    assert metrics['hopon_timeouts_total{limit="queue"}'] == 2
    assert metrics['hopon_timeouts_total{limit="request"}'] == 1


def test_v026_a_stream_that_takes_too_long_ends_with_an_error(narrow: Server) -> None:
    """The status has been sent: the error is an event, and [DONE] comes."""
    events = narrow.stream(**LONG)
    assert events[-1]["error"]["code"] == 504
    narrow.check_alive()


def test_a_full_queue_refuses_at_once(packed: Server) -> None:
    """The fourth of four is refused while three are in, with a reason, numbers and a time to come back."""
    with packed.begin(LONG), packed.begin(LONG), packed.begin(LONG):
        eventually(lambda: queued(packed) == (1, 2))
        response = packed.post("completions", **LONG)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        error = response.json()["error"]
        assert error["type"] == "RateLimitError"
        assert "2 requests wait and 0 of 1 seats are free" in error["message"]
        # Nothing was read of it: even nonsense is told that the queue is full.
        assert packed.http.post("/v1/completions", content=b"nonsense").status_code == 429
        metrics = packed.metrics()
        assert metrics['vllm_admission_rejections_total{reason="max_num_queued_reqs"}'] >= 2
        for path in ("/health", "/metrics", "/v1/models"):
            assert packed.http.get(path).status_code == 200
    packed.check_alive()


def test_prompts_of_a_list_count_one_by_one(packed: Server) -> None:
    """A list of prompts takes as many places."""
    with packed.begin(LONG), packed.begin(LONG):
        eventually(lambda: queued(packed) == (1, 1))
        assert packed.post("completions", prompt=["a", "b"], max_tokens=1).status_code == 429
    packed.check_alive()


def test_tokens_of_a_full_queue(tmp_path: Path) -> None:
    """Waiting tokens are limited too; an exact count of a short text is let in where its bytes were too many."""
    folder = write_model(tmp_path / "m", fake={"step_time": 0.02})
    with running(folder, engine={"max_num_seqs": 1}, max_queued_tokens=100) as server:
        with server.begin(LONG):
            eventually(lambda: server.metrics()["vllm_num_requests_running"] == 1)
            with server.begin({**LONG, "prompt": [5] * 60, "max_tokens": 500}):
                eventually(lambda: server.metrics()["hopon_queue_places"] == 1)
                response = server.post("completions", prompt=[5] * 50, max_tokens=1)
                assert response.status_code == 429
                assert "max_queued_tokens 100" in response.json()["error"]["message"]
                with server.begin({**LONG, "prompt": "several words " * 10, "max_tokens": 500}):
                    eventually(lambda: server.metrics()["hopon_queue_places"] == 2)
        server.check_alive()
        assert server.metrics()['vllm_admission_rejections_total{reason="max_num_queued_tokens"}'] == 1


# ---- who goes first, through HTTP ----


def starts_first(server: Server, flood: dict[str, Any], guest: dict[str, Any]) -> int:
    """How many of ten requests have ended when one that came after them has."""
    done: list[str] = []

    def one(i: int) -> None:
        time.sleep(0.3 if i == 10 else i * 0.01)
        with server.client() as http:
            fields = guest if i == 10 else flood
            body = {"prompt": [99, i], "max_tokens": 6, "ignore_eos": True, **fields}
            assert http.post("/v1/completions", json=body).status_code == 200
        done.append("guest" if i == 10 else "flood")

    at_once(11, one)
    server.check_alive()
    return done.index("guest")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One seat, 30 ms a step, shared fairly between users."""
    folder = write_model(tmp_path_factory.mktemp("models") / "shared", fake={"step_time": 0.03})
    engine = {"max_num_seqs": 1, "policy_knobs": [["fair_share", "true"]]}
    with running(folder, engine=engine, fair_share="user") as server:
        yield server


def test_users_share_the_engine(shared: Server) -> None:
    """Behind ten requests of another user one is next but a few; behind ten of its own user it is last."""
    assert starts_first(shared, {"user": "flood"}, {"user": "guest"}) <= 5
    assert starts_first(shared, {"user": "flood"}, {"user": "flood"}) == 10


def test_v010_priority_over_http(shared: Server) -> None:
    """Within a user, a smaller number goes ahead of those that wait."""
    assert starts_first(shared, {"priority": 5}, {"priority": -5}) <= 5
