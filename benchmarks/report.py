"""What one call of the benchmark found out, and the report that is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from benchmarks.bound import ceiling, fraction
from benchmarks.measure import Run, median
from benchmarks.peaks import words
from benchmarks.quality import Cost
from benchmarks.servers import Hopon, Memory, Server
from hopon.bench.manifest import machine
from hopon.model.config import ModelConfig

FOREIGN_LIMIT = 0.05
"""Runs during which others used more of the machine are marked: they say little."""

EXPLAINED = (
    "In W5, TTFT is that of the long prompts; ITL and output tokens are those of the streams. Of the ceiling: linear "
    "layers only, over the peak above."
)


@dataclass(kw_only=True, slots=True)
class Found:
    """Everything that is known at the end; by label of the server where that is a key.

    Args:
        command: how the benchmark was called.
        own: the hopons that it starts.
        repeats: runs of each workload and server.
        config: of the model that they serve.
        peaks: of the machine, see ``benchmarks.peaks``; empty when they could not be measured.
        runs: in the order in which they were played.
        seconds_to_ready: of every start.
        settings: what each hopon tells of itself.
        introductions: what each has printed.
        memory: after W1.
        quality: cost of each precision on each text; empty unless asked for.
    """

    command: str
    own: Sequence[Hopon]
    repeats: int
    config: ModelConfig
    peaks: Mapping[str, float]
    runs: list[Run] = field(default_factory=list)
    seconds_to_ready: dict[str, list[float]] = field(default_factory=dict)
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    introductions: dict[str, str] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)
    quality: dict[str, dict[str, Cost]] = field(default_factory=dict)

    def note_start(self, server: Server) -> None:
        """Remember what a server of our own says of itself; nothing of one that ran already."""
        if server.seconds_to_ready is not None:
            self.seconds_to_ready.setdefault(server.label, []).append(server.seconds_to_ready)
            self.settings[server.label] = server.settings()
            self.introductions[server.label] = server.introduction()

    def add(self, run: Run) -> None:
        """Keep a run, with its fraction of the ceiling where it has one."""
        if (peak := self.ceiling(run.workload, run.server)) is not None:
            size = int(self.settings[run.server]["hopon_weight_bytes"])
            run = replace(run, fraction=fraction(run, peak, self.peaks, self.config, size))
        self.runs.append(run)

    def ceiling(self, workload: str, label: str) -> str | None:
        """Name of the peak that a run is compared with; None for a server that is not ours."""
        return ceiling(workload, self.settings[label]["hopon_dtype"]) if label in self.settings else None

    def groups(self) -> dict[tuple[str, str], list[Run]]:
        """Runs by workload and server."""
        groups: dict[tuple[str, str], list[Run]] = {}
        for run in self.runs:
            groups.setdefault((run.workload, run.server), []).append(run)
        return groups

    def content(self) -> dict[str, Any]:
        """All of it, for a file."""
        return {
            "command": self.command,
            "machine": machine(),
            "peaks": dict(self.peaks),
            "runs": [asdict(run) for run in self.runs],
            "ceilings": {f"{name} {label}": self.ceiling(name, label) for name, label in self.groups()},
            "seconds_to_ready": self.seconds_to_ready,
            "memory_after_w1": {label: asdict(memory) for label, memory in self.memory.items()},
            "settings": self.settings,
            "introductions": self.introductions,
            "quality": {label: {text: asdict(cost) for text, cost in of.items()} for label, of in self.quality.items()},
        }


def report(found: Found) -> str:
    """The tables in markdown, with everything needed to repeat them."""
    peaks = words(found.peaks) if found.peaks else "not measured"
    lines = [
        f"`{found.command}`",
        "",
        f"Machine: {machine()}. Medians of {found.repeats} runs.",
        "",
        f"Peaks of this machine, before the first run: {peaks}.",
        "",
        *(_introduction(hopon, found) for hopon in found.own),
        "",
        "| workload | server | output tok/s | prompt tok/s | of the ceiling | TTFT p50 / p95 ms "
        "| ITL p50 / p95 / p99 / max ms | cached tokens | others' CPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    notes: list[str] = []
    for (name, label), group in found.groups().items():
        middle = median(group)
        void = [run.void for run in group if run.void]
        mark = "" if not void else " VOID" if middle.void else " *"
        if void:
            notes.append(f"- {name} {label}: {len(void)} of {len(group)} runs are void: {void[0]}")
        if middle.foreign_share is not None and middle.foreign_share > FOREIGN_LIMIT:
            notes.append(f"- {name} {label}: other processes used {middle.foreign_share:.0%} of the machine")
        lines.append(
            f"| {name} | {label}{mark} | {middle.output_per_second:.1f} | {middle.prompt_per_second:.0f} "
            f"| {_fraction(middle, found.ceiling(name, label))} | {_ms(middle.ttft_p50)} / {_ms(middle.ttft_p95)} "
            f"| {_ms(middle.itl_p50)} / {_ms(middle.itl_p95)} / {_ms(middle.itl_p99)} / {_ms(middle.itl_max)} "
            f"| {middle.cached_tokens:.0f} | {_share(middle.foreign_share)} |"
        )
    quality = ["", *_quality(found)] if found.quality else []
    return "\n".join([*lines, "", EXPLAINED, *notes, *quality])


def _introduction(hopon: Hopon, found: Found) -> str:
    label = hopon.label
    line = f"- {label}: `{hopon.shown(prefix_caching=False)}` (W4 with the prefix cache)"
    if label in found.seconds_to_ready:
        starts = sorted(found.seconds_to_ready[label])
        line += f"; ready after {starts[len(starts) // 2]:.2f} s"
    if label in found.memory:
        memory = found.memory[label]
        line += f"; memory after W1 {_mib(memory.total)} MiB = packed weights {_mib(memory.weights)} + touched KV "
        line += f"{_mib(memory.kv)} + rest {_mib(memory.rest)}"
    return line


def _quality(found: Found) -> list[str]:
    """Speed and what its precision costs, a row per hopon."""
    groups = found.groups()
    texts = list(next(iter(found.quality.values())))
    heads = [f"{text}: change of perplexity | mean absolute change of log-probability" for text in texts]
    lines = [
        f"| server | W1 output tok/s | W2 output tok/s | W3 prompt tok/s | {' | '.join(heads)} |",
        "|---|---|---|---|" + "---|---|" * len(texts),
    ]
    for label, costs in found.quality.items():
        middles = {name: median(groups[name, label]) for name in ("W1", "W2", "W3") if (name, label) in groups}
        speeds = [f"{middles[name].output_per_second:.1f}" if name in middles else "-" for name in ("W1", "W2")]
        speeds.append(f"{middles['W3'].prompt_per_second:.0f}" if "W3" in middles else "-")
        cells = [f"{costs[text].perplexity_change:+.3%} | {costs[text].logprob_change:.4f}" for text in texts]
        lines.append(f"| {label} | {' | '.join(speeds)} | {' | '.join(cells)} |")
    return [*lines, "", "Changes are against f32 on the same weights (`python -m benchmarks.quality`)."]


def _fraction(run: Run, peak: str | None) -> str:
    if run.fraction is None or peak is None:
        return "-"
    return f"{run.fraction:.0%} of {'memory' if peak == 'read' else peak}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
