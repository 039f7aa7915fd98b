"""The scheduler's own record of one request. It is written by the scheduler only and never leaves the core."""

from __future__ import annotations

from array import array

from hopon.core.blocks import Content, content_key, root_key
from hopon.core.types import Request


class Sequence:
    """A request on its way.

    ``tokens`` are the known ones (prompt, then output); ``num_pending`` more have been sampled by steps whose result is
    not known yet. ``num_computed`` counts tokens that have been planned through the model. Nothing here tells a prompt
    token from an output token except ``num_prompt``, the border, which survives preemption.
    """

    __slots__ = (
        "admitted",
        "blocks",
        "chain",
        "content",
        "finished",
        "followers",
        "host_blocks",
        "key",
        "max_cached",
        "max_output",
        "num_cached",
        "num_computed",
        "num_in_flight",
        "num_pending",
        "num_preemptions",
        "num_prompt",
        "num_published",
        "num_scored",
        "number",
        "peak_computed",
        "rank",
        "request",
        "resumes",
        "row",
        "salt",
        "stop_ids",
        "tokens",
    )

    def __init__(self, request: Request, number: int, max_output: int) -> None:
        self.request = request
        self.number = number  # order of arrival; its identity
        self.rank = number  # place in line: a new one when it has to queue again at the back
        self.resumes = False  # has run and goes ahead of those that have not
        self.key: tuple[float, ...] = ()  # in the queue where it stands
        self.max_output = max_output
        self.max_cached = len(request.prompt) + max_output  # most tokens it may take from the prefix cache
        self.stop_ids = frozenset(request.stop_token_ids)
        self.tokens = [*request.prompt, *request.output]
        self.num_prompt = len(request.prompt)
        self.num_pending = 0
        self.num_computed = 0
        self.peak_computed = 0  # most that was ever computed; below it, work is done again
        self.num_in_flight = 0  # submitted steps that still refer to its row and blocks
        self.num_scored = 0  # prompt tokens whose log-probability has been delivered
        self.num_published = 0  # leading blocks that were offered to the prefix cache
        self.num_preemptions = 0
        self.num_cached = 0
        self.admitted: float | None = None
        self.row: int | None = None
        self.blocks: list[int] = []
        self.host_blocks: list[int] = []  # copies of its first blocks while it has none
        self.finished = False
        self.followers: list[Sequence] = []  # requests that wait until its prompt has been planned, and then share it
        self.salt = root_key(request.cache_salt)
        self.chain: list[bytes] = []
        self.content: Content | bytes | None = self.salt  # of the last published block; None: publish no more

    @property
    def num_tokens(self) -> int:
        """Known and pending tokens."""
        return len(self.tokens) + self.num_pending

    @property
    def num_remaining(self) -> int:
        """Tokens that have not been planned through the model: 1 in steady decoding."""
        return len(self.tokens) + self.num_pending - self.num_computed

    @property
    def num_output(self) -> int:
        """Known output tokens."""
        return len(self.tokens) - self.num_prompt

    def keys(self, count: int, block_size: int, first: int = 0) -> list[bytes]:
        """Content keys of the first ``count`` full blocks, from ``first`` on; each is computed once."""
        chain = self.chain
        known = len(chain)
        if known < count:
            missing = array("q", self.tokens[known * block_size : count * block_size])
            for start in range(0, len(missing), block_size):
                chain.append(content_key(chain[-1] if chain else self.salt, missing[start : start + block_size]))
        return chain[first:count]
