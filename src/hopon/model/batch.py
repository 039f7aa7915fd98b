"""A plan as the flat arrays that the kernels read, and what is kept per row between plans: block tables and tokens.

Everything is allocated once; a step writes only what it computes, never in proportion to the context. Single numbers
are written through memory views: behind a step, which has driven everything else out of the caches, numpy's own
indexing is slow. This module knows rows, tokens and block ids, not models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hopon import native
from hopon.core.plan import Chunk, OpenRow


class Rows:
    """Token history and block table of every row.

    ``tokens`` int32 [max_num_seqs, max_model_len + 1] (the last sampled token of a full row still has its place),
    ``tables`` int32 [max_num_seqs + 1, blocks of a full row]: the last table belongs to padding.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.tokens = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.tables = np.zeros((max_num_seqs + 1, -(-max_model_len // block_size)), np.int32)
        self.padding_row = max_num_seqs
        self._flat = view(self.tokens)
        self._stride = self.tokens.shape[1]
        self._block_size = block_size
        self._lengths = [0] * max_num_seqs
        self._num_blocks = [0] * max_num_seqs
        self._is_open = [False] * max_num_seqs

    def open(self, opened: OpenRow) -> None:
        """A sequence takes a row, with its history."""
        row = opened.row
        assert not self._is_open[row], f"row {row} is opened while it is open"
        history = opened.prompt + opened.output
        assert len(history) < self.tokens.shape[1], f"row {row} is opened with {len(history)} tokens: too many"
        self.tokens[row, : len(history)] = history
        self._lengths[row], self._num_blocks[row], self._is_open[row] = len(history), 0, True

    def close(self, row: int) -> None:
        """The row's sequence is gone."""
        assert self._is_open[row], f"row {row} is closed while it is not open"
        self._is_open[row] = False

    def length(self, row: int) -> int:
        """Known tokens of a row."""
        return self._lengths[row]

    def token(self, row: int, position: int) -> int:
        """A token of a row's history."""
        return self._flat[row * self._stride + position]

    def tail(self, row: int, count: int) -> list[int]:
        """The last ``count`` known tokens of a row."""
        length = self._lengths[row]
        tokens: list[int] = self.tokens[row, length - count : length].tolist()
        return tokens

    def append(self, row: int, token: int) -> None:
        """A sampled token joins the history."""
        length = self._lengths[row]
        assert length < self._stride, f"row {row} grows beyond {length} tokens"
        self._flat[row * self._stride + length] = token
        self._lengths[row] = length + 1

    def append_blocks(self, chunk: Chunk) -> None:
        """New blocks join a row's table."""
        row, count = chunk.row, self._num_blocks[chunk.row]
        total, stop = count + len(chunk.new_blocks), chunk.start + chunk.count
        assert self._is_open[row], f"row {row} computes while it is not open"
        assert stop <= total * self._block_size, f"row {row} has {total} blocks: too few for position {stop - 1}"
        assert total <= self.tables.shape[1], f"row {row} gets {total} blocks: more than a full row has"
        if total > count:
            self.tables[row, count:total] = chunk.new_blocks
            self._num_blocks[row] = total


def view(array: NDArray[Any]) -> memoryview:
    """The items of a C-contiguous array, one behind the other."""
    return array.reshape(-1).data


class FlatBatch:
    """The arrays of one step, reused by the next. ``struct`` is what the kernels read."""

    def __init__(self, rows: Rows, *, max_num_segments: int, max_num_tokens: int) -> None:
        self._rows = rows
        self._max_num_tokens = max_num_tokens
        self._tokens = np.zeros(max_num_tokens, np.int32)
        self._starts = np.zeros(max_num_segments + 1, np.int32)
        self._positions = np.zeros(max_num_segments, np.int32)
        self._tables = np.zeros(max_num_segments, np.int32)
        self._logits = np.zeros(max_num_tokens, np.int32)
        arrays = self._starts, self._positions, self._tables, self._logits, self._tokens
        self._views = tuple(map(view, arrays))
        self._logits_address = self._logits.ctypes.data
        self.num_logits = 0
        self.struct = native.Batch(
            tokens=native.pointer(self._tokens),
            segment_start=native.pointer(self._starts),
            segment_pos=native.pointer(self._positions),
            segment_table=native.pointer(self._tables),
            block_tables=native.pointer(rows.tables),
            table_stride=rows.tables.shape[1],
            logit_index=native.pointer(self._logits),
        )

    def fill(self, chunks: Sequence[Chunk], padding: int = 0) -> None:
        """Lay out the chunks one behind the other, then a segment of ``padding`` dummy tokens."""
        rows, at, count, num_logits = self._rows, 0, len(chunks), 0
        starts, positions, tables, logits, tokens = self._views
        for segment, chunk in enumerate(chunks):
            row, start = chunk.row, chunk.start
            end, stop = at + chunk.count, start + chunk.count
            assert end <= self._max_num_tokens, f"a step of {end} tokens; {self._max_num_tokens} are the most"
            assert stop <= rows.length(row), f"row {row} has no token at position {stop - 1} to compute"
            if chunk.count == 1:
                tokens[at] = rows.token(row, start)
            else:
                self._tokens[at:end] = rows.tokens[row, start:stop]
            positions[segment], tables[segment] = start, row
            for index in range(end - chunk.num_logits, end):
                logits[num_logits] = index
                num_logits += 1
            starts[segment + 1] = at = end
        if padding:
            end = at + padding
            assert end <= self._max_num_tokens, f"a padded step of {end} tokens; {self._max_num_tokens} are the most"
            self._tokens[at:end] = 0
            positions[count], tables[count] = 0, rows.padding_row
            count += 1
            starts[count] = at = end
        self.num_logits = num_logits
        self.struct.num_tokens, self.struct.num_segments = at, count

    def want_logits(self, start: int, stop: int) -> None:
        """Ask for logits of the step's wanted positions ``start:stop``, in their order."""
        self.struct.num_logits = stop - start
        self.struct.logit_index = self._logits_address + start * self._logits.itemsize
