"""The KV pool as numbers: which blocks are free, who refers to them, and what content they hold.

The pool knows neither sequences nor memory. A block is free when nobody refers to it; a free block may still hold
content that a later request can take over (the prefix cache), until the block is given away. The free list is the
eviction order: blocks without content first, then the least recently released.

Content is a chain: a full block's identity is its tokens, its parent's identity and, at the root, a salt. The lookup
key is a SHA-256 over the parent's key and the tokens; on a hit tokens and parent are compared, so that a collision is
a miss and never somebody else's text.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def content_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Lookup key of a full block behind a parent key."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


def root_key(salt: str) -> bytes:
    """Parent key of a sequence's first block."""
    return hashlib.sha256(salt.encode()).digest()


class Content:
    """What a full block holds; compared by identity along the chain."""

    __slots__ = ("key", "parent", "tokens")

    def __init__(self, key: bytes, parent: Content | bytes, tokens: tuple[int, ...]) -> None:
        self.key = key
        self.parent = parent  # the root's parent is its salt's key
        self.tokens = tokens

    def is_behind(self, parent: Content | bytes) -> bool:
        """Whether this is a child of exactly that parent."""
        return self.parent is parent if isinstance(parent, Content) else self.parent == parent


class BlockPool:
    """Allocation, references and the prefix cache of ``num_blocks`` blocks of ``block_size`` tokens.

    Invariant: a block is either in the free list or has at least one reference, never both.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evictions = 0
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._references = [0] * num_blocks
        self._content: list[Content | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be given away, cached content included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody refers to."""
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, evicting cached content in eviction order. The caller has checked ``num_free``."""
        assert count <= len(self._free), (
            f"allocate({count}) with {len(self._free)} free blocks: admission must check first"
        )
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks found by :meth:`match`."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each, the tail first, so that a prefix outlives what hangs on it."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is released more often than it was taken"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._content[block] is None:
                    self._free.move_to_end(block, last=False)

    def is_free(self, block: int) -> bool:
        """Nobody refers to it."""
        return not self._references[block]

    def match(self, keys: Sequence[bytes], tokens: Sequence[int], salt: bytes) -> list[int]:
        """Longest run of cached blocks that hold ``tokens`` from their beginning. Changes nothing.

        Args:
            keys: content keys of the leading full blocks, as far as they may be used.
            tokens: the sequence's tokens.
            salt: root key.
        """
        found: list[int] = []
        parent: Content | bytes = salt
        size = self.block_size
        for i, key in enumerate(keys):
            block = self._by_key.get(key)
            if block is None:
                break
            content = self._content[block]
            assert content is not None, f"block {block} is in the lookup table without content"
            if not content.is_behind(parent) or content.tokens != tuple(tokens[i * size : (i + 1) * size]):
                break
            found.append(block)
            parent = content
        return found

    def publish(self, block: int, parent: Content | bytes, key: bytes, tokens: tuple[int, ...]) -> Content | None:
        """Offer a full, computed block to later requests.

        ``parent`` is what publishing the block before it returned, or the root key. Returns the content that stands for
        this prefix from now on: an older block's where the same is cached already, None where another content has the
        key (a collision: the sequence's further blocks stay private).
        """
        other = self._by_key.get(key)
        if other is not None:
            content = self._content[other]
            assert content is not None, f"block {other} is in the lookup table without content"
            return content if content.is_behind(parent) and content.tokens == tokens else None
        content = self._content[block] = Content(key, parent, tokens)
        self._by_key[key] = block
        return content

    def check(self) -> None:
        """Assert that blocks are conserved; for tests."""
        for block in range(self.num_blocks):
            references = self._references[block]
            assert references >= 0, f"block {block} has {references} references"
            assert (references == 0) == (block in self._free), f"block {block} is free and used at once, or neither"
            content = self._content[block]
            assert content is None or self._by_key.get(content.key) == block, (
                f"block {block} is cached but cannot be found"
            )
        assert len(self._by_key) == sum(c is not None for c in self._content), "a lookup key without its block"

    def _forget(self, block: int) -> None:
        content = self._content[block]
        if content is not None:
            del self._by_key[content.key]
            self._content[block] = None
            self.num_evictions += 1


class HostPool:
    """Blocks of the host tier: numbers only, each with one owner."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks nobody owns."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks. The caller has checked ``num_free``."""
        assert count <= len(self._free), f"allocate({count}) with {len(self._free)} free host blocks"
        return [self._free.pop() for _ in range(count)]

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back."""
        self._free.extend(blocks)
        assert len(self._free) <= self.num_blocks, "a host block is released twice"
