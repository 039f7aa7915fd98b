"""What a run did, step by step: a wrapper around an executor, one around a scheduler, and their JSON lines.

Both wrap, neither hooks: an engine without them has no code of theirs in its loop. A *step record* is what a step
computed and how long it took; cost models are fitted to them. A *journal* is what an engine was told and when, and what
it planned; the simulator can play it again. This module reads no model and no policy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hopon.core.clock import Clock
from hopon.core.config import SchedulerConfig
from hopon.core.plan import Executor, StepHandle, StepPlan, StepResult
from hopon.core.policy.preset import Policy
from hopon.core.scheduler import Scheduler
from hopon.core.types import Delta, FinishReason, Request, SamplingParams


class StepFeatures(NamedTuple):
    """What a step computes, as a cost model sees it.

    A chunk of one token is a decode here, whatever it belongs to: the arithmetic is the same.

    Args:
        num_decodes: chunks of one token.
        num_prefills: longer chunks.
        prefill_tokens: tokens of the longer chunks.
        decode_context: keys that the decodes attend to, all together.
        prefill_work: pairs of a token and a key it attends to, in the longer chunks: chunk * (prefix + chunk / 2).
        padding: tokens computed in vain.
        num_logits: rows of logits.
        moved_blocks: blocks copied to or from the host.
        copied_blocks: blocks copied within the pool.
    """

    num_decodes: int = 0
    num_prefills: int = 0
    prefill_tokens: int = 0
    decode_context: int = 0
    prefill_work: float = 0.0
    padding: int = 0
    num_logits: int = 0
    moved_blocks: int = 0
    copied_blocks: int = 0

    @property
    def num_seqs(self) -> int:
        """Sequences that compute. Padding of a step without prefill stands for sequences."""
        return self.num_decodes + self.num_prefills + (0 if self.prefill_tokens else self.padding)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of prefill chunks and of their padding."""
        return self.prefill_tokens + (self.padding if self.prefill_tokens else 0)

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model, padding included."""
        return self.num_decodes + self.prefill_tokens + self.padding

    @property
    def computes(self) -> bool:
        """Anything at all goes through the model."""
        return bool(self.num_decodes or self.prefill_tokens or self.padding)


def features(plan: StepPlan) -> StepFeatures:
    """What a plan computes."""
    decodes = context = prefills = tokens = logits = 0
    work = 0.0
    for chunk in plan.chunks:
        count = chunk.count
        if count == 1:
            decodes += 1
            context += chunk.start
            logits += chunk.num_logits
        else:
            prefills += 1
            tokens += count
            logits += chunk.num_logits
            work += count * (chunk.start + count / 2)
    moved = sum(move.kind != "copy" for move in plan.moves)
    return StepFeatures(
        decodes, prefills, tokens, context + decodes, work, plan.padding, logits, moved, len(plan.moves) - moved
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step: ``start`` is when it was submitted (or the step before it was done), ``seconds`` how long it took."""

    step: int
    start: float
    seconds: float
    features: StepFeatures


class TracedExecutor:
    """Passes plans on and notes what they computed and how long that took.

    Args:
        inner: the executor.
        clock: measures it.
        sink: gets each record when the step's result is fetched.
    """

    def __init__(self, inner: Executor, clock: Clock, sink: Callable[[StepRecord], None]) -> None:
        self._inner = inner
        self._clock = clock
        self._sink = sink
        self._done = clock.now()  # when the last fetched step was done

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step."""
        submitted = self._clock.now()
        return _TracedStep(self, self._inner.submit(plan), plan, submitted)

    def close(self) -> None:
        """Close the inner one."""
        self._inner.close()

    def fetched(self, plan: StepPlan, submitted: float) -> None:
        """A step is done; a step does not begin before the one in front of it ends."""
        now = self._clock.now()
        start = max(submitted, self._done)
        self._done = now
        self._sink(StepRecord(step=plan.step, start=start, seconds=now - start, features=features(plan)))


class _TracedStep:
    def __init__(self, traced: TracedExecutor, inner: StepHandle, plan: StepPlan, submitted: float) -> None:
        self._traced = traced
        self._inner = inner
        self._plan = plan
        self._submitted = submitted

    def result(self) -> StepResult:
        result = self._inner.result()
        self._traced.fetched(self._plan, self._submitted)
        return result


# ---- journals ----


class PlanDigest(NamedTuple):
    """All of a plan that two runs must agree on: (row, start, count, blocks) of each chunk, and the rest of it."""

    chunks: tuple[tuple[int, int, int, tuple[int, ...]], ...]
    opened: tuple[tuple[int, int, int], ...]
    closed: tuple[int, ...]
    moves: tuple[tuple[str, int, int], ...]
    padding: int

    @classmethod
    def of(cls, plan: StepPlan) -> PlanDigest:
        """Of a plan; an opened row is (row, prompt tokens, output tokens)."""
        return cls(
            tuple((chunk.row, chunk.start, chunk.count, chunk.new_blocks) for chunk in plan.chunks),
            tuple((opened.row, len(opened.prompt), len(opened.output)) for opened in plan.opened),
            plan.closed,
            tuple((move.kind, move.source, move.target) for move in plan.moves),
            plan.padding,
        )

    @property
    def does_anything(self) -> bool:
        """Whether an executor saw it."""
        return any(self)

    @classmethod
    def parse(cls, value: Any) -> PlanDigest:
        """From JSON."""
        chunks, opened, closed, moves, padding = value
        return cls(
            tuple((row, start, count, tuple(blocks)) for row, start, count, blocks in chunks),
            tuple(map(tuple, opened)),
            tuple(closed),
            tuple(map(tuple, moves)),
            padding,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """The engine took a request in."""

    time: float
    request: Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Aborted:
    """The engine was told to forget a request."""

    time: float
    request_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Closed:
    """The engine was told that no more requests will come; ``after`` planning that many times."""

    after: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan was made."""

    time: float
    step: int
    plan: PlanDigest


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """A step's result was taken in."""

    time: float
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A request ended, with all its output."""

    time: float
    request_id: str
    finish: FinishReason
    output: tuple[int, ...]


Entry = Told | Aborted | Closed | Planned | Committed | Ended


class JournalScheduler(Scheduler):
    """A scheduler that notes what it is told, when, and what it answers. An engine takes it like any other.

    Args:
        config: as for any scheduler.
        policy: as for any scheduler.
        sink: gets every entry.
    """

    def __init__(self, config: SchedulerConfig, policy: Policy | None, sink: Callable[[Entry], None]) -> None:
        super().__init__(config, policy)
        self._sink = sink
        self._outputs: dict[str, list[int]] = {}
        self._num_plans = 0

    def add(self, request: Request, now: float) -> None:
        """Note and do."""
        self._sink(Told(time=now, request=request))
        super().add(request, now)

    def abort(self, request_id: str, now: float) -> None:
        """Note and do."""
        self._sink(Aborted(time=now, request_id=request_id))
        super().abort(request_id, now)

    def close_input(self) -> None:
        """Note and do."""
        self._sink(Closed(after=self._num_plans))
        super().close_input()

    def plan(self, now: float) -> StepPlan:
        """Do and note."""
        plan = super().plan(now)
        self._num_plans += 1
        self._sink(Planned(time=now, step=plan.step, plan=PlanDigest.of(plan)))
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Delta]:
        """Do and note."""
        news = super().commit(plan, result, now)
        self._sink(Committed(time=now, step=plan.step))
        for delta in news:
            output = self._outputs.setdefault(delta.request_id, [])
            output += delta.tokens
            if delta.finish is not None:
                tokens = tuple(self._outputs.pop(delta.request_id))
                self._sink(Ended(time=now, request_id=delta.request_id, finish=delta.finish, output=tokens))
        return news


# ---- files ----

_VERSION = 1


class StepFile:
    """A file of step records that grows while an engine runs, line by line.

    Args:
        path: replaced.
        about: what it is a record of.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, about: Mapping[str, Any] | None = None) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)  # whole lines, for those who read along
        self._file.write(_dump({"hopon": "steps", "version": _VERSION, "about": dict(about or {})}))

    def add(self, record: StepRecord) -> None:
        """One more."""
        row = {"step": record.step, "start": record.start, "seconds": record.seconds}
        self._file.write(_dump(row | record.features._asdict()))

    def close(self) -> None:
        """No more."""
        self._file.close()


def write_steps(path: Path, records: Iterable[StepRecord], about: Mapping[str, Any] | None = None) -> None:
    """A line about the file, then one line per step."""
    file = StepFile(path, about)
    for record in records:
        file.add(record)
    file.close()


def read_about(path: Path) -> Mapping[str, Any]:
    """What a file of step records says of itself.

    Raises:
        OSError: it cannot be read.
        ValueError: it is something else.
    """
    _, head = next(_lines(path, "steps", head=True))
    about = head.get("about")
    return about if isinstance(about, dict) else {}


def read_steps(path: Path) -> list[StepRecord]:
    """What :func:`write_steps` wrote.

    Raises:
        OSError: it cannot be read.
        ValueError: names the file, the line and what is wrong.
    """
    records = []
    for number, row in _lines(path, "steps"):
        try:
            step, start, seconds = (row.pop(name) for name in ("step", "start", "seconds"))
            if not seconds >= 0:
                raise ValueError(f"seconds must be at least 0, got {seconds}")
            records.append(StepRecord(step=step, start=start, seconds=seconds, features=StepFeatures(**row)))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: not a step record: {error!r}") from error
    return records


_KINDS: Mapping[str, type[Entry]] = {
    "told": Told,
    "aborted": Aborted,
    "closed": Closed,
    "planned": Planned,
    "committed": Committed,
    "ended": Ended,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def write_journal(path: Path, config: SchedulerConfig, entries: Iterable[Entry]) -> None:
    """A line with the scheduler's settings, then one line per entry."""
    with path.open("w", encoding="utf-8") as file:
        file.write(_dump({"hopon": "journal", "version": _VERSION, "config": asdict(config)}))
        for entry in entries:
            file.write(_dump({"kind": _NAMES[type(entry)]} | asdict(entry)))


def read_journal(path: Path) -> tuple[SchedulerConfig, list[Entry]]:
    """What :func:`write_journal` wrote.

    Raises:
        OSError: it cannot be read.
        ValueError: names the file, the line and what is wrong.
    """
    lines = _lines(path, "journal", head=True)
    entries: list[Entry] = []
    number, head = next(lines)
    try:
        config = SchedulerConfig(**head["config"])
        for number, row in lines:  # noqa: B007 (an error names it)
            kind = _KINDS[row.pop("kind")]
            if kind is Told:
                row["request"] = _request(row["request"])
            elif kind is Planned:
                row["plan"] = PlanDigest.parse(row["plan"])
            elif kind is Ended:
                row |= {"finish": FinishReason(row["finish"]), "output": tuple(row["output"])}
            entries.append(kind(**row))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}, line {number}: not a journal entry: {error!r}") from error
    return config, entries


def _request(row: dict[str, Any]) -> Request:
    for name in ("prompt", "stop_token_ids", "output"):
        row[name] = tuple(row[name])
    return Request(**(row | {"params": SamplingParams(**row["params"])}))


def _dump(row: Mapping[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":")) + "\n"


def _lines(path: Path, what: str, head: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered objects, after a first line that says what the file is (with ``head`` that one, too)."""
    number = 0
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            if number == 1:
                if not isinstance(row, dict) or (row.get("hopon"), row.get("version")) != (what, _VERSION):
                    raise ValueError(f"{path}, line 1: not a file of {what}, version {_VERSION}: {line[:60].strip()!r}")
                if not head:
                    continue
            yield number, row
    if number == 0:
        raise ValueError(f"{path}: not a file of {what}: it is empty")
