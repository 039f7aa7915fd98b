"""Fair shares between users: a virtual token counter decides whose request starts next.

Source: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2. Every user has a counter of
what was done for it, and of the users that wait the one with the smallest counter is served next. A user that comes
back is lifted to the smallest counter of those that wait, so that nobody saves up a claim by being away. Two users that
both wait all the time never get further apart than one of the longest prompts or one pool full of output, so nobody
starves however much the others send.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from hopon.core.policy.composition import Action, Composition, Sort
from hopon.core.policy.order import Key, Order
from hopon.core.policy.preset import Observer
from hopon.core.sequence import Sequence
from hopon.core.step import Step

PROMPT_TOKEN = 1.0
OUTPUT_TOKEN = 2.0
"""What a token costs; the weights are the paper's."""

MAX_USERS = 10_000
"""Users whose counters are remembered while they are away."""


class Resorted:
    """An order whose waiting are sorted anew for every plan, so that another sort does not outlive its step."""

    dynamic = True

    def __init__(self, inner: Order) -> None:
        self._inner = inner

    def key(self, sequence: Sequence, now: float) -> Key:
        """The inner order's."""
        return self._inner.key(sequence, now)


class FairShare(Observer):
    """Wraps a composition: before it decides, the waiting are sorted by what was done for their users.

    Who has run before goes ahead of who has not, and within a user the policy's own order holds. Of those that would
    start in the same step, each counts what those ahead of it will have cost. Where a policy uses it, its order must
    be :class:`Resorted`, and this must be among its observers too.

    Args:
        inner: decides everything else.
    """

    def __init__(self, inner: Composition) -> None:
        self._inner = inner
        self.served: dict[str, float] = {}
        """Cost of what was done for each user."""
        self._waiting: set[str] = set()
        self._last_gone = 0.0  # counter of the user that left the queue last

    def compose(self, step: Step) -> Iterator[Action]:
        """Sort, then what the inner composition does."""
        self._lift({sequence.request.user for sequence in step.waiting})
        if len(self._waiting) > 1:
            keys = self._keys(step)
            yield Sort(lambda sequence: keys[sequence.number])
        yield from self._inner.compose(step)

    def stepped(self, step: Step) -> None:
        """Prompts cost when they start, without what was cached; outputs when they are sampled."""
        for sequence in step.admitted:
            if not sequence.num_preemptions:
                self._charge(sequence, PROMPT_TOKEN * (sequence.num_prompt - sequence.num_cached))
        for sequence, chunk in step.chunks.values():
            if chunk.sample:
                self._charge(sequence, OUTPUT_TOKEN)

    def _charge(self, sequence: Sequence, cost: float) -> None:
        user = sequence.request.user
        self.served[user] = self.served.get(user, 0.0) + cost

    def _lift(self, waiting: set[str]) -> None:
        """Newcomers to the queue lose what they would have saved up."""
        served = self.served
        gone = self._waiting - waiting
        if gone:
            self._last_gone = max(served[user] for user in gone)
        staying = [served[user] for user in waiting & self._waiting]
        floor = min(staying) if staying else self._last_gone
        for user in waiting - self._waiting:
            served[user] = max(served.get(user, 0.0), floor)
        self._waiting = waiting
        if len(served) > MAX_USERS + len(waiting):
            self._forget()

    def _forget(self) -> None:
        """Of those that are away, drop the smallest counters: they would be lifted anyway."""
        away = sorted((count, user) for user, count in self.served.items() if user not in self._waiting)
        for _, user in away[: len(away) // 2]:
            del self.served[user]

    def _keys(self, step: Step) -> dict[int, Key]:
        ahead: defaultdict[str, float] = defaultdict(float)
        keys: dict[int, Key] = {}
        for sequence in step.waiting:
            user = sequence.request.user
            keys[sequence.number] = (not sequence.resumes, self.served[user] + ahead[user], sequence.rank)
            ahead[user] += PROMPT_TOKEN * sequence.num_prompt
        return keys
