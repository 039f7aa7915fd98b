"""A device without a model: it yields tokens, and an end token where a request's true length says so.

It is the only place that knows true lengths. What it does costs the same for any context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from hopon.core.plan import Chunk, OpenRow, RowResult, StepPlan, StepResult
from hopon.workload.ask import END_TOKEN


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

    __slots__ = ("again", "end")

    def __init__(self, opened: OpenRow, length: int) -> None:
        self.again = RowResult(opened.row, (2 * opened.seed,))
        limit = opened.params.max_tokens
        # known tokens when it samples its end token; at its limit it ends without one
        self.end = len(opened.prompt) + length - 1 if limit is None or length < limit else -1


class SimulatedDevice:
    """An executor that computes nothing. A request is known by its seed: its number in the workload.

    Args:
        length: true output length of a request, by number.
    """

    def __init__(self, length: Callable[[int], int]) -> None:
        self._length = length
        self._rows: dict[int, _Row] = {}

    def submit(self, plan: StepPlan) -> Done:
        """Yield a token for every row that samples."""
        rows = self._rows
        for row in plan.closed:
            del rows[row]
        for opened in plan.opened:
            rows[opened.row] = _Row(opened, self._length(opened.seed))
        results = []
        for chunk in plan.chunks:
            row = chunk.row
            if not chunk.sample:
                results.append(RowResult(row))
                continue
            state = rows[row]
            results.append(state.again if chunk.start + chunk.count != state.end else RowResult(row, (END_TOKEN,)))
        return Done(StepResult(tuple(results)))

    def close(self) -> None:
        """Nothing to release."""

    def token(self, row: int) -> int:
        """What a row yields until its end."""
        return self._rows[row].again.tokens[0]

    def steps_to_end(self, row: int, known: int) -> float:
        """How many more tokens a row of ``known`` tokens yields before its end token; infinite without one."""
        end = self._rows[row].end
        return end - known if end >= 0 else inf


class ScriptedDevice:
    """An executor that yields recorded tokens again; behind the end of a record, where nobody listens, zeros.

    Args:
        outputs: all output tokens of each request, by number.
    """

    def __init__(self, outputs: Sequence[Sequence[int]]) -> None:
        self._outputs = outputs
        self._rows: dict[int, tuple[int, Sequence[int]]] = {}  # prompt length and output

    def submit(self, plan: StepPlan) -> Done:
        """Yield the recorded token for every row that samples."""
        for row in plan.closed:
            del self._rows[row]
        for opened in plan.opened:
            self._rows[opened.row] = len(opened.prompt), self._outputs[opened.seed]
        return Done(StepResult(tuple(map(self._result, plan.chunks))))

    def close(self) -> None:
        """Nothing to release."""

    def _result(self, chunk: Chunk) -> RowResult:
        if not chunk.sample:
            return RowResult(chunk.row)
        start, output = self._rows[chunk.row]
        index = chunk.start + chunk.count - start
        return RowResult(chunk.row, (output[index] if index < len(output) else 0,))
