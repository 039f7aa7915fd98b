"""The live view of a running server, over HTTP and in a browser."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hopon.lab.page import render
from hopon.lab.play import about_policy
from tests.serve.conftest import Server, at_once, eventually, running, write_model

if TYPE_CHECKING:
    from playwright.sync_api import Page

PAGE = render("live", about_policy("hopon", "hopon"))
SEATS = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A slow model with three seats."""
    folder = write_model(
        tmp_path_factory.mktemp("live") / "fake",
        config={"eos_token_id": 0, "vocab_size": 49152},
        fake={"step_time": 0.02},
    )
    with running(folder, lab_page=PAGE, engine={"max_num_seqs": SEATS}) as server:
        yield server


def messages(server: Server) -> Generator[dict[str, Any], None, None]:
    with server.http.stream("GET", "/lab/events") as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))


def test_steps_are_those_of_the_engine(server: Server) -> None:
    """Five requests for three seats: every answer token is in the seats shown, and never more than there are seats."""
    stream = messages(server)
    hello = next(stream)
    assert (hello["seats"], hello["model"]) == (SEATS, "fake")
    before = server.metrics()["vllm_generation_tokens_total"]
    lengths = [12, 20, 8, 15, 25]
    at_once(5, lambda i: server.complete(f"number {i}", max_tokens=lengths[i], ignore_eos=True))
    steps: list[list[Any]] = []
    queues: list[list[Any]] = []
    for message in stream:
        steps += message["steps"]
        queues.append(message["queue"])
        if message["steps"] == [] and message["running"] == 0:
            break
    stream.close()
    assert server.metrics()["vllm_generation_tokens_total"] - before == sum(lengths)
    tokens = sum(step[4].count("p") + step[4].count("d") for step in steps)
    assert tokens == sum(lengths)
    assert all(len(step[4]) == SEATS for step in steps)
    assert any(step[3][0] for step in steps), "somebody waited for a seat"
    assert any(queues)
    who = {number for step in steps for _, number in step[5] if number}
    assert len(who) == len(lengths)


def test_nobody_sees_anything_without_a_key(model_folder: Path) -> None:
    """The page is open and shows nothing; its events need the key, as everything does."""
    with running(model_folder, lab_page=PAGE, api_keys=["secret"]) as server:
        assert server.http.get("/lab").status_code == 200
        assert server.http.get("/lab/events").status_code == 401
        with server.http.stream("GET", "/lab/events", headers={"authorization": "Bearer secret"}) as response:
            assert response.status_code == 200


def test_there_is_no_page_unless_asked_for(model_folder: Path) -> None:
    """And a server with an open page ends in order."""
    with running(model_folder) as server:
        assert server.http.get("/lab").status_code == 404
        assert server.http.get("/lab/events").status_code == 404


def test_a_server_with_an_open_page_ends(model_folder: Path) -> None:
    """The stream ends with the server, not the other way round."""
    with running(model_folder, lab_page=PAGE) as server:
        stream = messages(server)
        next(stream)
        server.process.terminate()
        for _ in stream:
            pass
        status, _ = server.end()
        assert status == 0


def test_the_page_shows_a_servers_seats(server: Server, page: Page) -> None:
    """Running and waiting requests are those of /metrics while they run, and none when they have left."""
    page.goto(f"{server.url}/lab")
    page.wait_for_function("document.body.innerText.includes('3 seats')")

    def watch(i: int) -> None:
        server.complete(f"long {i}", max_tokens=150, ignore_eos=True)

    threads = [threading.Thread(target=watch, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    eventually(lambda: server.metrics()["vllm_num_requests_waiting"] == 2)
    page.wait_for_function("document.querySelector('[data-tile=running] b').textContent === '3'")
    page.wait_for_function("document.querySelector('[data-tile=waiting] b').textContent === '2'")
    metrics = server.metrics()
    assert (metrics["vllm_num_requests_running"], metrics["vllm_num_requests_waiting"]) == (3, 2)
    assert "No seat is free: all 3 are taken" in page.locator(".why").inner_text()
    for thread in threads:
        thread.join()
    page.wait_for_function("document.querySelector('[data-tile=running] b').textContent === '0'")
    assert int(page.evaluate("document.body.dataset.steps")) > 150
