"""A cost model fitted to step records of a real run, with the standard library alone.

The model is :class:`hopon.sim.cost.Fitted`: piecewise linear in the tokens of a pass, plus linear terms, which makes it
linear in its coefficients. Errors are relative to what the model says a step takes, which takes a few rounds to know
(iteratively reweighted least squares: Nelder and Wedderburn 1972). Relative to what it took, steps that something held
up would hardly count, and the model would be too quick on average. Coefficients that come out negative are set to
nothing and the rest is solved again: more work never takes less time.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from math import inf, sqrt
from pathlib import Path
from statistics import fmean, median
from typing import Any

from hopon.sim.cost import Cost, Fitted, pieces
from hopon.tracing import StepFeatures, StepRecord

HELD_OUT = 5
"""Every fifth record is not fitted to but tested on."""

_IDLE = 0.01
"""Seconds between two steps from which the engine had nothing to do."""

_ROUNDS = 4
_FARTHEST = 10.0
"""No step weighs more than one that took so many times as long as expected."""

_MIN_RECORDS = 20
_KNOTS = (8, 24, 64, 128, 256, 512, 1024, 2048, 4096)
"""Tokens at which the slope may change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """A fitted model and how wrong it is.

    Args:
        cost: the model.
        num_fitted: records that it was fitted to.
        error_fitted: its mean absolute percentage error on those, as a share.
        num_mixed: held-out records with both decodes and prefill.
        error_mixed: the error on those; None without any.
        num_held_out: all held-out records.
        error_held_out: the error on those.
        error_total: simulated time of all held-out records against the measured one, as a signed share.
    """

    cost: Fitted
    num_fitted: int
    error_fitted: float
    num_mixed: int
    error_mixed: float | None
    num_held_out: int
    error_held_out: float
    error_total: float

    def __str__(self) -> str:
        mixed = "no mixed step among them" if self.error_mixed is None else f"{100 * self.error_mixed:.1f} % on the "
        mixed += "" if self.error_mixed is None else f"{self.num_mixed} mixed steps (decodes and prefill in one pass)"
        cost = self.cost
        slopes = ", ".join(f"{slope:.4g} from {knot}" for knot, slope in zip(cost.knots, cost.slopes, strict=True))
        return (
            f"seconds = {cost.base:.4g} + ({slopes}) T + {cost.c:.4g} context + {cost.d:.4g} prefill work "
            f"+ {cost.e:.4g} sequences\n"
            f"mean absolute error: {100 * self.error_fitted:.1f} % on {self.num_fitted} fitted steps, "
            f"{100 * self.error_held_out:.1f} % on {self.num_held_out} held-out steps, {mixed}\n"
            f"time of all held-out steps: {100 * self.error_total:+.1f} %"
        )


def with_gaps(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Records whose time runs to the beginning of the next step, where the engine had one ready.

    What an engine needs to take results in, tell them and plan is no part of a step's own time, and yet the next step
    waits for it. Pauses of an idle engine are longer; those steps get the median gap.
    """
    if not records:
        return []
    gaps = [after.start - before.start - before.seconds for before, after in pairwise(records)]
    short = [gap for gap in gaps if 0 <= gap < _IDLE]
    usual = median(short) if short else 0.0
    return [
        replace(record, seconds=record.seconds + (gap if 0 <= gap < _IDLE else usual))
        for record, gap in zip(records, [*gaps, usual], strict=True)
    ]


def calibrate(records: Sequence[StepRecord]) -> Calibration:
    """Fit to four fifths of the records and test on the others. Steps that move blocks are left out.

    Raises:
        ValueError: too few records.
    """
    usable = [r for r in records if r.features.computes and not r.features.moved_blocks and r.seconds > 0]
    if len(usable) < _MIN_RECORDS:
        raise ValueError(f"at least {_MIN_RECORDS} steps that compute are needed for a fit, got {len(usable)}")
    held = usable[HELD_OUT - 1 :: HELD_OUT]
    kept = [record for i, record in enumerate(usable) if i % HELD_OUT != HELD_OUT - 1]
    cost = fit(kept)
    mixed = [r for r in held if r.features.num_decodes and r.features.num_prefills]
    measured = sum(record.seconds for record in held)
    return Calibration(
        cost=cost,
        num_fitted=len(kept),
        error_fitted=error(cost, kept),
        num_mixed=len(mixed),
        error_mixed=error(cost, mixed) if mixed else None,
        num_held_out=len(held),
        error_held_out=error(cost, held),
        error_total=sum(cost.seconds(record.features) for record in held) / measured - 1,
    )


def error(cost: Fitted, records: Sequence[StepRecord]) -> float:
    """Mean absolute percentage error, as a share."""
    return sum(abs(cost.seconds(r.features) / r.seconds - 1) for r in records) / len(records)


def fit(records: Sequence[StepRecord]) -> Fitted:
    """Least squares of relative errors; knots where there are records on either side."""
    knots = _knots([record.features.num_tokens for record in records])
    rows = [_regressors(record.features, knots) for record in records]
    seconds = [record.seconds for record in records]
    expected = seconds
    for _ in range(_ROUNDS):
        base, *slopes, c, d, e = _solve(rows, seconds, expected)
        cost = Fitted(base=base, knots=knots, slopes=tuple(slopes), c=c, d=d, e=e)
        expected = [max(cost.seconds(r.features), r.seconds / _FARTHEST) for r in records]
    return cost


def paces(runs: Iterable[tuple[int, Sequence[StepRecord]]], cost: Cost) -> tuple[float, ...]:
    """How much longer steps took in single runs than in all that loaded the server in the same way: its good and bad
    minutes.

    Args:
        runs: number of the way, and records, of each run. Those of a way that was taken once say nothing.
        cost: takes out what was different about the steps.
    """
    ways: dict[int, list[float]] = defaultdict(list)
    for way, records in runs:
        usable = [r for r in records if r.features.computes and not r.features.moved_blocks]
        if usable:
            ways[way].append(sum(r.seconds for r in usable) / sum(cost.seconds(r.features) for r in usable))
    return tuple(
        (ratio / fmean(ratios)) ** sqrt(len(ratios) / (len(ratios) - 1))  # a mean of few is near each of them
        for ratios in ways.values()
        if len(ratios) > 1
        for ratio in ratios
    )


def _knots(tokens: Sequence[int]) -> tuple[int, ...]:
    """Those of the candidates that have records between them and the next one."""
    knots = [0]
    for knot in _KNOTS:
        below, above = (
            sum(low < number <= high for number in tokens) for low, high in ((knots[-1], knot), (knot, inf))
        )
        if min(below, above) >= _MIN_RECORDS:
            knots.append(knot)
    return tuple(knots)


def _regressors(step: StepFeatures, knots: Sequence[int]) -> list[float]:
    return [1.0, *pieces(step.num_tokens, knots), step.decode_context, step.prefill_work, step.num_seqs]


def _solve(rows: Sequence[Sequence[float]], seconds: Sequence[float], expected: Sequence[float]) -> list[float]:
    """Least squares of errors relative to ``expected``, without negative coefficients: while there are any, the most
    negative one leaves."""
    width = len(rows[0])
    weighted = [[value / scale for value in row] for row, scale in zip(rows, expected, strict=True)]
    goals = [second / scale for second, scale in zip(seconds, expected, strict=True)]
    scales = [max((abs(row[i]) for row in weighted), default=0.0) or 1.0 for i in range(width)]
    weighted = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in weighted]
    gram = [[sum(row[i] * row[j] for row in weighted) for j in range(width)] for i in range(width)]
    target = [sum(row[i] * goal for row, goal in zip(weighted, goals, strict=True)) for i in range(width)]
    active = [i for i in range(width) if gram[i][i] > 0]
    while active:
        found = _gauss([[gram[i][j] for j in active] for i in active], [target[i] for i in active])
        least = min(range(len(active)), key=lambda k: found[k])
        if found[least] >= 0:
            break
        del active[least]
    else:
        found = []
    result = [0.0] * width
    for i, value in zip(active, found, strict=True):
        result[i] = value / scales[i]
    return result


def _gauss(matrix: list[list[float]], target: list[float]) -> list[float]:
    """Solve by elimination. The diagonal gets a little more: in decoding, tokens and sequences are the same number."""
    size = len(target)
    ridge = 1e-9 * max(matrix[i][i] for i in range(size))
    work = [[*row, target[i]] for i, row in enumerate(matrix)]
    for i in range(size):
        work[i][i] += ridge
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(work[k][i]))
        work[i], work[pivot] = work[pivot], work[i]
        for k in range(i + 1, size):
            factor = work[k][i] / work[i][i]
            work[k] = [value - factor * above for value, above in zip(work[k], work[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(work[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (work[i][size] - rest) / work[i][i]
    return solution


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A fitted model on disk, and the machine it was measured on.

    Args:
        cost: the model.
        capacity_tokens: of its KV cache.
        kv_bytes_per_token: of its model.
        overhead: seconds by which a client's first token is later than the engine's.
        paces: see :func:`paces`; empty where they were not measured.
        settings: of the scheduler it ran with; empty where they were not recorded.
    """

    cost: Fitted
    capacity_tokens: int
    kv_bytes_per_token: int
    overhead: float = 0.0
    paces: tuple[float, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


def write(path: Path, saved: Saved, calibration: Calibration) -> None:
    """All of it and how wrong it is, as JSON."""
    content: dict[str, Any] = {"hopon": "cost", "version": 2} | asdict(saved)
    content["coefficients"] = {name: value for name, value in content.pop("cost").items() if name != "link"}
    content["errors"] = {
        one.name: getattr(calibration, one.name) for one in fields(calibration) if one.name.startswith("error")
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Saved:
    """What :func:`write` wrote.

    Raises:
        OSError: it cannot be read.
        ValueError: names the file and what is wrong.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if (content.get("hopon"), content.get("version")) != ("cost", 2):
            raise ValueError("not a cost model, version 2: fit it again")
        coefficients = content["coefficients"]
        lists = {name: tuple(coefficients[name]) for name in ("knots", "slopes")}
        return Saved(
            cost=Fitted(**coefficients | lists),
            capacity_tokens=content["capacity_tokens"],
            kv_bytes_per_token=content["kv_bytes_per_token"],
            overhead=content.get("overhead", 0.0),
            paces=tuple(content.get("paces", ())),
            settings=content.get("settings", {}),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a fitted cost model: {error!r}") from error
