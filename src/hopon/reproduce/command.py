"""``hopon reproduce``: checks claims, tells what it found, and knows how to write it down. It keeps no verdict."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hopon.reproduce import allocators, anyscale, arithmetic, chunks, examples, orca, rules, slots
from hopon.reproduce.claim import Claim, Found, Group, Verdict

if TYPE_CHECKING:
    from rich.console import RenderableType

GROUPS: Sequence[Group] = (
    arithmetic.GROUP,
    examples.GROUP,
    slots.GROUP,
    rules.GROUP,
    anyscale.GROUP,
    allocators.GROUP,
    orca.GROUP,
    chunks.GROUP,
)
"""All that need no model."""

ENGINE = "engine"
DOCUMENT = "docs/reproduce.md"
_FEW, _MANY = 24, 96  # requests on the real engine

Report = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A claim, what was found and how long that took."""

    group: Group
    claim: Claim
    found: Found
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """Computed, like all of it."""
        return self.claim.verdict(self.found)


def chosen_groups(only: str | None, model: Path | None, full: bool) -> list[Group]:
    """Groups to check; those of the real engine where there is a model.

    Raises:
        ValueError: no such group, or it needs a model that is not there.
    """
    groups = list(GROUPS)
    if model is not None:
        from hopon.reproduce import engine

        groups.append(engine.group(model, _MANY if full else _FEW))
    if only is None:
        return groups
    chosen = [one for one in groups if one.name == only]
    if not chosen and only == ENGINE:
        raise ValueError(f"the group {ENGINE} needs a model on disk: hopon pull smollm2-135m")
    if not chosen:
        raise ValueError(f"no group {only!r}; there are {', '.join(one.name for one in GROUPS)}, {ENGINE}")
    return chosen


def check(groups: Sequence[Group], full: bool, report: Report) -> Iterator[Outcome]:
    """One claim after the other; ``report`` hears which, and which share is done."""
    todo = [(group, claim) for group in groups for claim in group.claims if full or not claim.slow]
    for done, (group, claim) in enumerate(todo):
        report(f"{group.name}: {claim.name}", done / len(todo))
        start = time.perf_counter()
        found = claim.check(claim.given)
        yield Outcome(group=group, claim=claim, found=found, seconds=time.perf_counter() - start)


def to_json(outcomes: Sequence[Outcome]) -> str:
    """All of it."""
    rows = [
        {
            "group": one.group.name,
            "name": one.claim.name,
            "source": one.claim.source,
            "claim": one.claim.text,
            "tag": one.claim.tag,
            "published": one.claim.published,
            "ours": one.found.ours,
            "verdict": one.verdict.value,
            "remark": one.claim.remark,
            "seconds": round(one.seconds, 3),
        }
        for one in outcomes
    ]
    return json.dumps({"hopon": "reproduce", "version": 1, "claims": rows}, indent=1, ensure_ascii=False) + "\n"


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line."""
    counts = {verdict: sum(one.verdict is verdict for one in outcomes) for verdict in Verdict}
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return f"{len(outcomes)} claims: {words}; {sum(one.seconds for one in outcomes):.0f} s"


_STYLES = {Verdict.HOLDS: "green", Verdict.ASSUMED: "green", Verdict.DIFFERS: "yellow", Verdict.FAILS: "bold red"}

LEGEND = (
    "holds: as published. holds if: as published, with inputs that are not published, see the remark. differs: not "
    "as said, for the reason given, which was computed, too. Tags: closed form = a formula; brute force = every pass "
    "played through the scheduler; hand-worked = an example small enough to be worked by hand."
)


def table(group: Group, outcomes: Sequence[Outcome]) -> RenderableType:
    """One group, for people."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    made = Table(
        title=f"{group.name}: {group.title}", title_justify="left", title_style="bold", box=SIMPLE, expand=True
    )
    made.add_column("claim", ratio=5)
    made.add_column("published", ratio=2)
    made.add_column("ours", ratio=3)
    made.add_column("verdict", no_wrap=True)
    made.add_column("tag", no_wrap=True)
    source = ""
    for one in outcomes:
        if one.claim.source != source:
            source = one.claim.source
            made.add_row(Text(source, style="bold cyan"))
        text = Text(one.claim.text)
        if one.claim.remark:
            text.append(f"\n{one.claim.remark}", style="dim italic")
        verdict = Text(one.verdict, style=_STYLES[one.verdict])
        made.add_row(text, one.claim.published, one.found.ours, verdict, one.claim.tag)
    return made


_SOURCES = """\
Sources. Papers: Yu et al., Orca, OSDI'22. Kwon et al., PagedAttention (vLLM), SOSP'23. Agrawal et al., Sarathi-Serve,
OSDI'24. Articles: Anyscale, "How continuous batching enables 23x throughput in LLM inference while reducing p50
latency", June 2023, and its benchmark scripts. DeepSpeed-FastGen's blog, November 2023. Articles in Chinese:
"LLM服务端Continuous Batching详解：GPU利用率背后的工程权衡"
(demo: https://dev48v.infy.uk/ai/days/day60-continuous-batching.html);
"连续批处理如何提升大模型吞吐量？读懂调度、延迟与显存限制";
one that explains Orca with four requests of 5, 20, 3 and 50 tokens; one on the history from BatchMaker to
TensorRT-LLM. Lines from "hopon" are our own, beside the others.""".splitlines()


def markdown() -> str:
    """The claims as a document, without any verdict: those are computed where it is run."""
    count = sum(len(group.claims) for group in GROUPS)
    lines = [
        "# What is said about continuous batching, checked",
        "",
        "`hopon reproduce` checks every claim below on your machine and prints *claim, published, ours, verdict*.",
        "Verdicts are computed, never stored, so none stands here. `--full` adds the slow ones, `--only GROUP` takes",
        "one group, `--json FILE` writes all of it. This file is `hopon reproduce --markdown`.",
        "",
        f"{count} claims, and those of the group `{ENGINE}`, which play Anyscale's comparison at an eighth of its size",
        "on the real engine where SmolLM2 is on disk (`hopon pull smollm2-135m`).",
        "",
        LEGEND,
        "",
        *_SOURCES,
        "",
    ]
    for group in GROUPS:
        lines += [
            f"## {group.name}: {group.title}",
            "",
            "| claim | published | tag | source | remark |",
            "|---|---|---|---|---|",
        ]
        for claim in group.claims:
            cells = (claim.text, claim.published, claim.tag, claim.source, claim.remark)
            lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)
