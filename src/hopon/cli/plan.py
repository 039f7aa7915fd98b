"""``hopon plan``: its flags. What it does is in :mod:`hopon.capacity.plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hopon.cli.load_flags import share_of
from hopon.cli.simulate import Router
from hopon.cli.terminal import say


def plan(
    slo: Annotated[str, typer.Option(help="The promise, as for `hopon capacity`.")],
    model: Annotated[str, typer.Option(help="A built-in name or a config.json.")] = "llama-3-8b",
    gpu: Annotated[str, typer.Option(help="Hardware of each replica, by name.")] = "h100",
    trace: Annotated[
        Path | None, typer.Option(help="The traffic: CSV arrival_s,input_tokens,output_tokens, Azure's or Mooncake's.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second: of a drawn traffic, or what a trace is scaled to.")
    ] = None,
    num_requests: Annotated[int, typer.Option(help="So many: drawn, or the busiest of a trace in a row.")] = 2000,
    input_len: Annotated[str, typer.Option(help="Prompt tokens of a drawn traffic.")] = "lognormal:1000:1:8000",
    output_len: Annotated[str, typer.Option(help="Answer tokens of a drawn traffic.")] = "lognormal:250:0.8:2000",
    attain: Annotated[str, typer.Option(help="Share of the requests that must keep all of it.")] = "95%",
    policy: Annotated[str, typer.Option(help="Preset of each engine.")] = "hopon",
    router: Annotated[list[Router] | None, typer.Option(help="Routers to try. (Default: all.)")] = None,
    max_num_seqs: Annotated[str, typer.Option(help="Seats to try.")] = "128,256",
    max_num_batched_tokens: Annotated[str, typer.Option(help="Token budgets to try.")] = "512,2048,8192",
    max_replicas: Annotated[int, typer.Option(help="More are not tried.")] = 64,
    seed: Annotated[int, typer.Option(help="Of a drawn traffic.")] = 0,
) -> None:
    """Predict how many replicas, at which settings, carry a given traffic as promised. A prediction, and it says so."""
    from hopon.capacity import plan as planning
    from hopon.capacity.promise import parse_promise
    from hopon.sim.hardware import hardware
    from hopon.workload.draw import draw
    from hopon.workload.lengths import parse_lengths
    from hopon.workload.trace import read_trace

    if trace is None:
        if rate is None:
            raise typer.BadParameter("give --trace, or --rate for a drawn traffic")
        inputs, outputs = parse_lengths(input_len), parse_lengths(output_len)
        traffic = draw(count=num_requests, rate=rate, inputs=inputs, outputs=outputs, seed=seed)
    else:
        traffic = read_trace(trace, seed)
        if rate is not None:
            span = traffic.asks[-1].arrival - traffic.asks[0].arrival
            if not span:
                raise ValueError(f"{trace}: all requests arrive at once, which no factor scales to {rate:g} per second")
            traffic = traffic.scaled(rate * span / (len(traffic) - 1))
        traffic = traffic.busiest(num_requests)
    site = planning.Site(
        traffic=traffic,
        promise=parse_promise(slo, share_of(attain)),
        model=model,
        hardware=hardware(gpu),
        policy=policy,
        max_replicas=max_replicas,
    )
    ladder = {"max_num_seqs": _numbers(max_num_seqs), "max_num_batched_tokens": _numbers(max_num_batched_tokens)}
    routers = [one.value for one in router or Router]
    say(f"{len(traffic)} requests: {traffic.name}; {'; '.join(traffic.notes)}".rstrip("; "))
    print(planning.plan(site, routers, ladder, say))


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"numbers are given as 128,256, got {text!r}") from None
