"""Sizing of the KV cache and what it reads from the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hopon.core.config import EngineOptions
from hopon.model.config import ModelConfig
from hopon.model.kv import KvSize, anonymous, block_bytes, size_kv
from hopon.model.machine import available_memory, num_threads
from hopon.model.rope import Rope

SMOLLM2 = ModelConfig(
    family="llama",
    num_layers=30,
    hidden_size=576,
    ffn_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    norm_eps=1e-5,
    rope=Rope(theta=1e5, dim=64),
    context_length=8192,
    tied=True,
)
GIB = 2**30


def size(available: int = 8 * GIB, fixed: int = 0, **options: Any) -> KvSize:
    return size_kv(SMOLLM2, EngineOptions(model="m", **options), item_size=4, available=available, fixed=fixed)


def test_v097_bytes_per_token() -> None:
    """SmolLM2 takes 46,080 bytes per token in float32, and the pool's tokens are its bytes by that number."""
    assert block_bytes(SMOLLM2, 16, 4) == 16 * 46080
    pool = size(available=2 * GIB, fixed=GIB)
    assert pool.num_tokens == pool.num_bytes // 46080
    assert pool.num_full_requests == pool.num_tokens / pool.max_model_len


def test_v097_half_of_what_weights_leave() -> None:
    """By itself the pool takes half of the memory that is left, not a fixed size."""
    assert size(available=2 * GIB, fixed=GIB).num_blocks == GIB // 2 // (16 * 46080)
    assert size(available=64 * GIB, fixed=4 * GIB, max_num_seqs=256).num_blocks == 30 * GIB // (16 * 46080)


def test_no_more_than_can_be_used() -> None:
    """max_num_seqs requests of the greatest length are the most that a pool is good for."""
    assert size(available=1000 * GIB, max_num_seqs=2, max_model_len=100).num_blocks == 2 * 7


def test_length_is_lowered_with_a_notice() -> None:
    """A length that nobody asked for is lowered to what the pool holds, in words with both numbers."""
    pool = size(kv_cache_memory=64 * 2**20)
    assert pool.max_model_len == pool.num_tokens == 64 * 2**20 // (16 * 46080) * 16
    assert "8192" in pool.notice
    assert str(pool.num_tokens) in pool.notice
    assert size(max_num_seqs=1).notice == ""


def test_v100_length_that_does_not_fit() -> None:
    """A length that was asked for and does not fit is an error with the largest one that does; that one works."""
    with pytest.raises(ValueError, match=r"max_model_len 8192 does not fit.*at most 1456") as error:
        size(kv_cache_memory=64 * 2**20, max_model_len=8192)
    assert f"at least {360 * 2**20} bytes" in str(error.value)
    assert size(kv_cache_memory=64 * 2**20, max_model_len=1456).max_model_len == 1456
    assert size(kv_cache_memory=360 * 2**20, max_model_len=8192).max_model_len == 8192


def test_v098_limit_is_obeyed_or_refused() -> None:
    """A KV limit is an upper bound; one that the machine does not have is refused with the numbers."""
    assert size(kv_cache_memory=64 * 2**20).num_bytes <= 64 * 2**20
    with pytest.raises(ValueError, match=r"not enough memory.*num_kv_blocks 100000.*1,024\.0 MiB are available"):
        size(available=GIB, num_kv_blocks=100000)
    with pytest.raises(ValueError, match=r"not enough memory: weights and buffers take 1,024\.0 MiB"):
        size(available=GIB, fixed=GIB)
    with pytest.raises(ValueError, match="does not hold one KV block of 16 tokens, which takes 737280 bytes"):
        size(kv_cache_memory=1000)


def test_length_beyond_the_model() -> None:
    """The model's own context is the limit."""
    with pytest.raises(ValueError, match=r"max_model_len must be in \[1, 8192\], the model's context, got 9000"):
        size(max_model_len=9000)


def test_explicit_blocks_are_taken_as_they_are() -> None:
    """num_kv_blocks sets the number of blocks exactly."""
    pool = size(num_kv_blocks=10, block_size=1)
    assert (pool.num_blocks, pool.num_tokens, pool.max_model_len) == (10, 10, 10)


def fake_machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": "MemTotal: 9999 kB\nMemAvailable: 4000 kB\n"} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMORY: list[tuple[str, dict[str, str], int]] = [
    ("bare", {}, 4000 * 1024),
    (
        "v2",
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/memory.max": "3000000\n",
            "sys/fs/cgroup/a/memory.current": "1500000\n",
            "sys/fs/cgroup/a/memory.stat": "anon 5\ninactive_file 500000\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/b/memory.current": "5\n",
        },
        2000000,
    ),
    (
        "v1",
        {
            "proc/self/cgroup": "4:cpu,memory:/x\n1:name=systemd:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "0\n",
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "1000000\n",
            "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "400000\n",
        },
        600000,
    ),
    (
        "namespaced",
        {
            "proc/self/cgroup": "0::/not/mounted\n",
            "sys/fs/cgroup/memory.max": "700000\n",
            "sys/fs/cgroup/memory.current": "0\n",
        },
        700000,
    ),
]


@pytest.mark.parametrize(("files", "expected"), [case[1:] for case in MEMORY], ids=[case[0] for case in MEMORY])
def test_available_memory(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    """V097: the tightest of the machine and all enclosing control groups counts, of either version."""
    assert available_memory(fake_machine(tmp_path, files)) == expected


def test_threads_obey_the_quota(tmp_path: Path) -> None:
    """A CPU quota below the number of cores limits the threads, to at least one."""
    assert num_threads(fake_machine(tmp_path, {})) >= 1
    quota = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}
    assert num_threads(fake_machine(tmp_path, quota)) == 1


def test_siblings_are_one_core(tmp_path: Path) -> None:
    """Hardware threads of one core count once."""
    files = {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": "0-4095" for cpu in range(512)}
    assert num_threads(fake_machine(tmp_path, files)) == 1


def test_anonymous_memory_is_lazy() -> None:
    """Memory of a pool counts only once it is written."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    area = anonymous(256 * 2**20)
    assert resident() - before < 16 * 2**20
    area[: 64 * 2**20] = 1
    assert 60 * 2**20 < resident() - before < 80 * 2**20
    assert area.ctypes.data % 4096 == 0
