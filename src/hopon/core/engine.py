"""The only loop in production: inbox -> plan -> submit -> commit -> emit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hopon.core.types import Delta, Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget a request, in whatever phase it is; it ends with ``FinishReason.ABORT``. Unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Leave the loop after the current step; unfinished requests end with ``FinishReason.ABORT``."""


Command = Request | Abort | Shutdown


class Inbox(Protocol):
    """Where commands come from."""

    def drain(self, timeout: float | None) -> Sequence[Command]:
        """Everything that has arrived. When nothing has, wait up to ``timeout`` seconds (None: as long as it takes)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Gauges and monotonic counters after a step; plain numbers, cheap to send."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_steps: int
    num_scheduled_tokens: int  # all steps together
    num_generated_tokens: int
    num_prompt_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    prefix_cache_queries: int  # tokens looked up
    prefix_cache_hits: int  # tokens found


Emit = Callable[[Sequence[Delta], EngineStats], None]
"""Called once per iteration that has news, with the news of all requests."""
