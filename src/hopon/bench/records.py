"""What became of the requests of a run: times as the client saw them, counts as the server told them.

Times are seconds from the run's beginning. A *piece* is what one event of a stream brought: the news of one token or of
several. Tokens are the server's own count (``usage``, else token ids, else one per piece); text is never tokenized.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

CUT = "cut by the end of the run"
"""The error of a request that was still open when the run ended; it is neither good nor bad."""


@dataclass(kw_only=True, slots=True)
class Record:
    """One request; written by the client while it is open, and by nobody afterwards.

    Args:
        number: place in the schedule.
        session: which conversation it belongs to.
        turn: which turn of it, from 0.
        kind: its class in a mix.
        asked: ``max_tokens``; None where it left the length to the server.
        exact: the server was told to generate exactly so many (``ignore_eos``).
        arrival: intended send time.
        sent: when its bytes were handed to the network; None: never.
        piece_times: when each piece with content came.
        input_tokens: of the prompt, by the server's count; 0 where it does not tell.
        output_tokens: told so far.
        cached_tokens: prompt tokens that a prefix cache had; 0 where the server does not tell.
        counted_by: where ``output_tokens`` is from.
        ended: when the last byte came, or the failure.
        reason: the server's finish reason.
        error: what kind of failure, empty for none.
        message: the server's or the system's words on it.
    """

    number: int
    session: int = 0
    turn: int = 0
    kind: str = ""
    asked: int | None = None
    exact: bool = False
    arrival: float = 0.0
    sent: float | None = None
    piece_times: array[float] = field(default_factory=lambda: array("d"))
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    counted_by: Literal["usage", "token ids", "pieces"] = "pieces"
    ended: float | None = None
    reason: str | None = None
    error: str = ""
    message: str = ""

    @property
    def finish(self) -> str | None:
        """How it ended, or None."""
        return self.error or self.reason

    @property
    def completed(self) -> bool:
        """It was answered to its end."""
        return self.ended is not None and not self.error

    @property
    def first_token(self) -> float | None:
        """When the first piece came."""
        return self.piece_times[0] if self.piece_times else None

    @property
    def ttft(self) -> float | None:
        """From the intended send time to the first piece."""
        return self.piece_times[0] - self.arrival if self.piece_times else None

    @property
    def waiting(self) -> None:
        """A client does not know when it was given a seat."""

    @property
    def prefill(self) -> None:
        """Nor how long its prompt took."""

    @property
    def e2e(self) -> float | None:
        """From the intended send time to the last piece."""
        return self.piece_times[-1] - self.arrival if self.piece_times else None

    @property
    def tpot(self) -> float | None:
        """(E2E - TTFT) / (output tokens - 1); None below two tokens."""
        if not self.piece_times or self.output_tokens < 2:
            return None
        return (self.piece_times[-1] - self.piece_times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Between consecutive pieces that did not arrive together."""
        return [after - before for before, after in pairwise(self.piece_times) if after > before]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The server's own numbers at one moment; None is what it does not tell.

    Args:
        time: when they were asked for.
        waiting: requests in its queue.
        running: requests that hold a seat.
        kv_usage: share of the KV cache in use, 0 to 1.
        preemptions: so far, since the server started.
        computed_tokens: so far.
        recomputed_tokens: of these, computed before and lost to a preemption.
    """

    time: float
    waiting: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    preemptions: float | None = None
    computed_tokens: float | None = None
    recomputed_tokens: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """A run.

    Args:
        calls: requests that were sent or meant to be sent by now, in the order of the schedule.
        seconds: from the beginning to the last news.
        open_loop: they were sent at times of their own, without waiting for answers.
        interrupted: somebody ended the run early.
        lags: how late the client's event loop was, sampled all along, seconds.
        cpu_seconds: processor time of the client's process during the run.
        samples: the server's numbers, second by second; none where /metrics does not answer.
    """

    calls: Sequence[Record]
    seconds: float
    open_loop: bool
    interrupted: bool = False
    lags: Sequence[float] = ()
    cpu_seconds: float = 0.0
    samples: Sequence[Sample] = ()

    @property
    def uncut(self) -> list[Record]:
        """Those that the end of the run did not cut."""
        return [call for call in self.calls if call.error != CUT]
