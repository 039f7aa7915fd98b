"""What brings a preempted sequence back sooner: moving its keys and values out and in, or computing them again?

Both by the roofline. Moving takes bytes over the host link, twice. Computing takes one prefill of the context in passes
of a token budget; ``beside`` other sequences that decode in the same passes, only what it adds to them counts, and up
to the machine's knee a few tokens more are free, because the weights are read anyway. Moving one block at a time costs
more per byte than the link's rate on real machines; that is not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence

from hopon.sim.cost import Roofline
from hopon.sim.hardware import HARDWARE, Hardware, Model
from hopon.sim.report import number, table
from hopon.tracing import StepFeatures

CONTEXTS = (64, 256, 1024, 4096, 16384)


def swap_seconds(model: Model, device: Hardware, context: int) -> float:
    """Out to the host and in again."""
    return 2 * context * model.kv_bytes_per_token / (device.host_bandwidth * device.host_efficiency)


def prefill_seconds(model: Model, device: Hardware, context: int, budget: int, beside: int = 0) -> float:
    """The whole context again, in passes of at most ``budget`` tokens, ``beside`` decodes included; logits once."""
    if not 0 <= beside < budget:
        raise ValueError(f"beside must be in [0, budget {budget}), got {beside}")
    cost = Roofline(model=model, hardware=device)
    others = StepFeatures(num_decodes=beside, num_logits=beside)
    seconds = 0.0
    for start in range(0, context, budget - beside):
        count = min(budget - beside, context - start)
        last = start + count == context
        step = others._replace(
            num_prefills=1,
            prefill_tokens=count,
            prefill_work=count * (start + count / 2),
            num_logits=beside + last,
        )
        seconds += cost.seconds(step) - cost.seconds(others)
    return seconds


def crossover(model: Model, device: Hardware, budget: int, longest: int, beside: int = 0, grain: int = 16) -> int:
    """Longest context, in multiples of ``grain``, that is computed again at least as quickly as moved; 0 for none."""
    for context in range(longest - longest % grain, 0, -grain):
        if prefill_seconds(model, device, context, budget, beside) <= swap_seconds(model, device, context):
            return context
    return 0


def swap_table(
    model: Model,
    *,
    budget: int = 2048,
    beside: int = 32,
    contexts: Sequence[int] = CONTEXTS,
    devices: Sequence[str] = tuple(HARDWARE),
) -> str:
    """Milliseconds by context for each device: moved / computed alone / computed beside others, and the crossovers."""
    longest = min(max(contexts), model.max_model_len)
    rows = []
    for name in devices:
        device = HARDWARE[name]
        cells = []
        for context in contexts:
            moved = swap_seconds(model, device, context)
            alone = prefill_seconds(model, device, context, budget)
            added = prefill_seconds(model, device, context, budget, beside)
            cells.append(" / ".join(number(1000 * seconds, 1) for seconds in (moved, alone, added)))
        borders = [crossover(model, device, budget, longest, others) for others in (0, beside)]
        rows.append((name, *cells, *(f"up to {border:,}" if border else "never" for border in borders)))
    head = ("ms: moved / alone / beside", *(f"{context:,} tokens" for context in contexts))
    return table((*head, "computing wins alone", f"beside {beside} decodes"), rows)
