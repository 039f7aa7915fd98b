"""Sampling parameters as the rows that the kernel reads, and what it found as row results.

Which positions want what follows from the plan alone; a random number depends on (seed, choice, output index) alone.
This module knows tokens and log-probabilities, not models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hopon import native
from hopon.core.plan import Chunk, OpenRow, RowResult
from hopon.core.types import Logprob
from hopon.model.batch import Rows

_ROW = np.dtype(native.SampleRow)


class Sampler:
    """Keeps a template of sampling parameters per row and turns chunks into sample rows and back."""

    def __init__(self, rows: Rows, *, max_num_seqs: int) -> None:
        self._rows = rows
        self._templates = np.zeros(max_num_seqs, _ROW)
        self._opened: list[OpenRow | None] = [None] * max_num_seqs
        self._banned: list[NDArray[np.int32] | None] = [None] * max_num_seqs  # keeps what templates point to alive
        self._masks: list[NDArray[np.uint32] | None] = [None] * max_num_seqs  # likewise

    def open(self, opened: OpenRow) -> None:
        """A sequence takes a row."""
        params, row = opened.params, opened.row
        banned = np.array(opened.stop_token_ids, np.int32)
        self._opened[row], self._banned[row] = opened, banned
        self._templates[row] = 0
        self.mask(row, None)
        for name, value in (
            ("forced", -1),
            ("temperature", params.temperature),
            ("top_p", params.top_p),
            ("min_p", params.min_p),
            ("top_k", max(params.top_k, 0)),
            ("seed", opened.seed),
            ("choice", opened.choice),
            ("num_banned", len(banned)),
            ("num_top", params.logprobs or 0),
            ("banned", banned.ctypes.data),
        ):
            self._templates[row][name] = value

    def mask(self, row: int, allowed: NDArray[np.uint32] | None) -> None:
        """From now on a row samples only tokens whose bit is set.

        Args:
            row: an open row.
            allowed: [ceil(vocab / 32)] bits, the lowest first, at least one of them set; None: all tokens. Kept until
                the next call, and may be written to between two steps.
        """
        self._masks[row] = allowed
        self._templates[row]["mask"] = native.pointer(allowed, np.uint32) or 0

    def close(self, row: int) -> None:
        """The row's sequence is gone."""
        self._opened[row] = self._banned[row] = self._masks[row] = None

    def prepare(self, chunks: Sequence[Chunk]) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        """Sample rows and log-probability flags of all positions that want logits, in the batch's order.

        ``logits_row`` counts from 0 over all of them; whoever computes slices subtracts.
        """
        rows = self._rows
        counts = [chunk.num_logits for chunk in chunks]
        table = self._templates[np.repeat([chunk.row for chunk in chunks], counts)]
        wanted = np.zeros(len(table), np.uint8)
        table["logits_row"] = np.arange(len(table))
        at = 0
        sampled, indexes, free, watched = [], [], [], []
        for chunk in chunks:
            opened = self._opened[chunk.row]
            assert opened is not None, f"row {chunk.row} computes while it is not open"
            end = at + chunk.num_logits
            if chunk.sample:
                assert end > at, f"row {chunk.row} samples without logits"
                index = rows.length(chunk.row) - len(opened.prompt)
                sampled.append(end - 1)
                indexes.append(index)
                if index >= opened.params.min_tokens:
                    free.append(end - 1)
                if opened.params.logprobs is not None:
                    watched.append(end - 1)
            scored = chunk.num_logits - chunk.sample
            if scored:
                first = chunk.start + chunk.count - chunk.num_logits  # position of the first wanted logits
                assert first + scored < rows.length(chunk.row), f"row {chunk.row} scores an unknown token"
                part = table[at : at + scored]
                part["forced"] = rows.tokens[chunk.row, first + 1 : first + 1 + scored]
                part["num_banned"] = 0
                part["num_top"] = opened.params.prompt_logprobs or 0
                wanted[at : at + scored] = 1
            at = end
        table["index"][sampled] = indexes
        table["num_banned"][free] = 0
        wanted[watched] = 1
        return table, wanted

    def read(self, table: NDArray[Any], found: native.SampleResult) -> list[Logprob]:
        """What the kernel found for sample rows: token, log-probability (0 where not wanted) and alternatives."""
        tops: list[tuple[tuple[int, float], ...]] = [()] * len(table)
        if found.top_ids.size:
            for i, count in enumerate(table["num_top"].tolist()):
                pairs = zip(found.top_ids[i, :count].tolist(), found.top_logprobs[i, :count].tolist(), strict=True)
                tops[i] = tuple(pairs)
        return list(map(Logprob, found.tokens.tolist(), found.logprobs.tolist(), tops))

    def results(self, chunks: Sequence[Chunk], found: Sequence[Logprob]) -> tuple[RowResult, ...]:
        """One result per chunk from what was found for its positions; sampled tokens join the history of their rows."""
        results, at = [], 0
        for chunk in chunks:
            opened = self._opened[chunk.row]
            assert opened is not None, f"row {chunk.row} computes while it is not open"
            end = at + chunk.num_logits
            scores = tuple(found[at : end - chunk.sample])
            if chunk.sample:
                chosen = found[end - 1]
                self._rows.append(chunk.row, chosen.token)
                own = () if opened.params.logprobs is None else (chosen,)
                results.append(RowResult(chunk.row, (chosen.token,), own, scores))
            else:
                results.append(RowResult(chunk.row, (), (), scores))
            at = end
        return tuple(results)
