"""Playing a workload under a preset, for claims: the simulator, with what every step computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hopon.core.config import SchedulerConfig
from hopon.core.plan import StepPlan
from hopon.core.policy.presets import make_preset
from hopon.metrics import RequestRecord
from hopon.sim.cost import Cost, Linear
from hopon.sim.loop import Replica, Simulation
from hopon.sim.result import Meter, Totals
from hopon.sim.run import commands, make_replica
from hopon.tracing import StepFeatures
from hopon.workload.ask import Ask, Workload

PASSES = Linear(base=1.0, per_sequence=0.0, per_prompt_token=0.0)
"""Every pass takes one second: times are numbers of passes."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one pass computed, when it began and how long it took."""

    start: float
    seconds: float
    features: StepFeatures


@dataclass(frozen=True, kw_only=True)
class Played:
    """A finished run.

    Args:
        totals: what all passes did.
        records: what became of each request, by its number.
        steps: every pass, where they were asked for.
    """

    totals: Totals
    records: list[RequestRecord]
    steps: list[Step]

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return max(r.ended for r in self.records if r.ended is not None) - min(r.arrival for r in self.records)

    def ends(self) -> list[float]:
        """When each request was told its last token."""
        return [one.token_times[-1] for one in self.records]


class _Watch(Meter):
    """A meter that remembers steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def stepped(self, replica: Any, plan: StepPlan, step: StepFeatures, start: float, seconds: float) -> None:
        """Count and remember."""
        super().stepped(replica, plan, step, start, seconds)
        if step.computes:
            self.steps.append(Step(start=start, seconds=seconds, features=step))


def play(
    workload: Workload,
    policy: str,
    *,
    seats: int,
    capacity: int,
    budget: int | None = None,
    cost: Cost = PASSES,
    fast: bool = False,
    knobs: Mapping[str, object] | None = None,
    **settings: int | bool,
) -> Played:
    """Play a workload to its end.

    Args:
        workload: requests.
        policy: name of a preset.
        seats: ``max_num_seqs``.
        capacity: KV memory, in tokens.
        budget: tokens of a pass; None: no limit that is ever reached.
        cost: how long a pass takes.
        fast: merge decode steps between events; then ``steps`` lacks the merged ones.
        knobs: of the preset.
        settings: further fields of SchedulerConfig; those that the system publishes come before the general ones.

    Raises:
        ValueError: settings that cannot work.
    """
    preset = make_preset(policy, {name: str(value) for name, value in (knobs or {}).items()})
    length = int(settings.pop("max_model_len", max(2, workload.longest)))
    published = dict(preset.settings(length)) | settings
    size = int(published.setdefault("block_size", 16))
    published |= {
        "num_blocks": capacity // size,
        "max_model_len": length,
        "max_num_seqs": seats,
        "max_num_batched_tokens": budget or seats * length,
    }
    config = SchedulerConfig(**published)  # type: ignore[arg-type]
    watch = _Watch()
    replica: Replica = make_replica(workload, config, preset.policy(config), cost, fast=fast)
    simulation = Simulation([replica], watcher=watch, fast=fast)
    simulation.run(commands(workload))
    simulation.check_end()
    watch.close([replica])
    records = sorted(watch.recorder.records(), key=lambda record: int(record.request_id))
    return Played(totals=watch.totals, records=records, steps=watch.steps)


def ask(number: int, inputs: int, outputs: int, arrival: float = 0.0, limit: int | None = None) -> Ask:
    """A request; its user's limit is its true length unless another is given."""
    return Ask(number=number, arrival=arrival, input_tokens=inputs, output_tokens=outputs, max_tokens=limit or outputs)


def crowd(lengths: Iterable[tuple[int, int]], name: str = "made by hand") -> Workload:
    """Requests of (prompt, output) tokens, all at once."""
    return Workload(name=name, asks=tuple(ask(i, inputs, outputs) for i, (inputs, outputs) in enumerate(lengths)))
