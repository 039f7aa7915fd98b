"""What the machine can do at most, by a small program that computes in registers and reads memory, on all threads.

``python -m benchmarks.peaks [--threads 2]`` prints operations per second (a multiply and an add are two), bytes per
second, and how far apart two cores are: the time of a word from one to the other and back. Kernels are compared with
these figures from the same run, since clocks and neighbours change from day to day, and a virtual machine's cores move.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hopon.model.machine import num_threads
from hopon.native.build import find_compiler

SOURCE = Path(__file__).with_name("peaks.cpp")


def peaks(threads: int = 0) -> Mapping[str, float]:
    """By name: f32, bf16 and int8 in operations per second where the machine has such instructions; read in bytes per
    second; apart in seconds, where there are two cores.

    Raises:
        subprocess.CalledProcessError: the program cannot be compiled or run.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "peaks"
        flags = ["-O2", "-std=c++17", "-march=native", "-pthread", "-o", str(program), str(SOURCE)]
        subprocess.run([*find_compiler(), *flags], check=True)
        run = subprocess.run([program, str(threads or num_threads())], check=True, capture_output=True, text=True)
    return {name: float(value) for name, value in map(str.split, run.stdout.splitlines())}


def words(found: Mapping[str, float]) -> str:
    """One line for people."""
    parts = [f"{name} {found[name] / 1e9:,.0f} Gop/s" for name in ("f32", "bf16", "int8") if name in found]
    parts.append(f"reading memory {found['read'] / 1e9:.0f} GB/s")
    if "apart" in found:
        parts.append(f"two cores {found['apart'] * 1e9:.0f} ns apart")
    return ", ".join(parts)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="0: the cores that the process may use")
    print(words(peaks(parser.parse_args().threads)))


if __name__ == "__main__":
    main()
