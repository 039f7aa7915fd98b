"""``hopon compare``: its flags. What it does is in :mod:`hopon.compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hopon.cli.engine_flags import (
    BlockSize,
    CacheDir,
    Delivery,
    Dtype,
    EnableChunkedPrefill,
    EnablePrefixCaching,
    KvCacheDtype,
    Level,
    LongPrefillTokenThreshold,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    Model,
    Threads,
)
from hopon.cli.environment import cache_root
from hopon.cli.terminal import LoadingLine, download_bar


def compare(
    model: Model,
    policies: Annotated[str, typer.Option(help="Policies with their default knobs: a,b,c.")] = "",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC", help='A policy with knobs, such as "static group_size=8"; may be given several times.'
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="A trace (CSV, Azure, Mooncake), or what to draw: "
            '"input=32-256 output=exp:32:128 arrivals=gamma variation=2 groups=4 prefix=64".',
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests to draw (default 32), or the first of a trace.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second; 0 sends all at once. (Default: 0, a trace as recorded.)")
    ] = None,
    length_scale: Annotated[float, typer.Option(help="Prompts and outputs so many times as long.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="A file for all that was measured.")] = None,
    html: Annotated[Path | None, typer.Option(help="A page with the picture of the runs.")] = None,
    png: Annotated[Path | None, typer.Option(help="A still of that page; needs Chromium.")] = None,
    delivery: Annotated[
        Delivery | None,
        typer.Option(help="Tell tokens as they come, or when the batch ends. (Default: as each policy does.)"),
    ] = None,
    kv_tokens: Annotated[
        int | None, typer.Option(help="KV cache of every policy, in tokens. (Default: 64 of the longest requests.)")
    ] = None,
    host_tokens: Annotated[int, typer.Option(help="Host tier of every policy, in tokens.")] = 0,
    dtype: Dtype = "auto",
    kv_cache_dtype: KvCacheDtype = "auto",
    threads: Threads = 0,
    level: Level = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    long_prefill_token_threshold: LongPrefillTokenThreshold = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt plus output. (Default: the workload's longest.)")
    ] = None,
    block_size: BlockSize = None,
    enable_prefix_caching: EnablePrefixCaching = None,
    enable_chunked_prefill: EnableChunkedPrefill = None,
    cache_dir: CacheDir = None,
) -> None:
    """Run several policies on the same requests and print one table."""
    from hopon.catalogue import resolve
    from hopon.compare.comparison import compare as run
    from hopon.compare.contender import parse_policies
    from hopon.compare.spec import DEFAULT_WORKLOAD, make_workload
    from hopon.lab.files import Picture
    from hopon.lab.play import about_policy

    picture = Picture(html, png)
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise FileNotFoundError(f"--json {json_file}: no such folder")
    contenders = parse_policies(policies, policy or ())
    work = make_workload(
        workload or DEFAULT_WORKLOAD, requests=requests, rate=rate, length_scale=length_scale, seed=seed
    )
    root = cache_dir or cache_root()
    with download_bar() as progress:
        path = resolve(model, root, progress)
    from hopon.model.cpu import load
    from hopon.model.source import open_source

    facts = open_source(path).config
    given = {
        "model": str(path),
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "threads": threads,
        "level": level,
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "long_prefill_token_threshold": long_prefill_token_threshold,
        "enable_prefix_caching": enable_prefix_caching,
        "enable_chunked_prefill": enable_chunked_prefill,
        "cache_dir": str(root),
        "delivery": None if delivery is None else delivery.value,
    }
    line = LoadingLine()
    comparison = run(
        contenders=contenders,
        given=given,
        workload=work,
        context_length=facts.context_length,
        vocab_size=facts.vocab_size,
        kv_tokens=kv_tokens,
        host_tokens=host_tokens,
        factory=load,
        report=line.show,
        with_timelines=picture.wanted,
    )
    line.replace(comparison.text())
    if json_file is not None:
        json_file.write_text(comparison.to_json(), encoding="utf-8")
    runs = [about_policy(o.label.split()[0], o.label) | o.timeline for o in comparison.outcomes if o.timeline]
    if picture.wanted and runs:
        picture.write(str(comparison.manifest["workload"]), runs, clock="measured")
    if comparison.missing:
        sys.exit(130)
    if comparison.differing:
        sys.exit("hopon: policies gave different outputs")
