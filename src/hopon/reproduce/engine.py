"""Anyscale's comparison on the real engine, scaled down: lengths, memory and budgets by eight, the same batch sizes.

Prompts of 64 tokens, outputs exponential with a mean of 16 up to 192, all at once; a KV cache of 1,960 tokens. The
systems run one after another in one process, with the same kernels and the same requests. Passes and rows are exact;
seconds are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from hopon.compare.comparison import compare
from hopon.compare.contender import Contender
from hopon.reproduce.claim import Claim, Found, Group
from hopon.workload.ask import Workload
from hopon.workload.draw import draw
from hopon.workload.lengths import Exponential, Uniform

ANYSCALE = "Anyscale's article of June 2023, on hopon's engine at an eighth of its size"
POOL = 15_700 // 8
_LIMITS = {"max_model_len": 256, "max_num_batched_tokens": 1024, "block_size": 16, "enable_prefix_caching": False}

NAIVE, STATIC, RESERVED, PAGED = "hf-pipeline", "static", "orca", "vllm-v0"
_CONTENDERS = (
    Contender(NAIVE, (("group_size", "4"),)),
    Contender(STATIC, (("group_size", "4"),)),
    Contender(RESERVED, (("reserve", "max_model_len"),)),
    Contender(PAGED),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A model and how many requests it gets; with ``varied`` off, all outputs have the same length."""

    model: Path
    requests: int
    varied: bool = True

    def workload(self) -> Workload:
        """All at once."""
        outputs = Exponential(16, 192) if self.varied else Uniform(16, 16)
        return draw(count=self.requests, rate=0, inputs=Uniform(64, 64), outputs=outputs, seed=7)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One system: passes, tokens of prompts and outputs per second, and all outputs."""

    passes: int
    per_second: float
    outputs: Mapping[str, tuple[int, ...]]


@cache
def measure(trial: Trial) -> dict[str, Measured]:
    """All systems, in one run.

    Raises:
        OSError: the model cannot be read.
    """
    from hopon.model.cpu import load
    from hopon.model.source import open_source

    facts = open_source(trial.model).config
    workload = trial.workload()
    comparison = compare(
        contenders=_CONTENDERS,
        given={"model": str(trial.model), "max_num_seqs": 64, **_LIMITS},
        workload=workload,
        context_length=facts.context_length,
        vocab_size=facts.vocab_size,
        kv_tokens=POOL,
        host_tokens=0,
        factory=load,
        report=lambda what, share: None,
    )
    if comparison.missing:
        raise KeyboardInterrupt
    tokens = sum(one.input_tokens + one.output_tokens for one in workload)
    found = {}
    for outcome in comparison.outcomes:
        found[outcome.label.split()[0]] = Measured(
            passes=outcome.result.totals.passes,
            per_second=tokens / outcome.result.summary.seconds,
            outputs=outcome.outputs,
        )
    return found


def _passes(trial: Trial) -> Found:
    found = measure(trial)
    counts = [found[name].passes for name in (NAIVE, STATIC, RESERVED, PAGED)]
    falls = all(more > fewer for more, fewer in pairwise(counts))
    return Found(" > ".join(f"{count:,}" for count in counts), falls)


def _seconds(slow: str, quick: str, least: float) -> Callable[[Trial], Found]:
    def check(trial: Trial) -> Found:
        found = measure(trial)
        ratio = found[quick].per_second / found[slow].per_second
        ours = f"x{ratio:.1f} ({found[slow].per_second:,.0f} and {found[quick].per_second:,.0f} tok/s)"
        return Found(ours, ratio > least)

    return check


def _same_tokens(trials: tuple[Trial, Trial]) -> Found:
    """Every system's outputs in one trial against the naive one's in the other."""
    systems, reference = measure(trials[0]).values(), measure(trials[1])[NAIVE].outputs
    differing = sum(any(one.outputs[name] != tokens for one in systems) for name, tokens in reference.items())
    return Found(f"{differing} of {len(reference)} requests differ", differing == 0)


def group(model: Path, requests: int) -> Group:
    """The claims on a model; more requests, less noise."""
    trial = Trial(model=model, requests=requests)
    equal = Trial(model=model, requests=requests, varied=False)
    measured = (
        "The factor in brackets belongs to its model, card and lengths; ours is measured in this run. On a CPU every "
        "row costs time, so that passes saved are not seconds saved."
    )
    return Group(
        name="engine",
        title=f"The real engine, {requests} requests: {model.name}",
        claims=(
            Claim(
                name="passes",
                source=ANYSCALE,
                text="naive, static, continuous with reservations, continuous with paged memory: fewer and fewer "
                "passes",
                published="falls",
                tag="brute force",
                given=trial,
                perturbed=equal,
                check=_passes,
            ),
            Claim(
                name="the same answers",
                source="hopon",
                text="every request gets the same tokens from all four",
                published="0",
                tag="brute force",
                given=(trial, trial),
                perturbed=(trial, equal),
                check=_same_tokens,
            ),
            *(
                Claim(
                    name=f"{name} over naive",
                    source=ANYSCALE,
                    text=f"{text} is faster than the naive pipeline, in tokens per second",
                    published=f"> x1.2 ({factor})",
                    tag="brute force",
                    given=trial,
                    perturbed=equal,
                    check=_seconds(NAIVE, system, 1.2),
                    remark=measured,
                )
                for name, system, text, factor in (
                    ("static", STATIC, "optimised static batching", "x4"),
                    ("reservations", RESERVED, "continuous batching with reservations", "x8"),
                    ("paged", PAGED, "continuous batching with paged memory", "x23"),
                )
            ),
        ),
    )
