"""The presets as a reader meets them: a page for each, for the terminal and for ``docs/policies.md``.

Everything comes from the presets themselves: their cards, their knobs and defaults, the settings that they publish, and
the sentences of their docstrings.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

from hopon.core.config import EngineOptions, SchedulerConfig
from hopon.core.policy.preset import Card, Preset
from hopon.core.policy.presets import PRESETS, preset_class

if TYPE_CHECKING:
    from rich.console import RenderableType

DOCUMENT = "docs/policies.md"

SENTENCES: Mapping[str, str] = {
    "short_waits": "Why a short request waits here",
    "joins": "When a newcomer joins",
    "prefill": "How prompts are computed",
    "memory": "Memory",
    "eviction": "When memory is short",
    "limits": "Known limits",
    "not_modelled": "Not modelled in hopon",
}
"""Fields of a card and what stands before them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """One thing that can be set.

    Args:
        name: as hopon calls it.
        default: as text.
        original: what the original calls it; empty where it has none.
        meaning: in a sentence.
        is_setting: a setting of the scheduler (a flag of its own), not a knob of the policy.
    """

    name: str
    default: str
    original: str
    meaning: str
    is_setting: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A preset: its name, its card, its knobs and the settings that it publishes."""

    name: str
    card: Card
    knobs: tuple[Knob, ...]


def page(name: str) -> Page:
    """The page of a preset, by name or ``module:Class``.

    Raises:
        ValueError: there is no such preset, or it has no card.
    """
    found = preset_class(name)
    card = getattr(found, "card", None)
    if not isinstance(card, Card):
        raise ValueError(f"policy {name!r} has no card: a class attribute of type hopon.core.policy.preset.Card")
    return Page(name=name, card=card, knobs=(*_knobs(found, card), *_settings(found, card)))


def pages() -> list[Page]:
    """All of hopon's own."""
    return [page(name) for name in PRESETS]


def _knobs(found: type[Preset], card: Card) -> list[Knob]:
    meanings: dict[str, str] = {}
    for one in reversed(found.__mro__):
        meanings |= _arguments(one)
    return [
        Knob(
            name=field.name,
            default=_text(field.default),
            original=card.flags.get(field.name, ""),
            meaning=meanings.get(field.name, ""),
            is_setting=False,
        )
        for field in fields(cast(Any, found))
    ]


def _settings(found: type[Preset], card: Card) -> list[Knob]:
    """What the system publishes, and what it has a name of its own for."""
    preset = found()
    published, longer = preset.settings(4096), preset.settings(8192)
    general = EngineOptions(model="")
    meanings = _arguments(SchedulerConfig)
    knobs = {field.name for field in fields(cast(Any, found))}
    found_settings = []
    for field in fields(SchedulerConfig):
        name = field.name
        if (name not in published and name not in card.flags) or name in knobs:
            continue
        if name not in published:
            default = _text(getattr(general, name)) if hasattr(general, name) else "as memory allows"
        elif published[name] != longer[name]:
            default = "follows max_model_len"
        else:
            default = _text(published[name])
        found_settings.append(
            Knob(
                name=name,
                default=default,
                original=card.flags.get(name, ""),
                meaning=meanings[name],
                is_setting=True,
            )
        )
    return found_settings


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value)


def _arguments(found: type) -> dict[str, str]:
    """The ``Args:`` of a class's own docstring: name -> text."""
    text = inspect.cleandoc(found.__dict__.get("__doc__") or "")
    _, _, section = text.partition("\nArgs:\n")
    section = section.partition("\n\n")[0]
    parts = re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", section, flags=re.M)
    return {name: " ".join(words.split()).replace("``", "`") for name, words in parts}


# ---- docs/policies.md ----

_INTRODUCTION = """\
# The policies

hopon's scheduler can be any of these systems: `--policy NAME`, with knobs as `--policy-knob NAME=VALUE` (`serve`,
`simulate`) or `--policy "NAME KNOB=VALUE"` (`compare`). The kernels, the requests and the answers are the same under
all of them; only *when* something is computed differs. `hopon policies NAME` prints one of these pages; this file is
`hopon policies --markdown`.

A request that has arrived waits for one of these, in every system:

- **a seat**: at most so many requests run at once (`max_num_seqs`, slots, batch size);
- **memory**: its keys and values need room in the KV cache, for its prompt at least, in some systems for its whole
  possible answer;
- **tokens of a pass**: prompts share what a pass may compute (`max_num_batched_tokens`, chunk size);
- **the rule**: the batch has to end first, a turn has to come, others stand ahead of it.

Then it computes its prompt and gets its first token. Later it waits when passes leave it out, or when it loses its
memory to somebody (preemption) and has to compute it again. What is *short* about a short request is its answer: who
has to say three words suffers most from waiting for somebody who says three hundred.

Words: [glossary](glossary.md).
"""


def markdown() -> str:
    """All pages as one document."""
    parts = [_INTRODUCTION, _overview(pages())]
    for one in pages():
        parts.append(_section(one))
    return "\n".join(parts)


def _overview(all_pages: list[Page]) -> str:
    lines = ["## At a glance", "", "| policy | system | why a short request waits here |", "|---|---|---|"]
    lines += [f"| [{one.name}](#{one.name}) | {one.card.system} | {one.card.short_waits} |" for one in all_pages]
    return "\n".join([*lines, ""])


def _section(one: Page) -> str:
    card = one.card
    lines = [f"## {one.name}", "", f"{card.system}. Also called: {', '.join(card.aliases)}.", ""]
    lines += [f"- **{title}.** {getattr(card, name)}" for name, title in SENTENCES.items()]
    lines += [f"- **Source.** {card.source}. Date: {card.date}.", ""]
    for title, wanted in (("knob", False), ("setting", True)):
        chosen = [knob for knob in one.knobs if knob.is_setting is wanted]
        if chosen:
            lines += [f"| {title} | default | in the original | meaning |", "|---|---|---|---|"]
            lines += [
                f"| `{k.name}` | {k.default} | {f'`{k.original}`' if k.original else '-'} | {k.meaning} |"
                for k in chosen
            ]
            lines.append("")
    return "\n".join(lines)


# ---- the terminal ----


def overview() -> RenderableType:
    """A table of all of hopon's own."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 1, 0), header_style="bold")
    table.add_column("policy", style="bold", no_wrap=True)
    table.add_column("system", ratio=1)
    table.add_column("why a short request waits here", ratio=2)
    for one in pages():
        table.add_row(one.name, one.card.system, one.card.short_waits)
    return table


def leaf(one: Page) -> RenderableType:
    """One page."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    card = one.card
    sentences = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    sentences.add_column(style="bold", max_width=24)
    sentences.add_column()
    sentences.add_row("Also called", ", ".join(card.aliases))
    for name, title in SENTENCES.items():
        sentences.add_row(title, getattr(card, name))
    sentences.add_row("Source", f"{card.source} ({card.date})")
    parts: list[RenderableType] = [Text(f"{one.name}: {card.system}\n", style="bold"), sentences]
    for title, wanted in (("knob (--policy-knob)", False), ("setting", True)):
        chosen = [knob for knob in one.knobs if knob.is_setting is wanted]
        if not chosen:
            continue
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column(title, no_wrap=True)
        for head in ("default", "in the original", "meaning"):
            table.add_column(head, overflow="fold")
        for knob in chosen:
            table.add_row(knob.name, knob.default, knob.original or "-", knob.meaning.replace("`", ""))
        parts += [Text(), table]
    return Group(*parts)
