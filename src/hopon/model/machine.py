"""What this machine, or the container we run in, gives us: memory and cores.

Reads Linux's files under ``root``: /proc, /sys/fs/cgroup (versions 1 and 2), /sys/devices/system/cpu. A file that is
not there sets no limit; the process's own affinity always counts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: the smaller of what the machine and every control group has left.

    Page cache that can be dropped counts as free, in both.

    Raises:
        OSError: /proc/meminfo cannot be read.
        ValueError: it has no MemAvailable line.
    """
    left = [_meminfo(root / "proc/meminfo")]
    for folder in _groups(root, "memory"):
        limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            left.append(max(0, limit - used + _inactive_file(folder / "memory.stat")))
    return min(left)


def num_threads(root: Path = Path("/")) -> int:
    """Threads that can compute at full speed: physical cores within the affinity mask, at most the CPU quota."""
    allowed = os.sched_getaffinity(0)
    cpus = root / "sys/devices/system/cpu"
    cores = {_text(cpus / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in sorted(allowed)}
    limits = [len(cores)]
    for folder in _groups(root, "cpu"):
        quota, period = (_text(folder / "cpu.max") or "max 1").split()
        old = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota != "max":
            limits.append(int(quota) // int(period))
        elif old[0] is not None and old[1] and old[0] > 0:
            limits.append(old[0] // old[1])
    return max(1, min(limits))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the control groups that this process is in, from its own up to the root."""
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controllers and controller)
        folder = base / path.lstrip("/")
        yield folder
        yield from (parent for parent in folder.parents if parent == base or base in parent.parents)


def _meminfo(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{path}: no MemAvailable line")


def _inactive_file(path: Path) -> int:
    fields = dict(line.split() for line in (_text(path) or "").splitlines())
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def _number(*paths: Path) -> int | None:
    """The number in the first of these files that is there; None for "max" and where there is none."""
    for path in paths:
        text = _text(path)
        if text is not None:
            return None if text == "max" else int(text)
    return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
