"""The page in a real browser: controls change both pictures, totals are the command line's, keys work."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.testing import CliRunner

from hopon.cli import app as command_line

if TYPE_CHECKING:
    from playwright.sync_api import Page


def ready(page: Page, answer: int = 1) -> None:
    """Wait until this many answers of the simulator have been drawn."""
    page.wait_for_function(f"Number(document.body.dataset.answer || 0) >= {answer}")
    page.wait_for_function("!document.body.classList.contains('busy')")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def pictures(page: Page) -> list[str]:
    """What is drawn over all passes, system by system."""
    found: list[str] = page.evaluate("[...document.querySelectorAll('canvas.overview')].map((c) => c.toDataURL())")
    return found


def tile(page: Page, policy: str, name: str) -> list[str]:
    """A number and what stands below it."""
    return page.locator(f"[data-policy={policy}] [data-tile={name}]").inner_text().split("\n")


def slide(page: Page, control: str, index: int) -> None:
    page.eval_on_selector(
        f"#c-{control}", f"(c) => {{ c.value = {index}; c.dispatchEvent(new Event('input', {{bubbles: true}})); }}"
    )


def test_a_slider_changes_both_pictures_and_totals_are_the_command_lines(page: Page, lab: str, tmp_path: Path) -> None:
    """The first view is the article's; other seats, other pictures; the command that is shown gives its numbers."""
    page.goto(lab)
    ready(page)
    assert tile(page, "static", "pass")[1] == "of 3,470 passes"
    assert tile(page, "hopon", "pass")[1] == "of 1,122 passes"
    before = pictures(page)
    slide(page, "seats", 3)
    ready(page, 2)
    after = pictures(page)
    assert len(before) == len(after) == 2
    assert all(one != other for one, other in zip(before, after, strict=True))
    assert "seats=4" in page.url
    page.keyboard.press("End")
    for policy in ("static", "hopon"):
        page.wait_for_function(
            f"document.querySelector('[data-policy={policy}] [data-tile=finished] b').textContent === '64'"
        )
        command = page.locator(f"[data-policy={policy}] code").text_content() or ""
        output = tmp_path / f"{policy}.json"
        done = CliRunner().invoke(command_line, [*shlex.split(command)[1:], "--json", str(output)])
        assert done.exit_code == 0, done.output
        totals: dict[str, Any] = json.loads(output.read_text())["totals"]
        assert tile(page, policy, "pass") == [f"{totals['passes']:,}", f"of {totals['passes']:,} passes"]
        share = 100 * totals["utilisation"]
        assert tile(page, policy, "useful")[0] in (f"{share:.0f} %", f"{share:.1f} %")


def test_keys(page: Page, lab: str) -> None:
    """Arrows step, space plays and pauses, plus is faster, Home goes to the beginning."""
    page.goto(f"{lab}#at=100")
    ready(page)
    for key, place in (("ArrowRight", 101), ("Shift+ArrowRight", 111), ("ArrowLeft", 110), ("Home", 0)):
        page.keyboard.press(key)
        page.wait_for_function(f"document.body.dataset.x === '{place}'")
    page.keyboard.press("+")
    page.wait_for_function("document.body.innerText.includes('150 passes/s')")
    page.keyboard.press("Space")
    page.wait_for_function("Number(document.body.dataset.x) > 5")
    page.keyboard.press("Space")
    page.get_by_label("Play", exact=True).wait_for()


def test_an_address_is_the_whole_state(page: Page, lab: str) -> None:
    """A shared link shows the same systems, the same setting and the same place."""
    page.goto(f"{lab}#presets=vllm|orca|tgi&seats=4&requests=16&blocks=64&at=77")
    ready(page)
    policies = page.eval_on_selector_all(".panel", "(all) => all.map((one) => one.dataset.policy)")
    assert policies == ["vllm", "orca", "tgi"]
    assert tile(page, "orca", "pass")[0] == "77"
    page.get_by_role("button", name="Remove orca").click()
    ready(page, 2)
    assert page.locator("[data-policy=orca]").count() == 0
    assert "vllm%7Ctgi" in page.url


def test_pointing_says_why_a_request_waits(page: Page, lab: str) -> None:
    """In static batching a request waits for the batch, in hopon for a seat."""
    page.goto(f"{lab}#at=393")
    ready(page)
    for policy, words in (("static", "nobody joins it"), ("hopon", "No seat is free")):
        chip = page.locator(f"[data-policy={policy}] .chip").nth(1)
        chip.hover()
        told = page.locator("#tip").inner_text()
        assert words in told
        assert "1 ahead of it in line" in told
        assert "waits" in told


def test_a_preset_that_cannot_work_says_so(page: Page, lab: str) -> None:
    """The other one is shown all the same."""
    page.goto(f"{lab}#presets=hopon|vllm-v0&budget=64")
    ready(page)
    assert "without chunked prefill" in page.locator("[data-policy=vllm-v0]").inner_text()
    assert page.locator("[data-policy=hopon] canvas").count() == 2


def test_the_file_shows_the_run(page: Page, tmp_path: Path) -> None:
    """A page written by the command line draws its picture without any server."""
    target = tmp_path / "out.html"
    words = "simulate --policy sarathi --skew 0.6 --num-requests 16 --cost linear --max-num-seqs 4 --html".split()
    done = CliRunner().invoke(command_line, [*words, str(target)])
    assert done.exit_code == 0, done.output
    page.goto(target.as_uri())
    page.wait_for_selector("[data-policy=sarathi] canvas")
    page.keyboard.press("End")
    page.wait_for_function("document.querySelector('[data-tile=finished] b').textContent === '16'")


def test_a_still(browser: object, tmp_path: Path) -> None:
    """``--png`` is a picture of some size."""
    target = tmp_path / "out.png"
    words = "simulate --policy orca --skew 0.6 --num-requests 8 --cost passes --max-num-seqs 4 --png".split()
    done = CliRunner().invoke(command_line, [*words, str(target)])
    assert done.exit_code == 0, done.output
    content = target.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 20_000
