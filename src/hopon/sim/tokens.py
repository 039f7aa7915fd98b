"""A device without a model: it yields tokens, and an end token where a request's true length says so.

It is the only place that knows true lengths. What it does costs the same for any context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hopon.core.plan import OpenRow, RowResult, StepPlan, StepResult
from hopon.workload import END_TOKEN


class Done:
    """A step whose result is there already."""

    __slots__ = ("_result",)

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        """At once."""
        return self._result


class _Row:
    """A sequence on the device. Until its end it yields the same token again and again."""

    __slots__ = ("again", "end", "script", "start")

    def __init__(self, opened: OpenRow, end: int, script: Sequence[int] | None) -> None:
        self.again = RowResult(opened.row, (2 * opened.seed,))
        self.start = len(opened.prompt)
        limit = opened.params.max_tokens
        # known tokens when it samples its end token; at its limit it ends without one
        self.end = self.start + end - 1 if limit is None or end < limit else -1
        self.script = script


class SimulatedDevice:
    """An executor that computes nothing. A request is known by its seed: its number in the workload.

    Args:
        length: true output length of a request, by number.
        script: all of its output, by number, where a run is played again; its last token is the end.
    """

    def __init__(self, length: Callable[[int], int], script: Callable[[int], Sequence[int]] | None = None) -> None:
        self._length = length
        self._script = script
        self._rows: dict[int, _Row] = {}

    def submit(self, plan: StepPlan) -> Done:
        """Yield a token for every row that samples."""
        rows = self._rows
        for row in plan.closed:
            del rows[row]
        for opened in plan.opened:
            script = self._script(opened.seed) if self._script else None
            rows[opened.row] = _Row(opened, self._length(opened.seed), script)
        results = []
        for chunk in plan.chunks:
            state = rows[chunk.row]
            known = chunk.start + chunk.count
            if not chunk.sample:
                results.append(RowResult(chunk.row))
            elif state.script is not None:
                results.append(RowResult(chunk.row, (state.script[known - state.start],)))
            else:
                results.append(state.again if known != state.end else RowResult(chunk.row, (END_TOKEN,)))
        return Done(StepResult(tuple(results)))

    def close(self) -> None:
        """Nothing to release."""
