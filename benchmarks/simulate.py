"""``python -m benchmarks.simulate``: how fast the simulator is, and how far its fast mode is from the exact one.

Without ``--trace`` the requests are drawn: as many, as long and as often as in the hour of conversations that Azure
published in 2023 (AzureLLMInferenceTrace_conv, CC-BY-4.0: 19,366 requests, 5.53 per second, gaps varying by 1.09, mean
lengths 1,155 and 211; every fiftieth quantile, the last one moved so that the means agree). Prints the processor time
of each run, trace reading and summary included, on one core.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hopon.core.policy.presets import make_preset
from hopon.sim.command import DEFAULTS, MEMORY_SHARE, make_config, make_machine
from hopon.sim.hardware import hardware
from hopon.sim.report import number, table
from hopon.sim.result import Result
from hopon.sim.run import simulate
from hopon.workload.ask import Workload
from hopon.workload.draw import draw
from hopon.workload.lengths import Quantiles
from hopon.workload.trace import read_trace


def _quantiles(text: str) -> Quantiles:
    return Quantiles(tuple(map(int, text.split())))


INPUTS = _quantiles(
    """
    2 91 181 191 201 207 222 317 375 381 387 392 395 398 400 403 406 411 419 433 703 903 972 994 1009 1020 1031
    1041 1050 1060 1071 1081 1092 1102 1116 1130 1147 1171 1214 1311 1315 1368 1690 2032 2401 2734 4073 4079
    4086 4098 4850
    """
)
OUTPUTS = _quantiles(
    """
    7 24 38 44 49 54 59 64 69 73 77 81 84 86 89 91 93 95 97 100 103 107 110 116 122 129 137 145 156 163 177 190
    216 237 375 384 390 394 396 397 400 404 410 414 417 424 429 442 468 540 790
    """
)
HOUR = 19_366
LIMITS = {1_000: 2.0, HOUR: 45.0}
"""Seconds that a run of so many requests may take in exact mode with the preset hopon."""


@dataclass(frozen=True)
class Timed:
    seconds: float
    result: Result


def azure_like(count: int, seed: int) -> Workload:
    """Requests like those of the published hour."""
    return draw(count=count, rate=5.53, inputs=INPUTS, outputs=OUTPUTS, arrivals="gamma", variation=1.09, seed=seed)


def run(arguments: argparse.Namespace, count: int | None, fast: bool) -> Timed:
    begin = time.process_time()
    if arguments.trace:
        workload = read_trace(arguments.trace)
        workload = workload if count is None else workload.first(count)
    else:
        workload = azure_like(count or HOUR, 0)
    preset = make_preset(arguments.policy)
    device = hardware(arguments.hardware)
    machine = make_machine("roofline", arguments.model, device)
    config = make_config(preset, machine, workload, {})
    cost = machine.with_blocks(config.block_size, device)
    result = simulate(workload, config, preset.policy, cost, fast=fast)
    return Timed(time.process_time() - begin, result)


def difference(exact: Result, fast: Result) -> list[Sequence[str]]:
    """Figures of which the two modes differ."""
    rows: list[Sequence[str]] = []
    pairs: list[tuple[str, object, object]] = []
    for name, value in asdict(exact.totals).items():
        pairs.append((name, value, getattr(fast.totals, name)))
    for name in ("ttft", "itl", "tpot", "e2e"):
        other = asdict(getattr(fast.summary, name))
        pairs += [(f"{name} {key}", value, other[key]) for key, value in asdict(getattr(exact.summary, name)).items()]
    for name, one, two in pairs:
        if one != two and isinstance(one, int | float) and isinstance(two, int | float):
            share = f"{100 * (two / one - 1):+.3f} %" if one else "-"
            rows.append((name, number(one, 6), number(two, 6), share))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__)
    parser.add_argument("--trace", type=Path, help="a trace instead of drawn requests")
    parser.add_argument("--policy", default="hopon")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--hardware", default="a100-80")
    parser.add_argument("--short", action="store_true", help="1,000 requests only")
    arguments = parser.parse_args()
    print(
        f"{arguments.policy}, {arguments.model} on {arguments.hardware}, {MEMORY_SHARE:.0%} of its memory, "
        f"{', '.join(f'{name} {value}' for name, value in DEFAULTS.items())}"
    )
    late = False
    rows = []
    notes = []
    for count in (1_000,) if arguments.short else (1_000, None):
        exact, fast = run(arguments, count, False), run(arguments, count, True)
        requests = exact.result.summary.requests
        limit = LIMITS.get(requests) if arguments.policy == "hopon" else None
        late = late or (limit is not None and exact.seconds > limit)
        totals = exact.result.totals
        for mode, one in (("exact", exact), ("fast", fast)):
            rows.append(
                (
                    f"{requests:,} requests, {mode}",
                    number(one.seconds, 2),
                    number(limit, 0) if mode == "exact" else "-",
                    number(totals.passes),
                    number(totals.output_tokens),
                    number(totals.mean_batch, 1),
                    number(1e6 * one.seconds / totals.output_tokens, 2),
                )
            )
        rows_of_difference = difference(exact.result, fast.result)
        same = exact.result.records == fast.result.records
        notes.append(
            f"\n{requests:,} requests: every time of every request is {'the same' if same else 'NOT the same'}"
        )
        notes.append(table(("fast against exact", "exact", "fast", "difference"), rows_of_difference))
    head = ("processor time", "seconds", "limit", "passes", "output tokens", "mean batch", "us per token")
    print(table(head, rows))
    print("\n".join(notes))
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
