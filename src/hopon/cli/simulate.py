"""``hopon simulate``: its flags. What it does is in :mod:`hopon.sim.command`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hopon.cli.load_flags import ArrivalKind


class Router(StrEnum):
    """How requests are spread over replicas."""

    ROUND_ROBIN = "round-robin"
    LEAST_LOAD = "least-load"
    PREFIX_AWARE = "prefix-aware"


Limit = Annotated[int | None, typer.Option(help="(Default: the policy's own, else general.)")]
Flag = Annotated[bool | None, typer.Option(help="(Default: the policy's own, else on.)")]


def simulate(
    policy: Annotated[str, typer.Option(help="A policy by name, or module:Class.")] = "hopon",
    policy_knob: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A knob of the policy; may be given several times.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="A trace: CSV arrival_s,input_tokens,output_tokens, Azure's or Mooncake's.")
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option(help="First so many of a trace, or how many to draw (default 1,000).")
    ] = None,
    skew: Annotated[
        float | None, typer.Option(help="Draw 64 requests whose answers are this skewed (0 to 1), as in the lab.")
    ] = None,
    arrivals: Annotated[ArrivalKind, typer.Option(help="Spacing of drawn requests.")] = ArrivalKind.POISSON,
    rate: Annotated[float, typer.Option(help="Drawn requests per second; 0 for all at once.")] = 4.0,
    variation: Annotated[float, typer.Option(help="Coefficient of variation of gamma gaps.")] = 1.0,
    input_len: Annotated[str, typer.Option(help="Lengths of drawn prompts: 512, 32-256, exp:MEAN:MAX.")] = "512",
    output_len: Annotated[str, typer.Option(help="The same for outputs.")] = "exp:128:1536",
    prefix_groups: Annotated[int, typer.Option(help="Shared beginnings of drawn prompts.")] = 0,
    prefix_len: Annotated[int, typer.Option(help="Their length.")] = 0,
    rate_scale: Annotated[float, typer.Option(help="Arrivals so many times as fast.")] = 1.0,
    length_scale: Annotated[float, typer.Option(help="Lengths times this.")] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(help="What every user asks for (default: the true length).")] = None,
    cost: Annotated[
        str, typer.Option(help="Step times: passes, linear, distserve, roofline or fitted:FILE.")
    ] = "roofline",
    model: Annotated[str, typer.Option(help="For the roofline: a built-in name or a config.json.")] = "llama-3-8b",
    hardware: Annotated[str, typer.Option(help="For the roofline and for moved blocks.")] = "a100-80",
    captured: Annotated[str, typer.Option(help="Captured batch sizes that pad a pass, such as 1,2,4,8.")] = "",
    replicas: Annotated[int, typer.Option(help="Engines behind a router.")] = 1,
    router: Annotated[Router, typer.Option(help="Which router.")] = Router.LEAST_LOAD,
    depth: Annotated[int, typer.Option(help="Steps in flight when the next one is planned.")] = 1,
    ttft: Annotated[float | None, typer.Option(help="Limit for goodput, seconds: to the first token.")] = None,
    tpot: Annotated[float | None, typer.Option(help="Limit, seconds per output token.")] = None,
    itl: Annotated[float | None, typer.Option(help="Limit, seconds: largest gap between tokens.")] = None,
    e2e: Annotated[float | None, typer.Option(help="Limit, seconds: to the last token.")] = None,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    fast: Annotated[bool, typer.Option("--fast", help="Merge decode steps between events.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="A file for all of the result.")] = None,
    html: Annotated[Path | None, typer.Option(help="A page with the picture of the run.")] = None,
    png: Annotated[Path | None, typer.Option(help="A still of that page; needs Chromium.")] = None,
    max_num_seqs: Limit = None,
    max_num_batched_tokens: Limit = None,
    long_prefill_token_threshold: Limit = None,
    block_size: Limit = None,
    max_model_len: Limit = None,
    num_kv_blocks: Limit = None,
    num_host_blocks: Limit = None,
    enable_prefix_caching: Flag = None,
    enable_chunked_prefill: Flag = None,
) -> None:
    """Run the engine's scheduler on a virtual clock, with step times from a cost model."""
    from hopon.core.policy.presets import parse_knobs
    from hopon.lab.files import Picture
    from hopon.lab.play import about_policy
    from hopon.sim.command import simulate as run
    from hopon.sim.result import Result
    from hopon.sim.timeline import Timeline

    try:
        sizes = [int(size) for size in captured.split(",") if size]
    except ValueError:
        raise typer.BadParameter(f"--captured takes batch sizes such as 1,2,4,8, got {captured!r}") from None
    picture = Picture(html, png)
    timeline = Timeline() if picture.wanted else None

    def draw(result: Result) -> None:
        if timeline is not None:
            label = str(result.about["policy"])
            picture.write(str(result.about["workload"]), [about_policy(policy, label) | timeline.content(result)])

    text = run(
        policy=policy,
        knobs=dict(parse_knobs(policy_knob or ())),
        trace=trace,
        num_requests=num_requests,
        skew=skew,
        arrivals=arrivals.value,
        rate=rate,
        variation=variation,
        input_len=input_len,
        output_len=output_len,
        prefix_groups=prefix_groups,
        prefix_len=prefix_len,
        rate_scale=rate_scale,
        length_scale=length_scale,
        max_tokens=max_tokens,
        cost=cost,
        model=model,
        hardware_name=hardware,
        captured=sizes,
        replicas=replicas,
        router=router.value,
        depth=depth,
        settings={
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "long_prefill_token_threshold": long_prefill_token_threshold,
            "block_size": block_size,
            "max_model_len": max_model_len,
            "num_blocks": num_kv_blocks,
            "num_host_blocks": num_host_blocks,
            "enable_prefix_caching": enable_prefix_caching,
            "enable_chunked_prefill": enable_chunked_prefill,
        },
        ttft=ttft,
        tpot=tpot,
        itl=itl,
        e2e=e2e,
        seed=seed,
        fast=fast,
        json_path=json_file,
        timeline=timeline,
        found=draw,
    )
    print(text)
