"""How many replicas, and at which settings, for a given traffic: a prediction by the simulator.

For every combination of settings and router the smallest number of replicas is looked for that keeps the promise on the
same requests. Step times come from a roofline with stated shares of peak and bandwidth; what the answer would be if
those were better or worse by a seventh is told with it, since nobody knows them exactly before the machine is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Any

from hopon.capacity.promise import Promise
from hopon.capacity.search import Window
from hopon.capacity.window import fold
from hopon.core.policy.presets import make_preset
from hopon.sim.cluster import router as make_router
from hopon.sim.command import make_config, make_machine
from hopon.sim.hardware import Hardware
from hopon.sim.report import number, table
from hopon.sim.run import simulate
from hopon.workload.ask import Workload

_SAMPLE = 200
"""Requests from which the work of all is guessed."""

SENSITIVITY = (1 / 1.15, 1.0, 1.15)
"""Factors on the shares of peak and bandwidth that the roofline assumes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """What is to be planned for.

    Args:
        traffic: the requests.
        promise: to their users.
        model: a built-in name or a path of a config.json.
        hardware: of each replica.
        policy: preset of each engine.
        max_replicas: more are not tried.
    """

    traffic: Workload
    promise: Promise
    model: str
    hardware: Hardware
    policy: str
    max_replicas: int

    def play(self, replicas: int, router: str, settings: Mapping[str, int]) -> Window:
        """The traffic on so many replicas."""
        preset = make_preset(self.policy, {})
        machine = make_machine("roofline", self.model, self.hardware)
        config = make_config(preset, machine, self.traffic, settings)
        result = simulate(
            self.traffic,
            config,
            preset.policy,
            machine.with_blocks(config.block_size, self.hardware),
            replicas=replicas,
            router=make_router(router) if replicas > 1 else None,
            fast=True,
        )
        kinds = [ask.kind for ask in self.traffic]
        records = [replace(record, kind=kinds[int(record.request_id)]) for record in result.records]
        seconds = self.traffic.asks[-1].arrival or result.summary.seconds
        totals = result.totals
        useful = totals.scheduled_tokens - totals.recomputed_tokens
        return fold(
            records,
            self.promise,
            rate=len(records) / seconds if seconds else 0.0,
            seed=0,
            seconds=seconds,
            recomputed=totals.recomputed_tokens / useful if useful else 0.0,
            figures={
                "replicas": replicas,
                "seconds": result.summary.seconds,
                "busy": totals.busy_seconds / (replicas * max(result.summary.seconds, 1e-9)),
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """So many replicas keep the promise; None: not even the most that were tried, which are those of the window."""

    replicas: int | None
    router: str
    settings: Mapping[str, int]
    window: Window


Say = Callable[[str], None]


def needed(site: Site, router: str, settings: Mapping[str, int], guess: int, most: int | None = None) -> Need:
    """The smallest number of replicas that keeps the promise, by growing steps from a guess and then by halving.

    Args:
        site: what for.
        router: in front of them.
        settings: of each of them.
        guess: tried first; the nearer, the fewer simulations.
        most: more are not of interest; None for what the site says.
    """
    tried: dict[int, Window] = {}

    def keeps(count: int) -> bool:
        tried[count] = site.play(count, router, settings)
        return tried[count].kept

    most = min(most or site.max_replicas, site.max_replicas)
    low, high, step = 0, max(1, min(guess, most)), 1
    if keeps(high):
        while high - step > low:
            if not keeps(high - step):
                low = high - step
                break
            high, step = high - step, 2 * step
    else:
        while True:
            if high == most:
                return Need(replicas=None, router=router, settings=settings, window=tried[high])
            low, high, step = high, min(most, high + step), 2 * step
            if keeps(high):
                break
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return Need(replicas=high, router=router, settings=settings, window=tried[high])


def first_guess(site: Site, settings: Mapping[str, int]) -> int:
    """From how long one replica works on a part of the traffic that is there all at once."""
    asks = site.traffic.asks
    span = asks[-1].arrival - asks[0].arrival
    crowd = tuple(replace(ask, arrival=0.0) for ask in asks[:_SAMPLE])
    alone = replace(site, traffic=replace(site.traffic, asks=crowd)).play(1, "", settings)
    busy = alone.figures["seconds"] * len(asks) / len(crowd)
    return max(1, ceil(busy / span)) if span else 1


def plan(site: Site, routers: Sequence[str], ladder: Mapping[str, Sequence[int]], say: Say) -> str:
    """Try all settings with the first router, the others with the best settings, then the sensitivity.

    Args:
        site: what for.
        routers: names.
        ladder: values to try of each setting.
        say: hears of progress.
    """
    found: list[Need] = []
    guess, most = 0, None
    for settings in _combinations(ladder):
        need = needed(site, routers[0], settings, guess or first_guess(site, settings), most)
        if need.replicas is not None:  # who needs more than the best so far is not looked at any closer
            guess = most = need.replicas
        say(f"{_words(settings)}: {_count(need)}")
        found.append(need)
    best = min(found, key=_rank)
    if best.replicas is None:
        shown = table(*_table([best]))
        why = f" ({best.window.unstable})" if best.window.unstable else ""
        return f"{shown}\n\nnot even {site.max_replicas} replicas keep the promise with any of the settings tried{why}"
    others = [needed(site, router, best.settings, best.replicas, best.replicas) for router in routers[1:]]
    best = min([best, *others], key=_rank)
    assert best.replicas is not None, "it was found above"
    sensitive = []
    for factor in SENSITIVITY:
        device = replace(
            site.hardware,
            flops_efficiency=min(1.0, site.hardware.flops_efficiency * factor),
            bandwidth_efficiency=min(1.0, site.hardware.bandwidth_efficiency * factor),
        )
        other = replace(site, hardware=device)
        need = best if factor == 1 else needed(other, best.router, best.settings, best.replicas)
        sensitive.append(
            f"{_count(need)} at {device.flops_efficiency:.0%} of peak, {device.bandwidth_efficiency:.0%} of bandwidth"
        )
    figures = best.window.figures
    share = min((share.value or 0.0) for share in best.window.shares)
    return "\n".join(
        [
            table(*_table([*found, *others])),
            "",
            f"needed: {_count(best)}, {best.router} router, {_words(best.settings)}",
            f"there {share:.1%} of the requests are served as promised, TTFT p95 {_ms(figures, 'ttft_p95')}, TPOT p95 "
            f"{_ms(figures, 'tpot_p95')}, replicas are busy {figures['busy']:.0%} of the time",
            f"if the machine does better or worse than assumed: {'; '.join(sensitive)}",
            "",
            "This is a prediction: the engine's own scheduler on a virtual clock, with step times from a roofline "
            f"({site.hardware.source}).",
            "Shares of peak and bandwidth are assumptions; measure step times with `hopon calibrate` where the machine "
            "exists. Failing replicas, networks and cold caches are not in it.",
        ]
    )


def _combinations(ladder: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    for values in product(*ladder.values()):
        yield dict(zip(ladder, values, strict=True))


def _rank(need: Need) -> tuple[float, float]:
    """Fewest replicas; among equals the best served."""
    shares = [share.value or 0.0 for share in need.window.shares]
    return (float("inf") if need.replicas is None else need.replicas, -min(shares))


def _table(needs: Sequence[Need]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            _words(need.settings),
            need.router,
            _count(need),
            f"{min(share.value or 0.0 for share in need.window.shares):.1%}",
            *(_ms(need.window.figures, name) for name in ("ttft_p50", "ttft_p95", "tpot_p95")),
            f"{need.window.figures['busy']:.0%}",
        ]
        for need in needs
    ]
    return ["settings", "router", "needed", "as promised", "TTFT p50", "TTFT p95", "TPOT p95", "busy"], rows


def _words(settings: Mapping[str, int]) -> str:
    return " ".join(f"{name.removeprefix('max_num_')}={value}" for name, value in settings.items())


def _count(need: Need) -> str:
    if need.replicas is None:
        return f"more than {need.window.figures['replicas']}"
    return f"{need.replicas} replica{'s' * (need.replicas > 1)}"


def _ms(figures: Mapping[str, Any], name: str) -> str:
    value = figures.get(name)
    return "-" if value is None else f"{number(1e3 * value, 0)} ms"
