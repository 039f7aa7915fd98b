"""``python -m benchmarks.agree``: does ``hopon bench`` tell what other load generators tell of the same server?

Starts one hopon and measures it in turn with ``hopon bench``, ``vllm bench serve`` and GuideLLM, where programs are
given: random prompts of one length, answers of one length, in a closed loop or, with ``--rate``, at even distances.
Prints a line for each run. Definitions are made equal first: GuideLLM's "ITL" is one mean per request, which is TPOT
here.

In a closed loop equal requests march in step, and which of them share a prefill, hence TTFT, hangs on a millisecond at
the start; at a rate every request is like the next. ``--apart`` gives the server one core and the generators another,
so that none of them takes time from what it measures.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hopon.bench.server import serve
from hopon.sim.report import table

TOKENIZER = Path(__file__).parents[1] / "tests/serve/data/smollm.tokenizer.json.gz"
MODEL = "smollm2-135m"


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What every generator is asked to do."""

    url: str
    concurrency: int
    rate: float | None  # per second, instead of the closed loop
    requests: int
    input_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class Line:
    """Output tokens per second, then milliseconds."""

    tokens_per_second: float
    ttft_p50: float
    ttft_mean: float
    tpot_p50: float
    tpot_mean: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", help="program of vLLM, such as /opt/vllm/bin/vllm")
    parser.add_argument("--guidellm", help="program of GuideLLM")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rate", type=float, help="requests per second, instead of so many at once")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--apart", action="store_true", help="server and generators on a core of their own each")
    asked = parser.parse_args()
    rows = []
    cores = sorted(os.sched_getaffinity(0))
    if asked.apart:
        if len(cores) < 2:
            sys.exit(f"--apart needs two cores, there is {len(cores)}")
        os.sched_setaffinity(0, cores[:1])  # the server inherits it
    with tempfile.TemporaryDirectory() as name, serve(MODEL, ("--no-enable-prefix-caching",)) as started:
        if asked.apart:
            os.sched_setaffinity(0, cores[1:])
        folder = Path(name)
        (folder / "tokenizer.json").write_bytes(gzip.decompress(TOKENIZER.read_bytes()))
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        load = Load(
            url=started.url,
            concurrency=asked.concurrency,
            rate=asked.rate,
            requests=asked.requests,
            input_len=asked.input_len,
            output_len=asked.output_len,
        )
        for _ in range(asked.runs):
            rows.append(("hopon bench", _hopon(load, folder)))
            if asked.vllm:
                rows.append(("vllm bench serve", _vllm(load, folder, asked.vllm)))
            if asked.guidellm:
                rows.append(("guidellm", _guidellm(load, folder, asked.guidellm)))
    rows.sort(key=lambda row: row[0])
    cells = [
        (
            label,
            *(
                f"{value:.1f}"
                for value in (
                    line.tokens_per_second,
                    line.ttft_p50,
                    line.ttft_mean,
                    line.tpot_p50,
                    line.tpot_mean,
                )
            ),
        )
        for label, line in rows
    ]
    print(table(("", "output tok/s", "TTFT p50 ms", "TTFT mean ms", "TPOT p50 ms", "TPOT mean ms"), cells))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command[0]}: {done.stderr[-2000:]}")


def _hopon(load: Load, folder: Path) -> Line:
    path = folder / "hopon.json"
    pace = f"--concurrency {load.concurrency}" if load.rate is None else f"--rate {load.rate} --arrivals constant"
    words = (
        f"{pace} --num-requests {load.requests} --input-len {load.input_len} "
        f"--output-len {load.output_len} --json {path}"
    )
    _run([sys.executable, "-m", "hopon", "bench", load.url, *words.split()])
    served = json.loads(path.read_text())["summary"]["served"]
    ttft, tpot = served["ttft"], served["tpot"]
    times = [1000 * value for value in (ttft["p50"], ttft["mean"], tpot["p50"], tpot["mean"])]
    return Line(served["output_tokens_per_second"], *times)


def _vllm(load: Load, folder: Path, program: str) -> Line:
    pace = f"--max-concurrency {load.concurrency}"
    if load.rate is not None:
        pace = f"--request-rate {load.rate} --burstiness 1e9"  # the shape of the gamma distribution of gaps: all equal
    words = (
        f"bench serve --backend openai --endpoint /v1/completions --base-url {load.url} --model {MODEL} "
        f"--tokenizer {folder} --dataset-name random --random-input-len {load.input_len} "
        f"--random-output-len {load.output_len} --num-prompts {load.requests} {pace} "
        f"--ignore-eos --save-result --result-dir {folder} --result-filename vllm.json"
    )
    _run([program, *words.split()])
    found = json.loads((folder / "vllm.json").read_text())
    names = ("output_throughput", "median_ttft_ms", "mean_ttft_ms", "median_tpot_ms", "mean_tpot_ms")
    return Line(*(found[name] for name in names))


def _guidellm(load: Load, folder: Path, program: str) -> Line:
    pace = f"concurrent,streams={load.concurrency}" if load.rate is None else f"constant,rate={load.rate}"
    words = (
        f"run --backend kind=openai_http,target={load.url},model={MODEL},request_format=/v1/completions "
        f"--tokenizer kind=hf_auto,model={folder} "
        f"--data kind=synthetic_text,prompt_tokens={load.input_len},output_tokens={load.output_len} "
        f"--profile kind={pace} --constraint kind=max_requests,count={load.requests} "
        f"--output kind=json,path={folder / 'guidellm.json'} --disable-console-interactive"
    )
    _run([program, *words.split()])
    found = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]["metrics"]
    ttft = found["time_to_first_token_ms"]["successful"]
    tpot = found["inter_token_latency_ms"]["successful"]
    rate = found["output_tokens_per_second"]["successful"]["mean"]
    return Line(rate, ttft["median"], ttft["mean"], tpot["median"], tpot["mean"])


if __name__ == "__main__":
    main()
