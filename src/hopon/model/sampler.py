"""Sampling parameters as the rows that the kernel reads, and what it found as row results.

Which positions want what follows from the plan alone; a random number depends on (seed, choice, output index) alone.
What penalties and bad words look at is rebuilt from prompt and output whenever a row is opened, so a resumed or
replayed sequence samples what it would have sampled; guides are followed anew in the same way. This module knows
tokens and log-probabilities, not models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hopon import native
from hopon.core.plan import Chunk, OpenRow, RowResult
from hopon.core.types import Logprob
from hopon.model.batch import Rows
from hopon.model.guide import Guides

_ROW = np.dtype(native.SampleRow)
_TINY, _HUGE = 1e-30, 1e30  # what is beyond is the same, but no float32


class Counts:
    """The distinct tokens of a sequence, and how often its output has each of them.

    ``tokens`` and ``counts`` int32 [capacity], of which the first ``num_tokens`` mean something; both grow, so their
    addresses change.
    """

    def __init__(self, prompt: Iterable[int], output: Iterable[int]) -> None:
        self.tokens = np.array([*dict.fromkeys(prompt)], np.int32)
        self.counts = np.zeros(len(self.tokens), np.int32)
        self.num_tokens = len(self.tokens)
        self._places = {token: place for place, token in enumerate(self.tokens.tolist())}
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """One more token of output."""
        place = self._places.setdefault(token, self.num_tokens)
        if place == self.num_tokens:
            if place == len(self.tokens):
                room = np.zeros(place + 64, np.int32)
                self.tokens, self.counts = np.concatenate((self.tokens, room)), np.concatenate((self.counts, room))
            self.tokens[place] = token
            self.num_tokens += 1
        self.counts[place] += 1


class _Row:
    """What is known of an open row beside its template; keeps the arrays alive that the template points to."""

    def __init__(self, opened: OpenRow, vocab_size: int, guides: Guides) -> None:
        params = opened.params
        self.opened = opened
        # Files may declare end tokens that their model does not have.
        self.stops = np.array([token for token in opened.stop_token_ids if token < vocab_size], np.int32)
        self.banned = self.stops
        self.biased = np.array([token for token, _ in params.logit_bias], np.int32)
        self.biases = np.array([bias for _, bias in params.logit_bias], np.float32)
        self.mask: NDArray[np.uint32] | None = None
        self.guided = guides.follow(params.guide, opened.output, opened.stop_token_ids) if params.guide else None
        self.counts: Counts | None = None
        if params.repetition_penalty != 1:
            self.counts = Counts(opened.prompt, opened.output)
        elif params.presence_penalty or params.frequency_penalty:
            self.counts = Counts((), opened.output)

    def ban(self, output: Sequence[int]) -> NDArray[np.int32]:
        """Tokens that would end the output too early, or complete one of the bad words."""
        params, end = self.opened.params, len(output)
        stops = self.stops.tolist() if end < params.min_tokens else []
        words = [
            word[-1]
            for word in params.bad_words
            if len(word) <= end + 1 and tuple(output[end - len(word) + 1 :]) == word[:-1]
        ]
        self.banned = np.array(stops + words, np.int32)
        return self.banned


class Sampler:
    """Keeps a template of sampling parameters per row and turns chunks into sample rows and back."""

    def __init__(self, rows: Rows, *, max_num_seqs: int, vocab_size: int, guides: Guides) -> None:
        self._rows = rows
        self._guides = guides
        self._vocab_size = vocab_size
        self._templates = np.zeros(max_num_seqs, _ROW)
        self._open: list[_Row | None] = [None] * max_num_seqs

    def open(self, opened: OpenRow) -> None:
        """A sequence takes a row."""
        params = opened.params
        row = self._open[opened.row] = _Row(opened, self._vocab_size, self._guides)
        template = self._templates[opened.row]
        template["logits_row"], template["forced"] = 0, -1
        template["temperature"], template["min_p"] = min(params.temperature, _HUGE), params.min_p
        template["top_p"], template["top_k"] = max(params.top_p, _TINY), min(max(params.top_k, 0), self._vocab_size)
        template["seed"], template["choice"], template["index"] = opened.seed, opened.choice, 0
        template["num_top"] = params.logprobs or 0
        template["num_banned"], template["banned"] = len(row.stops), row.stops.ctypes.data
        template["num_biased"], template["biased"] = len(row.biased), row.biased.ctypes.data
        template["biases"] = row.biases.ctypes.data
        template["repetition"] = min(max(params.repetition_penalty, _TINY), _HUGE)
        template["frequency"], template["presence"] = params.frequency_penalty, params.presence_penalty
        template["num_seen"] = 0
        self._point_to_counts(opened.row)
        if row.guided is not None:
            self.mask(opened.row, row.guided.mask)
        elif params.allowed_token_ids:
            self.mask(opened.row, mask_of(params.allowed_token_ids, self._vocab_size))
        else:
            self.mask(opened.row, None)

    def mask(self, row: int, allowed: NDArray[np.uint32] | None) -> None:
        """From now on a row samples only tokens whose bit is set.

        Args:
            row: an open row.
            allowed: [ceil(vocab / 32)] bits, the lowest first, at least one of them set; None: all tokens. Kept until
                the next call, and may be written to between two steps.
        """
        self._at(row).mask = allowed
        self._templates[row]["mask"] = native.pointer(allowed, np.uint32) or 0

    def close(self, row: int) -> None:
        """The row's sequence is gone."""
        self._open[row] = None

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
            row = self._at(chunk.row)
            params = row.opened.params
            end = at + chunk.num_logits
            if chunk.sample:
                assert end > at, f"row {chunk.row} samples without logits"
                index = rows.length(chunk.row) - len(row.opened.prompt)
                sampled.append(end - 1)
                indexes.append(index)
                if params.bad_words:
                    banned = row.ban(rows.tail(chunk.row, index))
                    table[end - 1]["num_banned"], table[end - 1]["banned"] = len(banned), banned.ctypes.data
                elif index >= params.min_tokens:
                    free.append(end - 1)
                if params.logprobs is not None:
                    watched.append(end - 1)
            scored = chunk.num_logits - chunk.sample
            if scored:
                first = chunk.start + chunk.count - chunk.num_logits  # position of the first wanted logits
                assert first + scored < rows.length(chunk.row), f"row {chunk.row} scores an unknown token"
                part = table[at : at + scored]
                part["forced"] = rows.tokens[chunk.row, first + 1 : first + 1 + scored]
                part["num_top"] = params.prompt_logprobs or 0
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
            row = self._at(chunk.row)
            end = at + chunk.num_logits
            scores = tuple(found[at : end - chunk.sample])
            guided = row.guided if chunk.sample else None
            if guided is not None and guided.finish is not None:  # nothing may follow what it was opened with
                results.append(RowResult(chunk.row, (), (), scores, guided.finish, guided.message))
            elif chunk.sample:
                chosen = found[end - 1]
                self._rows.append(chunk.row, chosen.token)
                if row.counts is not None:
                    row.counts.add(chosen.token)
                    self._point_to_counts(chunk.row)
                own = () if row.opened.params.logprobs is None else (chosen,)
                result = RowResult(chunk.row, (chosen.token,), own, scores)
                if guided is not None:
                    guided.take(chosen.token)
                    result = replace(result, finish=guided.finish, message=guided.message)
                results.append(result)
            else:
                results.append(RowResult(chunk.row, (), (), scores))
            at = end
        return tuple(results)

    def _at(self, number: int) -> _Row:
        row = self._open[number]
        assert row is not None, f"row {number} computes while it is not open"
        return row

    def _point_to_counts(self, number: int) -> None:
        counts = self._at(number).counts
        if counts is not None:
            template = self._templates[number]
            template["num_seen"] = counts.num_tokens
            template["seen"], template["counts"] = counts.tokens.ctypes.data, counts.counts.ctypes.data


def mask_of(tokens: Iterable[int], vocab_size: int) -> NDArray[np.uint32]:
    """A mask with the bits of these tokens set; see :meth:`Sampler.mask`."""
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)
