"""How many replicas, and at which settings, for a given traffic: a prediction by the simulator.

For every combination of settings and router the smallest number of replicas is looked for that keeps the promise on the
same requests. Step times come from a roofline with stated shares of peak and bandwidth; what the answer would be if
those were better or worse by a seventh is told with it, since nobody knows them exactly before the machine is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
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
from hopon.workload import Workload

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
        seconds = self.traffic.asks[-1].arrival
        totals = result.totals
        useful = totals.scheduled_tokens - totals.recomputed_tokens
        return fold(
            records,
            self.promise,
            rate=len(records) / seconds if seconds else 0.0,
            seed=0,
            seconds=seconds,
            recomputed=totals.recomputed_tokens / useful if useful else 0.0,
            figures={"busy": totals.busy_seconds / (replicas * max(result.summary.seconds, 1e-9))},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """So many replicas keep the promise; None: not even the most that were tried."""

    replicas: int | None
    router: str
    settings: Mapping[str, int]
    window: Window


Say = Callable[[str], None]


def needed(site: Site, router: str, settings: Mapping[str, int], least: int = 1) -> Need:
    """The smallest number of replicas, by doubling and halving."""
    tried: dict[int, Window] = {}

    def keeps(count: int) -> bool:
        tried[count] = site.play(count, router, settings)
        return tried[count].kept

    low, high = least - 1, least
    while not keeps(high):
        low, high = high, min(2 * high, site.max_replicas)
        if low == high:
            return Need(replicas=None, router=router, settings=settings, window=tried[high])
    while high - low > 1:
        middle = (low + high) // 2
        if keeps(middle):
            high = middle
        else:
            low = middle
    return Need(replicas=high, router=router, settings=settings, window=tried[high])


def plan(site: Site, routers: Sequence[str], ladder: Mapping[str, Sequence[int]], say: Say) -> str:
    """Try all settings with the first router, the others with the best settings, then the sensitivity.

    Args:
        site: what for.
        routers: names.
        ladder: values to try of each setting.
        say: hears of progress.
    """
    found = []
    for settings in _combinations(ladder):
        need = needed(site, routers[0], settings)
        say(f"{_words(settings)}: {_count(need)}")
        found.append(need)
    best = min(found, key=_rank)
    if best.replicas is None:
        shown = table(*_table([best]))
        return f"{shown}\n\nnot even {site.max_replicas} replicas keep the promise with any of the settings tried"
    others = [needed(site, router, best.settings) for router in routers[1:]]
    best = min([best, *others], key=_rank)
    assert best.replicas is not None, "it was found above"
    sensitive = []
    for factor in SENSITIVITY:
        device = replace(
            site.hardware,
            flops_efficiency=min(1.0, site.hardware.flops_efficiency * factor),
            bandwidth_efficiency=min(1.0, site.hardware.bandwidth_efficiency * factor),
        )
        need = best if factor == 1 else needed(replace(site, hardware=device), best.router, best.settings)
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
        return "too few tried"
    return f"{need.replicas} replica{'s' * (need.replicas > 1)}"


def _ms(figures: Mapping[str, Any], name: str) -> str:
    value = figures.get(name)
    return "-" if value is None else f"{number(1e3 * value, 0)} ms"
