"""A browser for those tests that need one: Chromium of the system, driven by Playwright."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import uvicorn

from hopon.lab.app import create_app
from hopon.lab.files import find_browser
from tests.serve.conftest import model_folder

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["model_folder"]


@pytest.fixture(scope="module")  # while it lives, its event loop counts as running, and no other can run
def browser() -> Iterator[Browser]:
    """Skips where there is no Chromium or no Playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    try:
        path = find_browser()
    except FileNotFoundError:
        pytest.skip("there is no Chromium on the path")
    with playwright.sync_playwright() as driver:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        with driver.chromium.launch(executable_path=path, args=flags) as chromium:
            yield chromium


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page on which no script may fail."""
    problems: list[str] = []
    with browser.new_page(viewport={"width": 1280, "height": 900}) as page:
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        yield page
    assert not problems


@pytest.fixture(scope="session")
def lab() -> Iterator[str]:
    """The address of a lab."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(create_app(), log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.should_exit = True
        thread.join()
