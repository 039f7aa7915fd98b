"""``hopon calibrate``: its flags. What it does is in :mod:`hopon.capacity.calibrate` and ``comparison``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hopon.cli.load_flags import ServeFlags
from hopon.cli.target import served
from hopon.cli.terminal import say


def calibrate(
    what: Annotated[str, typer.Argument(help="A file of `serve --step-records`, or a model that is then served.")],
    output: Annotated[Path | None, typer.Option(help="Where the fitted model goes.")] = None,
    capacity_tokens: Annotated[int | None, typer.Option(help="Size of the KV cache, if the file does not say.")] = None,
    kv_bytes_per_token: Annotated[int | None, typer.Option(help="Of the model, if the file does not say.")] = None,
    slo: Annotated[str, typer.Option(help="Whose capacity the loads of the comparison are shares of.")] = (
        "ttft<1s tpot<100ms"
    ),
    input_len: Annotated[str, typer.Option(help="Prompt tokens of the comparison.")] = "32-160",
    output_len: Annotated[str, typer.Option(help="Answer tokens of the comparison.")] = "exp:40:120",
    seconds: Annotated[float, typer.Option(help="Length of each run of the comparison.")] = 8.0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs at each load of the comparison.")] = 3,
    policy: Annotated[str, typer.Option(help="The server's policy.")] = "hopon",
    policy_knob: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A knob of it.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Made-up token ids are below this.")] = 10_000,
    serve_flags: ServeFlags = "",
) -> None:
    """Fit the simulator's step times to a real engine; of a model also say how well it then predicts other runs."""
    import asyncio
    import shlex
    import tempfile

    from hopon.bench.command import named
    from hopon.bench.schedule import Writer
    from hopon.capacity import calibrate as live
    from hopon.capacity.comparison import Comparison
    from hopon.capacity.load import Load, parse_kinds
    from hopon.core.policy.presets import parse_knobs
    from hopon.sim import calibrate as calibration
    from hopon.sim.command import calibrate as fit

    if Path(what).is_file() and not what.endswith(".gguf"):
        print(
            fit(
                steps=Path(what),
                output=output,
                capacity_tokens=capacity_tokens,
                kv_bytes_per_token=kv_bytes_per_token,
            )
        )
        return
    knobs = policy_knob or []
    flags = [serve_flags, f"--policy {policy}", *(f"--policy-knob {shlex.quote(knob)}" for knob in knobs)]
    load = Load(kinds=parse_kinds("random", (), input_len, output_len))
    writer = Writer(lowest=min(100, vocab_size // 4), vocab_size=vocab_size)
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        steps = Path(folder) / "steps.jsonl"
        with served(what, " ".join((*flags, f"--step-records {steps}")), None, {}) as server:
            server = runner.run(named(server))
            fitting = live.Fitting(writer, runner, seconds / (repeats + 1), say)
            comparison = Comparison(
                writer,
                runner,
                load,
                policy=policy,
                knobs=dict(parse_knobs(knobs)),
                slo=slo,
                seconds=seconds,
                say=say,
            )
            live.warm_up(server, writer, runner)
            fitting.some(server, steps)
            comparison.prepare(server, steps, fitting.fit(steps)[1])
            for _ in range(repeats):
                comparison.repeat(server, steps, lambda: fitting.some(server, steps, 2))
            found, fitted = fitting.fit(steps)
            saved, text = comparison.table(fitted)
            print(f"{found}\n{text}")
    if output is not None:
        calibration.write(output, saved, found)
