"""Which part of the gain is whose: {static, continuous} x {reserved, paged} x {bf16, 4-bit} on one workload.

``python -m benchmarks.factorial`` runs the eight combinations on the same requests, the real model and the same KV
memory, and prints one table, in about two minutes. *Reserved* sets memory aside for the longest answer that the
deployment allows, since nobody knows the real one beforehand; *paged* takes blocks as they fill.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hopon.core.config import SchedulerConfig
from hopon.core.policy.admission import Admission, WholePrompt
from hopon.core.policy.composition import DecodeFirst
from hopon.core.policy.eviction import Eviction, Never, Newest
from hopon.core.policy.order import Fcfs
from hopon.core.policy.preset import Policy
from hopon.core.policy.systems.orca import ReserveModelLength
from hopon.core.policy.systems.static import Group

REQUESTS, SEATS, KV_TOKENS = 48, 32, 4096
WORKLOAD = "input=32-128 output=exp:48:256"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One of the four policies; the class attributes say which."""

    continuous: ClassVar[bool]
    paged: ClassVar[bool]

    def settings(self, max_model_len: int) -> Mapping[str, int | bool]:
        """The same for all."""
        return {"max_num_seqs": SEATS, "enable_prefix_caching": False}

    def policy(self, config: SchedulerConfig) -> Policy:
        """Parts of hopon's own policies, put together anew."""
        admission: Admission = ReserveModelLength(max_model_len=config.max_model_len)
        eviction: Eviction = Never()
        if self.paged:
            admission, eviction = WholePrompt(watermark=0.0), Newest()
        composition = DecodeFirst() if self.continuous else Group(admission, config.max_num_seqs, 0.0)
        return Policy(order=Fcfs(), admission=admission, composition=composition, eviction=eviction)


class StaticReserved(Cell):
    """See the class."""

    continuous, paged = False, False


class StaticPaged(Cell):
    """See the class."""

    continuous, paged = False, True


class ContinuousReserved(Cell):
    """See the class."""

    continuous, paged = True, False


class ContinuousPaged(Cell):
    """See the class."""

    continuous, paged = True, True


CELLS = (StaticReserved, StaticPaged, ContinuousReserved, ContinuousPaged)


def measure(dtype: str) -> list[dict[str, Any]]:
    """What `hopon compare` finds for the four, in the order of CELLS."""
    from hopon.cli import app

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "compare.json"
        words = ["compare", "smollm2-135m", "--dtype", dtype, "--workload", WORKLOAD, "--requests", str(REQUESTS)]
        words += ["--kv-tokens", str(KV_TOKENS), "--max-model-len", "384", "--json", str(path)]
        for cell in CELLS:
            words += ["--policy", f"benchmarks.factorial:{cell.__name__}"]
        app(words, standalone_mode=False)
        found: list[dict[str, Any]] = json.loads(path.read_text())["policies"]
        return found


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = []
    for dtype in ("bf16", "auto"):
        for cell, found in zip(CELLS, measure(dtype), strict=True):
            totals, summary = found["totals"], found["summary"]
            ttft, e2e = summary["ttft"], summary["e2e"]
            cells = [
                "continuous" if cell.continuous else "static",
                "paged" if cell.paged else "reserved",
                dtype,
                str(totals["passes"]),
                f"{summary['output_tokens_per_second']:.0f}",
                f"{totals['mean_batch']:.1f}",
                f"{1e3 * ttft['p50']:.0f} / {1e3 * ttft['p95']:.0f}",
                f"{1e3 * e2e['p95']:.0f}",
                str(totals["preemptions"]),
            ]
            rows.append(f"| {' | '.join(cells)} |")
    print(f"\n{REQUESTS} requests at once, {WORKLOAD}; {SEATS} seats, {KV_TOKENS} tokens of KV memory\n")
    heads = "batching, memory, weights, passes, output tok/s, rows per pass, TTFT p50 / p95 ms, E2E p95 ms, preempted"
    print(f"| {heads.replace(', ', ' | ')} |")
    print("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
