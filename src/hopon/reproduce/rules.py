"""What is said of systems and of load: rules that a played trace shows or breaks."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hopon.core.config import SchedulerConfig
from hopon.core.policy.presets import make_preset
from hopon.core.policy.systems.lightllm import peak_tokens
from hopon.core.scheduler import Scheduler
from hopon.reproduce.claim import Claim, Found, Group, equal
from hopon.reproduce.play import Played, ask, crowd, play
from hopon.workload.ask import Workload
from hopon.workload.draw import draw
from hopon.workload.lengths import Uniform

VARIANTS = "a Chinese article on the history from BatchMaker to TensorRT-LLM"
LATENCY = "连续批处理如何提升大模型吞吐量？"
FASTGEN = "DeepSpeed-FastGen blog, 2023"
LIGHTLLM = "LightLLM's documentation of its router"


def _trace(rate: float = 0.3, count: int = 60) -> Workload:
    """Prompts of at least two tokens, so that a chunk of one token is a decode; a second is a pass."""
    return draw(count=count, rate=rate, inputs=Uniform(2, 60), outputs=Uniform(1, 30), seed=5)


def _play(policy: str, budget: int | None = None, capacity: int = 4096) -> Played:
    return play(_trace(), policy, seats=16, capacity=capacity, budget=budget, enable_prefix_caching=False, block_size=1)


def _mixed(found: Played) -> int:
    """Passes with prompts and decodes."""
    return sum(bool(one.features.num_decodes and one.features.prefill_tokens) for one in found.steps)


def _separate(policy: str) -> Found:
    count = _mixed(_play(policy))
    return Found(f"{count} mixed passes", count == 0)


def _together(policy: str) -> Found:
    count = _mixed(_play(policy))
    return Found(f"{count} mixed passes", count > 10)


def _lightllm_mixes(policy: str) -> Found:
    """By default, or in a mode of its own."""
    default, own = _mixed(_play(policy)), _mixed(_play("lightllm-mixed"))
    return Found(
        f"{default} mixed passes by default, {own} in mixed mode",
        default > 10 and policy != "lightllm-mixed",
        default == 0 and own > 10,
    )


def _steady(policy: str) -> Found:
    """No stream misses a pass after its first token, although prompts come in between."""
    found = _play(policy, budget=100)
    gaps = Counter(gap for record in found.records for gap in record.gaps)
    late = sum(count for gap, count in gaps.items() if gap > 1.5)
    return Found(f"{late} late tokens of {sum(gaps.values()):,}", late == 0)


def _passes_full(budget: int) -> Found:
    """SplitFuse on a backlog of prompts: passes before the last prompt has been taken in."""
    workload = draw(count=60, rate=0, inputs=Uniform(2, 200), outputs=Uniform(1, 30), seed=5)
    found = play(workload, "splitfuse", seats=60, capacity=20_000, budget=budget, block_size=1)
    busy = [step for step in found.steps if step.features.prefill_tokens][:-1]
    full = sum(step.features.num_tokens == 96 for step in busy)
    return Found(f"{full} of {len(busy)} passes of 96", full == len(busy))


def _last_piece(chunk: int) -> Found:
    """Pass of the first token of a prompt of 10."""
    found = play(crowd([(10, 3)]), "splitfuse", seats=2, capacity=64, budget=chunk, block_size=1)
    return equal(int(found.records[0].token_times[0]), 3)


def _orca_order(policy: str) -> Found:
    """Of two requests, the earlier has had at least as many passes: counted from tokens, prompts being whole."""
    found = _play(policy, capacity=150)
    seen = sorted(found.records, key=lambda r: (r.arrival, int(r.request_id)))
    bad = 0
    for place, one in enumerate(seen):
        for other in seen[place + 1 :]:
            end = one.token_times[-1]
            for index, moment in enumerate(other.token_times, 1):
                if moment < end and sum(t <= moment for t in one.token_times) < index:
                    bad += 1
    return Found(f"{bad} passes out of order", bad == 0)


def _told(delivery: str) -> Found:
    """Passes of a static batch that streams against one that answers at its end."""
    runs = [
        play(_trace(), "static", seats=4, capacity=4096, knobs={"delivery": one, "group_size": size})
        for one, size in (("batch", 4), (delivery, 4 if delivery == "stream" else 3))
    ]
    plans = [[(step.start, step.features) for step in one.steps] for one in runs]
    return Found("the same passes" if plans[0] == plans[1] else "other passes", plans[0] == plans[1])


def _overload(rate: float) -> Found:
    """Waiting of the second half of the requests against the first, at a rate beyond what the slots can serve."""
    workload = draw(count=400, rate=rate, inputs=Uniform(2, 10), outputs=Uniform(10, 30), seed=1)
    records = play(workload, "hopon", seats=4, capacity=4096).records
    waits = [r.waiting or 0.0 for r in records]
    quarters = [sum(waits[i : i + 100]) / 100 for i in range(0, 400, 100)]
    steps = [later - earlier for earlier, later in pairwise(quarters)]
    linear = min(steps) > 0 and max(steps) < 1.5 * min(steps)
    return Found(" ".join(f"{wait:.0f}" for wait in quarters) + " passes, by quarter", linear)


def _alone(rate: float) -> Found:
    """One request at a time: continuous against static."""
    workload = draw(count=40, rate=rate, inputs=Uniform(2, 10), outputs=Uniform(10, 30), arrivals="constant", seed=1)
    static = play(workload, "static-impatient", seats=8, capacity=4096, knobs={"delivery": "stream"})
    continuous = play(workload, "hopon", seats=8, capacity=4096)
    gain = sum(r.e2e or 0.0 for r in static.records) / sum(r.e2e or 0.0 for r in continuous.records)
    return Found(f"E2E x{gain:.2f}", abs(gain - 1) < 1e-9)


def _overflow(capacity: int) -> Found:
    """Four prompts of 20 that fit when they start and grow by 40 tokens."""
    found = play(crowd([(20, 40)] * 4), "hopon", seats=4, capacity=capacity, block_size=1, enable_prefix_caching=False)
    all_there = all(record.output_tokens == 40 for record in found.records)
    return Found(f"{found.totals.preemptions} preemptions, all answered", found.totals.preemptions > 0 and all_there)


def _never_evicted(capacity: int) -> Found:
    """The same under a policy that reserves: it waits instead."""
    found = play(crowd([(20, 40)] * 4), "trt-no-evict", seats=4, capacity=capacity, block_size=1)
    late = sum((record.waiting or 0.0) > 0 for record in found.records)
    return Found(f"{found.totals.preemptions} preemptions, {late} wait", found.totals.preemptions == 0 and late > 0)


def _seats_are_not_memory(seats: int) -> Found:
    """Most sequences in a pass for ``seats`` seats and memory for four."""
    found = play(crowd([(30, 10)] * 16), "trt-no-evict", seats=seats, capacity=160, block_size=1)
    return equal(max(step.features.num_seqs for step in found.steps), 4)


def _delay(microseconds: int) -> Found:
    """A lone request with a queueing delay of five passes and room for more in the batch."""
    workload = Workload(name="made by hand", asks=(ask(0, 2, 2), ask(1, 2, 2, arrival=50.0)))
    knobs = {"max_queue_delay_microseconds": microseconds, "max_batch_size": 4}
    admitted = play(workload, "dynamic", seats=4, capacity=4096, knobs=knobs).records[0].admitted
    return Found(f"starts at {admitted:g}", admitted == 5)


def _peaks(demands: tuple[tuple[int, int], ...]) -> Found:
    """(held now, still to come)."""
    return equal(peak_tokens(demands), 31)


def _reserves(policy: str) -> Found:
    """Blocks of one token that a prompt of 4 with up to 20 tokens holds in its first pass."""
    settings = SchedulerConfig(num_blocks=64, block_size=1, max_model_len=32, max_num_seqs=2, max_num_batched_tokens=64)
    scheduler = Scheduler(settings, make_preset(policy).policy(settings))
    scheduler.add(ask(0, 4, 20).request(), 0.0)
    scheduler.plan(0.0)
    return equal(scheduler.pool.num_used, 24, "slots")


GROUP = Group(
    name="rules",
    title="What is said of systems and of load",
    claims=(
        Claim(
            name="vLLM separates",
            source=VARIANTS,
            text="vLLM of 2023: a pass has prompts or decodes, never both",
            published="never",
            tag="brute force",
            given="vllm-v0",
            perturbed="vllm",
            check=_separate,
        ),
        Claim(
            name="Orca mixes",
            source=VARIANTS,
            text="Orca computes prompts and decodes in one batch",
            published="mixes",
            tag="brute force",
            given="orca",
            perturbed="vllm-v0",
            check=_together,
        ),
        Claim(
            name="TensorRT-LLM mixes",
            source=VARIANTS,
            text="TensorRT-LLM's in-flight batching mixes them, too, more like Orca than like vLLM",
            published="mixes",
            tag="brute force",
            given="trt-no-evict",
            perturbed="vllm-v0",
            check=_together,
        ),
        Claim(
            name="LightLLM mixes",
            source=VARIANTS,
            text="LightLLM packs prompts and decodes into one step",
            published="mixes",
            tag="brute force",
            given="lightllm",
            perturbed="lightllm-mixed",
            check=_lightllm_mixes,
            remark="Wrong for its default loop, which computes new prompts in passes of their own and merges "
            "afterwards; it mixes in its chunked modes.",
        ),
        Claim(
            name="LightLLM's peak",
            source=LIGHTLLM,
            text="five requests (5,4) (4,3) (5,3) (3,2) (4,2) of tokens held and to come peak at 31",
            published="31",
            tag="hand-worked",
            given=((5, 4), (4, 3), (5, 3), (3, 2), (4, 2)),
            perturbed=((5, 4), (4, 3), (5, 3), (3, 2), (9, 2)),
            check=_peaks,
        ),
        Claim(
            name="Orca reserves",
            source=VARIANTS,
            text="Orca gives each request memory for its maximum at the start (prompt 4, up to 20 tokens)",
            published="24 slots",
            tag="hand-worked",
            given="orca",
            perturbed="vllm",
            check=_reserves,
        ),
        Claim(
            name="Orca's order",
            source="Yu et al., Orca, OSDI'22",
            text="an earlier request has run at least as many iterations as a later one, at all times",
            published="0",
            tag="brute force",
            given="orca",
            perturbed="splitfuse",
            check=_orca_order,
        ),
        Claim(
            name="decodes go first",
            source="a Chinese article on continuous batching, on chunked prefill",
            text="decode first, the rest of the token budget for prefill: running streams are not held up by prompts",
            published="0 late",
            tag="brute force",
            given="hopon",
            perturbed="vllm-v0",
            check=_steady,
        ),
        Claim(
            name="SplitFuse fills passes",
            source=FASTGEN,
            text="every pass has the same number of tokens as long as prompts wait",
            published="all",
            tag="brute force",
            given=96,
            perturbed=64,
            check=_passes_full,
        ),
        Claim(
            name="SplitFuse's last piece",
            source=FASTGEN,
            text="only the last piece of a split prompt yields a token (10 tokens in pieces of 4)",
            published="pass 3",
            tag="hand-worked",
            given=4,
            perturbed=5,
            check=_last_piece,
        ),
        Claim(
            name="streaming is no batching",
            source=LATENCY,
            text="a server can stream tokens while its batches are fixed: the passes are the same",
            published="the same",
            tag="brute force",
            given="stream",
            perturbed="batch",
            check=_told,
        ),
        Claim(
            name="overload",
            source=LATENCY,
            text="under sustained overload a queue remains and waiting grows, request by request",
            published="grows",
            tag="brute force",
            given=1.0,
            perturbed=0.1,
            check=_overload,
        ),
        Claim(
            name="one at a time",
            source=LATENCY,
            text="who sends one request at a time gains nothing",
            published="x1.00",
            tag="brute force",
            given=0.02,
            perturbed=0.5,
            check=_alone,
        ),
        Claim(
            name="a batch outgrows memory",
            source=LATENCY,
            text="what fits when it starts may overflow later; somebody is preempted and computed again",
            published="> 0",
            tag="hand-worked",
            given=150,
            perturbed=400,
            check=_overflow,
        ),
        Claim(
            name="no eviction",
            source="TensorRT-LLM's documentation (GUARANTEED_NO_EVICT)",
            text="a started request is never paused; newcomers wait for memory instead",
            published="0",
            tag="hand-worked",
            given=150,
            perturbed=400,
            check=_never_evicted,
        ),
        Claim(
            name="seats are not memory",
            source=LATENCY,
            text="a higher limit of requests does not lift the other limits (16 seats, memory for 4)",
            published="4",
            tag="hand-worked",
            given=16,
            perturbed=2,
            check=_seats_are_not_memory,
        ),
        Claim(
            name="dynamic batching waits",
            source="Triton's documentation of its dynamic batcher",
            text="a batch that is not full waits up to the queueing delay for others",
            published="5",
            tag="hand-worked",
            given=5_000_000,
            perturbed=0,
            check=_delay,
        ),
    ),
)
