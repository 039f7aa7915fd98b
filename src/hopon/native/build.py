"""Compiles the kernels: one shared library per instruction level, from the same C++ sources.

Used by the packaging hook (which loads this file by its path, so it imports the standard library only) and by hand:
``python -m hopon.native.build [--compiler g++] [--levels avx2 portable] [--force]``. It knows nothing of what the
kernels compute or of how the libraries are loaded.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
LIBRARIES = HERE / "lib"

COMMON_FLAGS = "-std=c++17 -O3 -ffp-contract=off -fPIC -shared -fvisibility=hidden -pthread".split()
_VNNI = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mfma -mf16c -mavx2".split()
_AVX512 = [*_VNNI, "-mavx512bf16"]
LINK_FLAGS = ("-shared", "-pthread", "-Wl,--strip-debug")
LEVEL_FLAGS = {
    "amx": [*_AVX512, "-mamx-tile", "-mamx-bf16"],
    "avx512": _AVX512,
    "vnni": _VNNI,
    "avx2": "-mavx2 -mfma -mf16c".split(),
    "portable": [],
}
"""Compiler flags by level, best level first."""

X86_64 = ("x86_64", "AMD64")


class BuildError(RuntimeError):
    """The kernels could not be compiled; the message has the command and what the compiler said."""


def levels_of_machine(machine: str | None = None) -> tuple[str, ...]:
    """The levels that can be compiled for a machine (``platform.machine()`` by default), best first."""
    return tuple(LEVEL_FLAGS) if (machine or platform.machine()) in X86_64 else ("portable",)


def library_path(level: str, folder: Path = LIBRARIES) -> Path:
    """Where the library of ``level`` lies, whether it exists or not."""
    return folder / f"hopon-{level}.so"


def system_compiler() -> str | None:
    """Path of the first of c++, g++ and clang++ on PATH, or None."""
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def find_compiler() -> list[str]:
    """The command that compiles C++: a compiler of the system, else the one in the ziglang wheel.

    Raises:
        BuildError: there is neither.
    """
    if (compiler := system_compiler()) is not None:
        return [compiler]
    if importlib.util.find_spec("ziglang") is not None:
        # Zig compiles for the machine it runs on unless told otherwise; the level's flags alone shall decide.
        return [sys.executable, "-m", "ziglang", "c++", "-mcpu=baseline"]
    raise BuildError(
        "no C++ compiler: looked for c++, g++ and clang++ on PATH and for the Python package 'ziglang'; "
        "install one of them (for example: pip install ziglang)"
    )


def fingerprint(compiler: Sequence[str], level: str, sources: Path) -> str:
    """Hash of everything a library depends on: sources, flags and the compiler's name (not where it lies)."""
    digest = hashlib.sha256()
    for path in sorted(sources.iterdir()):
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    name = Path(compiler[0]).name if len(compiler) == 1 else " ".join(compiler[1:])
    digest.update("\0".join([name, platform.machine(), *_flags(level), *LINK_FLAGS]).encode())
    return digest.hexdigest()


def build(
    *,
    levels: Iterable[str] | None = None,
    compiler: Sequence[str] | None = None,
    force: bool = False,
    folder: Path = LIBRARIES,
    sources: Path = SOURCES,
) -> list[Path]:
    """Compiles what is missing or stale and returns the libraries' paths, in the order of ``levels``.

    Args:
        levels: which instruction levels; all that this machine's architecture has by default.
        compiler: the compiler's command; ``find_compiler()`` by default.
        force: compile even when sources, flags and compiler are those of the existing library.
        sources: where the sources are.
        folder: where the libraries go. Safe with several builders at a time and while a library is loaded.

    Raises:
        BuildError: no compiler, an unknown level, or the compiler failed. Of the default levels, those whose flags the
            compiler does not know (GCC 11 was the first with amx) are left out instead, with a line that says so.
    """
    wanted = tuple(levels_of_machine() if levels is None else levels)
    for level in wanted:
        if level not in levels_of_machine():
            possible = ", ".join(levels_of_machine())
            raise BuildError(f"level {level!r} cannot be compiled for {platform.machine()}; possible: {possible}")
    command = list(find_compiler() if compiler is None else compiler)
    if levels is None:
        wanted = tuple(level for level in wanted if _knows_flags(command, level))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamps = _read_stamps(folder)
        prints = {level: fingerprint(command, level, sources) for level in wanted}
        stale = [
            level
            for level in wanted
            if force or stamps.get(level) != prints[level] or not library_path(level, folder).exists()
        ]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as executor:
            list(executor.map(lambda level: _compile(command, level, sources, folder), stale))
        if stale:
            stamps.update({level: prints[level] for level in stale})
            _stamp_path(folder).write_text(json.dumps(stamps, indent=1, sort_keys=True) + "\n")
    return [library_path(level, folder) for level in wanted]


def _flags(level: str) -> list[str]:
    return [*COMMON_FLAGS, f"-DHOPON_LEVEL_{level.upper()}", *LEVEL_FLAGS[level]]


def _knows_flags(compiler: Sequence[str], level: str) -> bool:
    """Whether the compiler accepts a level's flags; says so if not. An empty source, so that nothing else can fail."""
    if not LEVEL_FLAGS[level]:
        return True
    command = [*compiler, *LEVEL_FLAGS[level], "-fsyntax-only", "-x", "c++", os.devnull]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"cannot run the compiler {command[0]!r}: {error}") from error
    if result.returncode != 0:
        said = " ".join(result.stderr.split("\n", 1)[:1])
        print(f"leaving out the {level} kernels, whose flags this compiler does not know: {said}", file=sys.stderr)
    return result.returncode == 0


def _compile(compiler: Sequence[str], level: str, sources: Path, folder: Path) -> None:
    """Compiles beside the old library and then renames: a process that has the old one loaded keeps it.

    Two steps, because Zig builds its C++ runtime for the flags that it links with: the level's flags are for our
    code only, so that one runtime (most of the time that Zig takes) serves all levels.
    """
    part, fresh = (folder / f".hopon-{level}.{os.getpid()}.{kind}" for kind in ("o", "so"))
    flags = [flag for flag in _flags(level) if flag != "-shared"]
    try:
        _run(level, [*compiler, *flags, "-c", str(sources / "hopon.cpp"), "-o", str(part)])
        _run(level, [*compiler, *LINK_FLAGS, str(part), "-o", str(fresh)])
        fresh.replace(library_path(level, folder))
    finally:
        part.unlink(missing_ok=True)
        fresh.unlink(missing_ok=True)


def _run(level: str, command: Sequence[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"cannot run the compiler {command[0]!r}: {error}") from error
    if result.returncode != 0:
        raise BuildError(
            f"compiling the {level} kernels failed with exit code {result.returncode}:\n"
            f"{' '.join(command)}\n{result.stdout}{result.stderr}"
        )


def _stamp_path(folder: Path) -> Path:
    return folder / "build.json"


def _read_stamps(folder: Path) -> dict[str, str]:
    path = _stamp_path(folder)
    if not path.exists():
        return {}
    try:
        return {str(level): str(stamp) for level, stamp in json.loads(path.read_text()).items()}
    except ValueError:
        return {}  # written half; the libraries are compiled anew


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hopon.native.build", description="compile hopon's CPU kernels")
    parser.add_argument("--compiler", nargs="+", help="the compiler's command (default: c++, g++, clang++ or ziglang)")
    parser.add_argument("--levels", nargs="+", choices=levels_of_machine(), help="default: all")
    parser.add_argument("--force", action="store_true", help="compile even if nothing changed")
    arguments = parser.parse_args()
    try:
        paths = build(levels=arguments.levels, compiler=arguments.compiler, force=arguments.force)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(*paths, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
