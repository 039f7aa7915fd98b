"""The lab over HTTP: the page, its runs, and the command line's totals for the same setting."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from hopon.cli import app as command_line
from hopon.core.policy.presets import PRESETS
from hopon.lab import files
from hopon.lab.app import create_app
from hopon.lab.play import Setting, run

CLIENT = TestClient(create_app())


def test_the_page_needs_nothing_else() -> None:
    """One document with style, script and choices in it, and not one address of another machine."""
    page = CLIENT.get("/").text
    for words in ("/*STYLE*/", "/*SCRIPT*/", "/*DATA*/", "http://", "https://"):
        assert words not in page
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert [preset["name"] for preset in data["presets"]] == list(PRESETS)


def totals(**setting: Any) -> list[dict[str, Any]]:
    response = CLIENT.post("/api/run", json=setting)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["runs"]
    return found


@pytest.mark.parametrize(
    "setting",
    [
        {"seed": 3, "presets": ["static", "hopon", "sglang"], "skew": 0.4, "speed": 2.0},
        {"trace": "drawn", "arrivals": "gamma", "rate": 8.0, "requests": 30, "cost": "linear", "presets": ["vllm"]},
        {"cost": "roofline", "requests": 16, "presets": ["hf-pipeline", "static group_size=4"], "chunk": 64},
    ],
)
def test_totals_are_those_of_the_command_line(setting: dict[str, Any], tmp_path: Path) -> None:
    """The command that the page shows gives the page's totals."""
    for found in totals(**setting):
        output = tmp_path / "out.json"
        words = [*shlex.split(found["command"])[1:], "--json", str(output)]
        done = CliRunner().invoke(command_line, words)
        assert done.exit_code == 0, done.output
        assert json.loads(output.read_text())["totals"] == found["totals"]


def test_another_setting_gives_another_picture() -> None:
    """A seed and a number of seats each change both timelines."""
    first = totals(requests=16)
    for other in (totals(requests=16, seed=1), totals(requests=16, seats=4)):
        for one, two in zip(first, other, strict=True):
            assert one["rows"] != two["rows"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"requests": 100_000}, "requests must be in [1, 1000], got 100000"),
        ({"skew": 7.0}, "the skew must be in [0, 1], got 7.0"),
        ({"colour": "red"}, "colour"),
        ({"presets": ["nobody"]}, "unknown policy 'nobody'"),
        ({"seats": 64, "budget": 8}, "max_num_batched_tokens 8 must be at least max_num_seqs 64"),
    ],
)
def test_what_cannot_work_is_said(body: dict[str, Any], words: str) -> None:
    """Values and limits are named; nothing is guessed."""
    response = CLIENT.post("/api/run", json=body)
    if response.status_code == 200:  # the setting is fine, but not for this preset
        assert all(words in found["error"] for found in response.json()["runs"])
    else:
        assert response.status_code == 400
        assert words in response.json()["error"]


def test_a_preset_that_cannot_work_leaves_the_others() -> None:
    """vllm-v0 has no chunks, so a small budget is none for it."""
    static, old = totals(presets=["static", "vllm-v0"], budget=64)
    assert static["totals"]["passes"] > 0
    assert "without chunked prefill" in old["error"]


def test_a_page_from_the_command_line(tmp_path: Path) -> None:
    """``simulate --html`` writes the picture of the very run that it reports."""
    words = "simulate --policy orca --skew 0.5 --num-requests 12 --cost passes --max-num-seqs 4".split()
    page, output = tmp_path / "out.html", tmp_path / "out.json"
    done = CliRunner().invoke(command_line, [*words, "--html", str(page), "--json", str(output)])
    assert done.exit_code == 0, done.output
    data = json.loads(page.read_text().partition('id="data">')[2].partition("</script>")[0])
    assert data["mode"] == "file"
    assert data["runs"][0]["totals"] == json.loads(output.read_text())["totals"]


def test_a_picture_of_merged_steps_is_refused() -> None:
    """The fast mode has no single steps to show."""
    done = CliRunner().invoke(command_line, ["simulate", "--fast", "--num-requests", "4", "--html", "/tmp/x.html"])
    assert done.exit_code != 0
    assert "leave the fast mode" in str(done.exception) + done.output


def test_a_still_without_a_browser(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error names what was looked for, before anything is simulated."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"--png needs Chromium.*chromium-browser"):
        files.Picture(None, tmp_path / "out.png")


def test_pages_of_other_sites_cannot_make_it_work() -> None:
    """A form or a plain request from elsewhere is no setting."""
    assert CLIENT.post("/api/run", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415


def test_the_command() -> None:
    """It says where it listens, answers there, and ends at Ctrl-C."""
    words = [sys.executable, "-m", "hopon", "lab", "--no-open", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[2]
        assert "hopon lab" in httpx.get(url, verify=False).text
        process.send_signal(signal.SIGINT)
        assert process.wait(20) in (0, 130)


def test_every_preset_has_a_picture() -> None:
    """All of them play the first view, and say why a short request waits."""
    names = list(PRESETS)
    for start in range(0, len(names), 6):
        found = run(Setting(presets=tuple(names[start : start + 6]), requests=24))
        for one in found["runs"]:
            assert one["totals"]["passes"] == len(one["steps"]["start"]) > 0
            assert one["card"]["short_waits"]
