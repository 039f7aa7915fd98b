"""The outputs of one HTTP request as they come: deltas become news of texts the moment they arrive.

It knows tokens, texts and who waits; nothing of HTTP or JSON. While somebody waits for news, an engine message can be
answered on the spot, without waking him: a task per stream that wakes for every step costs as much as all the rest of a
token. News that nobody takes piles up as text, one piece per output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hopon.core.types import Delta
from hopon.serve.client import Consumer
from hopon.serve.output import News, Output

Gathered = dict[int, News]
"""News per output."""


class Feed(Consumer):
    """Iterate over it: each item is the news since the last one. It ends when all outputs have ended.

    Iterating raises ConsumerGoneError after :meth:`leave`, and what :meth:`fail` was given.

    Args:
        outputs: by slot.
        ended: called with (slot, now) when an output has ended, by a stop string too.
    """

    def __init__(self, outputs: Sequence[Output], ended: Callable[[int, float], None]) -> None:
        super().__init__()
        self._outputs = outputs
        self._ended = ended
        self._gathered: Gathered = {}
        self._ends: list[tuple[int, float]] = []
        self._num_open = len(outputs)
        self.take_now: Callable[[Gathered], bool] = lambda gathered: False
        """Offered news in which no output ends, while somebody waits; False leaves it to him."""

    def put(self, slot: int, delta: Delta) -> None:
        """See base. What an output brings behind a stop string is dropped."""
        output = self._outputs[slot]
        if output.finish is not None:
            return
        news = self._gathered.get(slot)
        if news is None:
            news = self._gathered[slot] = News()
        now = time.monotonic()
        try:
            output.take(delta, now, news)
        except Exception as error:  # the trouble of one request, not of whoever delivers
            self.fail(error)
        if news.finish is not None:
            self._num_open -= 1
            self._ends.append((slot, now))

    def flush(self) -> None:
        """See base."""
        if self._ends:
            ends, self._ends = self._ends, []
            for slot, now in ends:
                self._ended(slot, now)
        elif self._gathered and self.is_awaited and self._is_taken():
            self._gathered = {}
        if self._gathered:
            self._wake()

    def _is_taken(self) -> bool:
        try:
            return self.take_now(self._gathered)
        except Exception as error:
            self.fail(error)
            return False

    def __aiter__(self) -> Feed:
        return self

    async def __anext__(self) -> Gathered:
        if not self._gathered:
            if not self._num_open:
                raise StopAsyncIteration
            await self._wait()
        self._raise_end()
        gathered, self._gathered = self._gathered, {}
        return gathered
