"""Numbers that need no schedule: the cost of a step, and what fits into memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hopon.reproduce.claim import Claim, Found, Group, amount, equal, near
from hopon.sim.cost import Linear
from hopon.sim.hardware import HARDWARE, MODELS, Hardware, Model
from hopon.sim.swap import prefill_seconds, swap_seconds
from hopon.tracing import StepFeatures

SLOTS = "LLM服务端Continuous Batching详解 (with the demo dev48v, day 60)"
VLLM = "Kwon et al., SOSP'23"
LLAMA, OPT = MODELS["llama-3-8b"], MODELS["opt-13b"]


def milliseconds(cost: Linear, batch: int, prompt: int = 0) -> float:
    """A pass of ``batch`` sequences that computes ``prompt`` prompt tokens of one of them besides."""
    return 1000 * cost.seconds(StepFeatures(num_decodes=batch, prefill_tokens=prompt))


@dataclass(frozen=True, slots=True)
class Room:
    """A device with a model in it: memory for keys and values is a share of the device less the weights (bytes)."""

    memory: float
    share: float
    weights: float
    per_token: int

    @property
    def tokens(self) -> float:
        """That fit."""
        return (self.share * self.memory - self.weights) / self.per_token


ROOM = Room(80e9, 0.92, 16e9, LLAMA.kv_bytes_per_token)
DEARER = Linear(per_sequence=0.0035)


def _tokens_in_memory(room: Room) -> Found:
    thousand = replace(room, per_token=128_000).tokens
    ours = room.tokens
    return Found(f"{ours:,.0f}", abs(ours - 450_000) < 500, abs(thousand - 450_000) < 500 and room == ROOM)


def _conversations(room: Room) -> Found:
    thousand = replace(room, per_token=128_000).tokens / 2048
    ours = room.tokens // 2048
    return Found(f"{ours:.0f}", abs(ours - 220) < 1, abs(thousand - 220) < 1 and room == ROOM)


def _recompute(pair: tuple[Model, Hardware]) -> Found:
    """Whether computing 1,024 tokens again is cheaper than moving them twice."""
    moved, again = swap_seconds(*pair, 1024), prefill_seconds(*pair, 1024, 2048)
    ratio = again / moved
    return Found(f"computing takes {ratio:.1f} times as long as moving", ratio < 1, 1 < ratio < 20)


def _chunked_worst(chunk: int) -> Found:
    worst = max(milliseconds(Linear(), 16, min(chunk, 4000 - at)) for at in range(0, 4000, chunk))
    return Found(amount(worst, "ms"), worst < 268 / 4)


GROUP = Group(
    name="arithmetic",
    title="The cost of a step, and what fits into memory",
    claims=(
        Claim(
            name="a step alone",
            source=SLOTS,
            text="22 ms + 0.35 ms per sequence: one sequence takes 22.4 ms",
            published="22.4 ms",
            tag="closed form",
            given=Linear(),
            perturbed=DEARER,
            check=lambda cost: near(milliseconds(cost, 1), 22.4, within=0.05, unit="ms"),
        ),
        Claim(
            name="a step of 32",
            source=SLOTS,
            text="32 sequences take 33.2 ms",
            published="33.2 ms",
            tag="closed form",
            given=Linear(),
            perturbed=DEARER,
            check=lambda cost: near(milliseconds(cost, 32), 33.2, within=0.05, unit="ms"),
        ),
        Claim(
            name="32 for 1.5",
            source=SLOTS,
            text="32 tokens cost 1.5 times the time of one",
            published="x1.5",
            tag="closed form",
            given=Linear(),
            perturbed=DEARER,
            check=lambda cost: near(milliseconds(cost, 32) / milliseconds(cost, 1), 1.5, within=0.05, unit="x"),
        ),
        Claim(
            name="a prompt in the way",
            source=SLOTS,
            text="16 streams with a prompt of 4,000 tokens in their pass take 268 ms",
            published="268 ms",
            tag="closed form",
            given=Linear(),
            perturbed=Linear(per_prompt_token=0.00003),
            check=lambda cost: near(milliseconds(cost, 16, 4000), 268, within=0.5, unit="ms"),
        ),
        Claim(
            name="no prompt in the way",
            source=SLOTS,
            text="the same 16 streams without it take 27.6 ms",
            published="27.6 ms",
            tag="closed form",
            given=Linear(),
            perturbed=DEARER,
            check=lambda cost: near(milliseconds(cost, 16), 27.6, within=0.05, unit="ms"),
        ),
        Claim(
            name="chunks bound the pass",
            source=SLOTS,
            text="in chunks of 512 no pass belongs to one user's prompt of 4,000 (below a quarter of 268 ms)",
            published="< 67 ms",
            tag="closed form",
            given=512,
            perturbed=4000,
            check=_chunked_worst,
        ),
        Claim(
            name="KV of a token",
            source=SLOTS,
            text="Llama-3-8B in 16 bits keeps 128 KiB of keys and values per token",
            published="131,072 B",
            tag="closed form",
            given=LLAMA,
            perturbed=replace(LLAMA, num_kv_heads=32),
            check=lambda model: equal(model.kv_bytes_per_token, 131_072, "B"),
        ),
        Claim(
            name="tokens in 80 GB",
            source=SLOTS,
            text="92 % of 80 GB less 16 GB of weights hold about 450,000 tokens",
            published="450,000",
            tag="closed form",
            given=ROOM,
            perturbed=replace(ROOM, share=0.8),
            check=_tokens_in_memory,
            remark="Wrong by the article's own formula, which gives 439,453: 450,000 comes of dividing by 128,000 "
            "bytes instead of 128 KiB.",
        ),
        Claim(
            name="conversations in 80 GB",
            source=SLOTS,
            text="that is about 220 conversations of 2,048 tokens",
            published="220",
            tag="closed form",
            given=ROOM,
            perturbed=replace(ROOM, share=0.8),
            check=_conversations,
            remark="Wrong for the same reason: 214 fit, 219.7 if a token took 128,000 bytes.",
        ),
        Claim(
            name="recompute or move",
            source=SLOTS,
            text="dropping a victim's KV and computing it again is usually cheaper than a round trip over PCIe",
            published="< x1",
            tag="closed form",
            given=(LLAMA, HARDWARE["a100-80"]),
            perturbed=(LLAMA, replace(HARDWARE["a100-80"], host_bandwidth=32e6)),
            check=_recompute,
            remark="Wrong for whole contexts on an idle link (Llama-3-8B, 1,024 tokens, A100 with PCIe 4): moving is "
            "cheaper. It can be right for short contexts, for many small copies, and where prefill rides along with "
            "decodes.",
        ),
        Claim(
            name="KV of OPT-13B",
            source=VLLM,
            text="a token of OPT-13B takes 800 KB (2 x 5,120 x 40 x 2 bytes)",
            published="819,200 B",
            tag="closed form",
            given=OPT,
            perturbed=replace(OPT, num_layers=48),
            check=lambda model: equal(model.kv_bytes_per_token, 819_200, "B"),
        ),
        Claim(
            name="a request of OPT-13B",
            source=VLLM,
            text="a request of 2,048 tokens can take up to 1.6 GB",
            published="1.6 GB",
            tag="closed form",
            given=OPT,
            perturbed=replace(OPT, num_layers=48),
            check=lambda m: near(m.kv_bytes_per_token * m.max_model_len / 2**30, 1.6, within=0.05, unit="GiB"),
        ),
        Claim(
            name="slots on an A100-40",
            source=VLLM,
            text="12 GB for keys and values of OPT-13B are 15.7 thousand slots of one token",
            published="15.7K",
            tag="closed form",
            given=12 * 2**30,
            perturbed=14 * 2**30,
            check=lambda room: near(room / OPT.kv_bytes_per_token / 1000, 15.7, within=0.05, unit="K"),
        ),
    ),
)
