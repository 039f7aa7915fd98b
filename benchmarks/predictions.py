"""How well the simulator predicts the engine: ``python -m benchmarks.predictions``.

One cost model, fitted to a server without flags, predicts three workloads that it was not fitted on (short chats, long
prompts, and chats on a KV pool so small that sequences are preempted), each at four loads, and every quantity is
printed beside what the engine did, with the spread of the repeats. Misses are marked NO. Runs to fit to lie
between them, since a shared machine is not as fast at all times.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from hopon.bench.command import named
from hopon.bench.schedule import Writer
from hopon.bench.server import serve
from hopon.bench.target import Target
from hopon.capacity import calibrate as live
from hopon.capacity.comparison import Comparison
from hopon.capacity.load import Load, parse_kinds
from hopon.sim.calibrate import Saved
from hopon.tracing import read_about

WORKLOADS = {
    "short chat": ("20-100", "exp:40:120", ()),
    "long prompts": ("400-1000", "10-40", ()),
    "tight KV pool": ("20-100", "exp:40:120", ("--policy", "vllm", "--num-kv-blocks", "80", "--max-model-len", "256")),
}
"""Prompt tokens, answer tokens, flags of the server; its policy first."""


def settings_of(saved: Saved, steps: Path) -> Saved:
    """The same step times on the server that wrote these steps."""
    config = read_about(steps)["config"]
    return replace(saved, settings=config, capacity_tokens=config["num_blocks"] * config["block_size"])


def main() -> None:
    """Fit, then predict and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--fit-seconds", type=float, default=24.0, help="of each way in which the server is loaded")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of a run")
    parser.add_argument("--repeats", type=int, default=7, help="runs at each load")
    parser.add_argument("--slo", default="ttft<1s tpot<100ms", help="whose capacity the loads are shares of")
    arguments = parser.parse_args()
    writer = Writer(lowest=100, vocab_size=10_000)

    def say(line: str) -> None:
        print(line, flush=True)

    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        fitting = live.Fitting(writer, runner, arguments.fit_seconds / (arguments.repeats + 1), say)
        comparisons = {
            name: Comparison(
                replace(writer, salt=name),
                runner,
                Load(kinds=parse_kinds("random", (), inputs, outputs)),
                policy=flags[1] if flags else "hopon",
                knobs={},
                slo=arguments.slo,
                seconds=arguments.seconds,
                say=say,
            )
            for name, (inputs, outputs, flags) in WORKLOADS.items()
        }
        for number in range(arguments.repeats):
            for flags in dict.fromkeys(flags for _, _, flags in WORKLOADS.values()):
                steps = Path(folder) / f"{number} {len(flags)}.jsonl"
                with serve(arguments.model, ["--step-records", str(steps), *flags]) as started:
                    server = runner.run(named(Target(url=started.url)))
                    live.warm_up(server, writer, runner)
                    if not number and not flags:
                        fitting.some(server, steps)
                        _, saved = fitting.fit(steps)
                    fit_more = partial(fitting.some, server, steps, 0 if flags else 1)
                    for name, (_, _, own) in WORKLOADS.items():
                        if own == flags:
                            if not number:
                                comparisons[name].prepare(server, steps, settings_of(saved, steps))
                            comparisons[name].repeat(server, steps, fit_more)
        found, fitted = fitting.fit(steps)
        say(str(found))
        for name, (inputs, outputs, flags) in WORKLOADS.items():
            _, text = comparisons[name].table(fitted)
            say(f"\n{name}: {inputs} tokens in, {outputs} out {' '.join(flags)}\n{text}\n")


if __name__ == "__main__":
    main()
