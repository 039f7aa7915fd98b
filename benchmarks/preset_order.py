"""Does the simulator order policies by goodput as the engine does? ``python -m benchmarks.preset_order --cost FILE``.

The same requests at one rate, on the engine under each policy in turn and in the simulator with step times of
``hopon calibrate``. Blocks of one token make a step slower: a policy that uses them gets step times of its own, with
``--cost FILE tgi=FILE2`` from ``hopon calibrate MODEL --policy tgi --output FILE2``. Both orders are printed, and how
many pairs of policies lie in the same order (Kendall's tau). Pairs that the engine itself does not tell apart, because
their windows overlap, are counted by themselves.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import median

from hopon.bench.schedule import Writer
from hopon.bench.server import serve
from hopon.bench.target import Target
from hopon.capacity.knobs import Candidate
from hopon.capacity.load import Load, parse_kinds
from hopon.capacity.promise import parse_promise
from hopon.capacity.trials import Trials
from hopon.capacity.tune import compare, goodput
from hopon.capacity.tune_command import Engines, Site
from hopon.sim.report import table

POLICIES = "hopon,vllm,sarathi,orca,tgi,sglang,dynamic,static-impatient"


def main() -> None:
    """Measure, simulate, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--cost", nargs="+", required=True, metavar="[POLICY=]FILE", help="what `hopon calibrate MODEL --output` wrote"
    )
    parser.add_argument("--rate", type=float, default=12.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--slo", default="ttft<1s tpot<60ms")
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--output", type=Path, help="JSON of all windows; goes on with what it has")
    arguments = parser.parse_args()
    costs = {policy: path for policy, _, path in (text.rpartition("=") for text in arguments.cost)}
    policies = arguments.policies.split(",")
    if "" not in costs:
        parser.error(f"--cost needs a file for all policies, got only {' '.join(arguments.cost)}")
    if unknown := sorted(set(costs) - {"", *policies}):
        parser.error(f"--cost names {', '.join(unknown)}, which is not among --policies {arguments.policies}")
    site = Site(
        load=Load(kinds=parse_kinds("random", (), "20-200", "exp:40:120")),
        promise=parse_promise(arguments.slo),
        cost=f"fitted:{costs['']}",
        model="",
        hardware="a100-80",
    )
    site_of = {policy: replace(site, cost=f"fitted:{path}") for policy, path in costs.items()}
    candidates = [Candidate.of({"policy": name}) for name in policies]
    seeds = list(range(arguments.rounds))

    @contextmanager
    def serving(candidate: Candidate) -> Iterator[Target]:
        with serve(arguments.model, candidate.flags) as started:
            yield Target(url=started.url)

    path: Path | None = arguments.output
    trials = Trials(
        {"rate": arguments.rate, "slo": arguments.slo}, path, resume=path is not None and path.exists()
    )  # fmt: skip
    with asyncio.Runner() as runner:
        engines = Engines(serve=serving, writer=Writer(lowest=100, vocab_size=10_000), runner=runner)
        measured = compare(trials, engines.measure(site), candidates, arguments.rate, arguments.seconds, seeds, print)
    engine = {str(one.candidate): one.values("goodput") for one in measured}
    simulated = {
        str(one.candidate): median(
            goodput(
                site_of.get(str(dict(one.candidate.values)["policy"]), site).measure(
                    one.candidate, arguments.rate, seed, arguments.seconds
                )
            )
            for seed in seeds
        )
        for one in measured
    }
    rows = [
        [name, f"{median(values):.2f}", f"{min(values):.2f}-{max(values):.2f}", f"{simulated[name]:.2f}"]
        for name, values in sorted(engine.items(), key=lambda pair: -median(pair[1]))
    ]
    print(table(["policy", "engine goodput/s", "windows", "simulator"], rows))
    print("engine:    " + ", ".join(row[0].removeprefix("--policy ") for row in rows))
    print(
        "simulator: " + ", ".join(n.removeprefix("--policy ") for n in sorted(simulated, key=lambda n: -simulated[n]))
    )
    same = other = open_ = 0
    for a, b in combinations(engine, 2):
        if min(engine[a]) > max(engine[b]) or min(engine[b]) > max(engine[a]):
            agree = (median(engine[a]) - median(engine[b])) * (simulated[a] - simulated[b]) > 0
            same, other = same + agree, other + (not agree)
        else:
            open_ += 1
    print(f"{same} of {same + other} pairs that the engine tells apart are in the same order; {open_} it does not tell")


if __name__ == "__main__":
    main()
