"""Every claim has a verdict that is not FAILS, and another one when its input is perturbed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hopon.cli.reproduce import check_and_print
from hopon.reproduce import command, engine
from hopon.reproduce.claim import Claim, Found, Group, Verdict, amount, between, equal, near
from hopon.workload.skewed import mulberry32

ROOT = Path(__file__).parent.parent.parent
STORIES = ROOT / "tests" / "data" / "stories260k"
ALL = [(group, claim) for group in command.GROUPS for claim in group.claims]
SIMULATED = ("anyscale", "allocators", "orca", "chunks")
QUICK = [
    (group, claim)
    for group, claim in ALL
    if not claim.slow and (group.name not in SIMULATED or claim.tag == "closed form")
]
LONG = [pair for pair in ALL if pair not in QUICK]


def _names(pairs: list[tuple[Group, Claim]]) -> list[str]:
    return [f"{group.name}: {claim.name}" for group, claim in pairs]


def _flips(claim: Claim) -> None:
    found = claim.check(claim.given)
    verdict = claim.verdict(found)
    assert verdict is not Verdict.FAILS, found.ours
    other = claim.check(claim.perturbed)
    assert claim.verdict(other) is not verdict, f"{found.ours} and {other.ours} are both {verdict}"


@pytest.mark.parametrize(("group", "claim"), QUICK, ids=_names(QUICK))
def test_a_perturbed_input_flips_the_verdict(group: Group, claim: Claim) -> None:
    """The check looks at its input: given, the claim comes out as said; perturbed, otherwise."""
    _flips(claim)


@pytest.mark.parametrize(("group", "claim"), LONG, ids=_names(LONG))
def test_a_perturbed_input_flips_the_verdict_of_a_simulation(
    group: Group, claim: Claim, effort: Callable[[int, int], int]
) -> None:
    """The same for claims that play thousands of requests; a group a run has to do here, all of them in the soak."""
    if not effort(0, 1) and (claim.slow or group.name != "chunks"):
        pytest.skip("long")
    _flips(claim)


def test_there_are_enough_of_them() -> None:
    """At least 60, of all three kinds, with names of their own, and with a sentence where one is assumed."""
    assert len(ALL) >= 60
    assert {claim.tag for _, claim in ALL} == {"closed form", "brute force", "hand-worked"}
    for group in command.GROUPS:
        names = [claim.name for claim in group.claims]
        assert len(set(names)) == len(names)
    for _, claim in ALL:
        assert claim.remark or not claim.assumed
        assert not claim.text.endswith(".")
        assert not claim.remark or claim.remark.endswith(".")


def test_what_differs_is_explained() -> None:
    """Without a remark, or where the explanation does not hold, a claim that is not as published fails."""
    parts = {"name": "a", "source": "b", "text": "c", "published": "d", "given": 0, "perturbed": 1}
    claim = Claim(tag="closed form", check=lambda value: equal(value, 0), remark="Why.", **parts)  # type: ignore[arg-type]
    bare = Claim(tag="closed form", check=lambda value: equal(value, 0), **parts)  # type: ignore[arg-type]
    assert claim.verdict(Found("1", False, True)) is Verdict.DIFFERS
    assert claim.verdict(Found("1", False, False)) is Verdict.FAILS
    assert bare.verdict(Found("1", False, True)) is Verdict.FAILS
    assert claim.verdict(Found("0", True)) is Verdict.HOLDS


def test_comparisons() -> None:
    """Exact, rounded, in a band; and how numbers are shown."""
    assert equal(3, 3).holds
    assert not equal(3.0001, 3).holds
    assert near(22.35, 22.4, within=0.05).holds
    assert not near(22.3, 22.4, within=0.05).holds
    assert between(1.0, 1.0, 2.0).holds
    assert not between(2.1, 1.0, 2.0).holds
    assert [amount(131_072, "B"), amount(3.093, "x"), amount(1.0, "x"), amount(1818.3)] == [
        "131,072 B",
        "x3.093",
        "x1",
        "1,818",
    ]


def test_the_generator_is_the_published_one() -> None:
    """mulberry32 by a second implementation, in signed 32-bit arithmetic as JavaScript does it."""

    def signed(value: int) -> int:
        value &= 0xFFFFFFFF
        return value - 2**32 if value >= 2**31 else value

    def unsigned(value: int) -> int:
        return value & 0xFFFFFFFF

    def imul(a: int, b: int) -> int:
        return signed(signed(a) * signed(b))

    state = 265056
    numbers = mulberry32(265056)
    for _ in range(1000):
        state = signed(state + 0x6D2B79F5)
        t = imul(state ^ (unsigned(state) >> 15), 1 | state)
        t = signed(t + imul(t ^ (unsigned(t) >> 7), 61 | t)) ^ t
        assert next(numbers) == unsigned(t ^ (unsigned(t) >> 14)) / 4294967296


def test_the_real_engine_runs_all_four() -> None:
    """On a tiny model: fewer and fewer passes, the same tokens; with equal lengths neither more nor less. No time is
    looked at."""
    group = engine.group(STORIES, 24)
    exact = [claim for claim in group.claims if claim.name in ("passes", "the same answers")]
    assert len(exact) == 2
    for claim in exact:
        _flips(claim)
    ratios = [claim for claim in group.claims if claim not in exact]
    for claim in ratios:
        assert "tok/s" in claim.check(claim.given).ours


def test_groups_are_chosen_by_name() -> None:
    """All, one, none of that name, and the engine's without a model."""
    assert len(command.chosen_groups(None, None, False)) == len(command.GROUPS)
    assert [group.name for group in command.chosen_groups("slots", None, False)] == ["slots"]
    assert [group.name for group in command.chosen_groups("engine", STORIES, False)] == ["engine"]
    with pytest.raises(ValueError, match=r"no group 'slot'; there are arithmetic, examples, slots, .*engine"):
        command.chosen_groups("slot", None, False)
    with pytest.raises(ValueError, match="needs a model on disk"):
        command.chosen_groups("engine", None, False)


def test_what_was_found_is_written_down() -> None:
    """Progress for each claim, a row for each in the JSON, with the verdict computed."""
    heard: list[tuple[str, float]] = []
    groups = command.chosen_groups("examples", None, False)
    outcomes = list(command.check(groups, False, lambda what, share: heard.append((what, share))))
    rows = json.loads(command.to_json(outcomes))["claims"]
    assert len(rows) == len(outcomes) == len(heard) == len(groups[0].claims)
    assert {row["verdict"] for row in rows} == {"holds", "differs"}
    assert all(row["ours"] and row["published"] and row["tag"] for row in rows)
    assert f"{len(rows)} claims" in command.summary(outcomes)


def test_the_command(tmp_path: Path) -> None:
    """It prints every claim with its tag, writes the JSON, and ends well; a group that is none is one line."""
    run = [sys.executable, "-m", "hopon", "reproduce"]
    path = tmp_path / "found.json"
    done = subprocess.run([*run, "--only", "examples", "--json", str(path)], capture_output=True, text=True, check=True)
    rows = json.loads(path.read_text(encoding="utf-8"))["claims"]
    assert done.stdout.count("hand-worked") >= len(rows)
    assert f"{len(rows)} claims" in done.stdout
    bad = subprocess.run([*run, "--only", "example"], capture_output=True, text=True)
    assert bad.returncode != 0
    assert "no group 'example'" in bad.stderr
    assert len(bad.stderr.strip().splitlines()) == 1
    late = subprocess.run([*run, "--json", str(tmp_path / "no" / "x.json")], capture_output=True, text=True)
    assert late.returncode != 0
    assert "no such folder" in late.stderr


def test_a_failing_claim_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends with a status when any claim fails."""
    wrong = Claim(
        name="a",
        source="b",
        text="c",
        published="1",
        tag="closed form",
        given=2,
        perturbed=1,
        check=lambda x: equal(x, 1),
    )
    monkeypatch.setattr(command, "GROUPS", (Group(name="g", title="t", claims=(wrong,)),))
    with pytest.raises(SystemExit) as ended:
        check_and_print(False, "g", None, None)
    assert ended.value.code == 1


def test_slow_claims_need_to_be_asked_for() -> None:
    """Without ``full`` they are left out."""
    slow = [claim for _, claim in ALL if claim.slow]
    assert slow
    quiet: command.Report = lambda what, share: None  # noqa: E731
    group = Group(name="a", title="b", claims=(slow[0], command.GROUPS[0].claims[0]))
    assert [one.claim for one in command.check([group], False, quiet)] == [group.claims[1]]


def test_the_document_is_up_to_date() -> None:
    """docs/reproduce.md is what ``hopon reproduce --markdown`` prints, and no verdict is in it."""
    text = (ROOT / command.DOCUMENT).read_text(encoding="utf-8")
    assert text == command.markdown(), f"run: hopon reproduce --markdown > {command.DOCUMENT}"
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == len(ALL) + len(command.GROUPS)
    assert all(row.count("|") == 6 for row in rows)
