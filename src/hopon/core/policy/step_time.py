"""Chunks as large as a step's time allows: the cost of a step is learnt while it serves, prompts get what is left.

Deterministic given the measured times. Outputs do not depend on it: they are the same for any chunk borders.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import sqrt

from hopon.core.plan import Chunk, StepPlan
from hopon.core.policy.composition import Action, Admit, Composition, Continue, Which
from hopon.core.policy.preset import Observer
from hopon.core.sequence import Sequence
from hopon.core.step import Step

GRAIN = 16
"""Chunks are multiples of this many tokens, and never smaller: a prompt always goes on."""

MIN_STEPS = 4
"""Steps with prompts that must have been seen before the fit is believed."""

_SCALE = (1.0, 1 / 16, 1 / 128, 1e-5)  # brings the features to about 1, so that one ridge suits all
_DECAY = 0.97  # of an observation with every later one
_RIDGE = 1e-3


class StepCost:
    """Seconds of a step as a linear function of its decodes, its prompt tokens and the pairs that attention looks at.

    Least squares over the steps that computed prompts, older ones counting less (ridge regression with exponential
    forgetting). Steps of decodes alone are not taken in: they would only push out what is known of prompts.
    """

    def __init__(self) -> None:
        size = len(_SCALE)
        self.num_steps = 0
        self.weights = [0.0] * size
        """Seconds of a step, of a decode, of a prompt token, of a pair."""
        self._products = [[_RIDGE * (i == j) for j in range(size)] for i in range(size)]
        self._targets = [0.0] * size

    def add(self, chunks: tuple[Chunk, ...], seconds: float) -> None:
        """A step took so long."""
        features = [value * scale for value, scale in zip(_features(chunks), _SCALE, strict=True)]
        for i, value in enumerate(features):
            self._targets[i] = self._targets[i] * _DECAY + value * seconds
            row = self._products[i]
            for j, other in enumerate(features):
                row[j] = row[j] * _DECAY + value * other
            row[i] += (1 - _DECAY) * _RIDGE
        self.num_steps += 1
        solved = _solve(self._products, self._targets)
        self.weights = [max(0.0, weight * scale) for weight, scale in zip(solved, _SCALE, strict=True)]

    def seconds(self, chunks: tuple[Chunk, ...]) -> float:
        """What a step would take."""
        return sum(weight * value for weight, value in zip(self.weights, _features(chunks), strict=True))

    def tokens(self, start: int, seconds: float) -> int:
        """Prompt tokens from position ``start`` that ``seconds`` suffice for."""
        _, _, token, pair = self.weights
        linear = token + pair * start
        if seconds <= 0:
            return 0
        if pair > 0:
            return int((sqrt(linear * linear + 2 * pair * seconds) - linear) / pair)
        return int(seconds / linear) if linear > 0 else 1 << 30


class StepTime(Observer):
    """Wraps a composition: prompts get chunks that keep the step within ``target`` seconds, as far as is known.

    It must be among the policy's observers too.
    """

    def __init__(self, inner: Composition, target: float) -> None:
        self.cost = StepCost()
        self._inner = inner
        self._target = target

    def compose(self, step: Step) -> Iterator[Action]:
        """What the inner composition does, with a limit on the chunks of prompts."""

        def size(sequence: Sequence, remaining: int, left: int) -> int:
            return min(remaining, left, self._chunk(step, sequence))

        for action in self._inner.compose(step):
            match action:
                case Admit() | Continue(which=Which.PREFILL) if self.cost.num_steps >= MIN_STEPS:
                    yield replace(action, size=size)
                case _:
                    yield action

    def committed(self, plan: StepPlan, seconds: float) -> None:
        """Learn from steps with prompts."""
        if any(chunk.count > 1 for chunk in plan.chunks):
            self.cost.add(plan.chunks, seconds)

    def _chunk(self, step: Step, sequence: Sequence) -> int:
        planned = tuple(chunk for _, chunk in step.chunks.values())
        start = sequence.num_computed or step.cached_tokens(sequence)
        fits = self.cost.tokens(start, self._target - self.cost.seconds(planned)) // GRAIN * GRAIN
        if any(chunk.count > 1 for chunk in planned):
            return fits  # somebody's prompt goes on already
        return max(fits, GRAIN)


def _features(chunks: tuple[Chunk, ...]) -> tuple[float, float, float, float]:
    """One, decodes, prompt tokens, pairs of a token and one that it looks at."""
    prompt = sum(chunk.count for chunk in chunks if chunk.count > 1)
    pairs = sum(chunk.count * (chunk.start + chunk.count / 2) for chunk in chunks)
    return 1.0, float(sum(chunk.count == 1 for chunk in chunks)), float(prompt), pairs


def _solve(matrix: list[list[float]], target: list[float]) -> list[float]:
    """The solution of a positive definite system, by elimination."""
    rows = [[*row, value] for row, value in zip(matrix, target, strict=True)]
    size = len(rows)
    for i in range(size):
        for below in rows[i + 1 :]:
            factor = below[i] / rows[i][i]
            for j in range(i, size + 1):
                below[j] -= factor * rows[i][j]
    solved = [0.0] * size
    for i in reversed(range(size)):
        solved[i] = (rows[i][size] - sum(rows[i][j] * solved[j] for j in range(i + 1, size))) / rows[i][i]
    return solved
