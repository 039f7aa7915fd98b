"""The block pool: conservation, eviction order, and a prefix cache that never hands out foreign content."""

from __future__ import annotations

import random

import pytest

from hopon.core import blocks as blocks_module
from hopon.core.blocks import BlockPool, Content, content_key, root_key

SALT = root_key("")


def keys_of(tokens: list[int], size: int, salt: bytes = SALT) -> list[bytes]:
    keys: list[bytes] = []
    for i in range(len(tokens) // size):
        keys.append(content_key(keys[-1] if keys else salt, tokens[i * size : (i + 1) * size]))
    return keys


def store(pool: BlockPool, tokens: list[int], salt: bytes = SALT) -> list[int]:
    """Allocate, fill and publish the full blocks of a token list."""
    size = pool.block_size
    blocks = pool.allocate(-(-len(tokens) // size))
    parent: Content | bytes | None = salt
    for i, key in enumerate(keys_of(tokens, size, salt)):
        if parent is not None:
            parent = pool.publish(blocks[i], parent, key, tuple(tokens[i * size : (i + 1) * size]))
    return blocks


def find(pool: BlockPool, tokens: list[int], salt: bytes = SALT) -> list[int]:
    return pool.match(keys_of(tokens, pool.block_size, salt), tokens, salt)


def test_v028_a_collision_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a constant hash nobody ever gets blocks of different content, in the first block or behind it."""
    monkeypatch.setattr(blocks_module, "content_key", lambda parent, tokens: b"same")
    monkeypatch.setitem(globals(), "content_key", lambda parent, tokens: b"same")
    pool = BlockPool(8, 2)
    store(pool, [1, 2, 3, 4])
    assert find(pool, [1, 2]) != []
    assert find(pool, [9, 9]) == []
    assert find(pool, [3, 4]) == [], "tokens of a second block are no first block"
    assert find(pool, [1, 2, 1, 2]) == find(pool, [1, 2]), "the same tokens behind another parent are other content"
    pool.check()


def test_v028_the_known_collision_of_polynomial_hashes_misses() -> None:
    """Adding 31 to one token and taking 1 from the next gives another key."""
    pool = BlockPool(4, 4)
    store(pool, [10, 20, 30, 40])
    assert find(pool, [10, 20 + 31, 30 - 1, 40]) == []


def test_v029_an_evicted_block_is_not_found() -> None:
    """Once its block is given away, a prefix is a miss, and the new owner's content is what the block holds."""
    pool = BlockPool(2, 2)
    pool.release(store(pool, [1, 2, 3, 4]))
    assert len(find(pool, [1, 2, 3, 4])) == 2
    pool.release(store(pool, [5, 6, 7, 8]))
    assert find(pool, [1, 2, 3, 4]) == []
    assert len(find(pool, [5, 6, 7, 8])) == 2
    assert pool.num_evictions == 2


def test_v031_releasing_twice_is_caught() -> None:
    """A block that nobody refers to cannot be released again, so it is never in the free list twice."""
    pool = BlockPool(4, 16)
    taken = pool.allocate(1)
    pool.release(taken)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(taken)


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    """Among released blocks the last of a sequence goes first, so that what remains can still be found."""
    pool = BlockPool(3, 1)
    pool.release(store(pool, [1, 2, 3]))
    pool.allocate(1)
    assert len(find(pool, [1, 2, 3])) == 2


def test_blocks_without_content_are_given_away_before_cached_ones() -> None:
    """Eviction destroys as little as it can."""
    pool = BlockPool(4, 2)
    cached = store(pool, [1, 2])
    plain = pool.allocate(3)
    pool.release(cached)
    pool.release(plain)
    assert set(pool.allocate(3)) == set(plain)
    assert find(pool, [1, 2]) == cached


def test_salts_do_not_share() -> None:
    """Equal tokens under another salt are a miss."""
    pool = BlockPool(4, 2)
    store(pool, [1, 2], root_key("a"))
    assert find(pool, [1, 2], root_key("b")) == []
    assert len(find(pool, [1, 2], root_key("a"))) == 1


def test_equal_content_is_kept_once_and_the_chain_goes_on() -> None:
    """A second copy of a prefix stays private, but what follows it can be cached behind the first copy."""
    pool = BlockPool(8, 1)
    first = store(pool, [1, 2])
    second = store(pool, [1, 2, 3])
    assert find(pool, [1, 2, 3]) == [*first, second[2]]
    pool.check()


def test_conservation_under_random_operations() -> None:
    """After every one of many random operations each block is either free or referred to, and lookups are exact."""
    rng = random.Random(5)
    pool = BlockPool(12, 2)
    held: list[list[int]] = []
    for _ in range(4000):
        tokens = [rng.randrange(3) for _ in range(2 * rng.randint(1, 4))]
        if held and (rng.random() < 0.5 or pool.num_free < 4):
            pool.release(held.pop(rng.randrange(len(held))))
        else:
            found = find(pool, tokens)
            need = len(tokens) // 2 - len(found)
            if need <= pool.num_free - sum(map(pool.is_free, found)):
                pool.acquire(found)
                own = pool.allocate(need)
                parent: Content | bytes | None = SALT
                for i, (block, key) in enumerate(zip(found + own, keys_of(tokens, 2), strict=True)):
                    if parent is not None:
                        parent = pool.publish(block, parent, key, tuple(tokens[2 * i : 2 * i + 2]))
                held.append(found + own)
        pool.check()
    for blocks in held:
        pool.release(blocks)
    assert pool.num_free == pool.num_blocks
