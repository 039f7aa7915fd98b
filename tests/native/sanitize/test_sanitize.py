"""The kernels under the compiler's sanitizers: one C++ driver with random sizes, compiled and run for each."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hopon.native import build as builder

DRIVER = Path(__file__).with_name("driver.cpp")
# Optimisation makes the compilers take minutes over the instrumented kernels; only the thread sanitizer needs it to be
# quick enough. `null` and `object-size` see what the address sanitizer sees, and double the time.
SANITIZERS = {
    "address": "-O0 -fsanitize=address,undefined -fno-sanitize=null,object-size,vptr",
    "thread": "-O1 -fsanitize=thread",
}


def compile_driver(sanitizer: str, level: str, folder: Path) -> Path:
    """The driver's executable, compiled anew when anything that it is made of has changed."""
    compiler = builder.find_compiler()
    unwanted = ("-O3", "-fPIC", "-shared", "-fvisibility=hidden")
    flags = [flag for flag in builder.COMMON_FLAGS if flag not in unwanted] + builder.LEVEL_FLAGS[level]
    options = [*flags, f"-DHOPON_LEVEL_{level.upper()}", "-g1", "-fno-sanitize-recover=all", f"-I{builder.SOURCES}"]
    options += SANITIZERS[sanitizer].split()
    parts = [" ".join([*compiler, *options]).encode(), DRIVER.read_bytes()]
    parts += [path.read_bytes() for path in sorted(builder.SOURCES.iterdir())]
    target = folder / f"{sanitizer}-{level}-{hashlib.sha256(b''.join(parts)).hexdigest()[:16]}"
    if not target.exists():
        probe = folder / f"probe-{sanitizer}.cpp"
        probe.write_text("int main() { return 0; }\n")
        flag = SANITIZERS[sanitizer].split()[1]
        runtime = subprocess.run([*compiler, flag, str(probe), "-o", f"{probe}.out"], capture_output=True, text=True)
        if runtime.returncode != 0:
            pytest.skip(f"{' '.join(compiler)} has no runtime for {flag}: {runtime.stderr.strip()[-200:]}")
        for old in folder.glob(f"{sanitizer}-{level}-*"):
            old.unlink()
        result = subprocess.run([*compiler, *options, str(DRIVER), "-o", str(target)], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    return target


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("level", ["portable", "best"])
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_kernels_are_clean(
    sanitizer: str,
    level: str,
    built_levels: tuple[str, ...],
    pytestconfig: pytest.Config,
    effort: Callable[[int, int], int],
) -> None:
    """No access out of bounds, no undefined behaviour and no data race in any kernel, at the lowest and best level."""
    cache = pytestconfig.cache
    assert cache is not None, "pytest's cache plugin keeps the executables"
    # What amx adds to avx512 the sanitizers cannot see: tile registers are loaded behind their back.
    vector = next(name for name in built_levels if name != "amx")
    program = compile_driver(sanitizer, vector if level == "best" else level, cache.mkdir("sanitize"))
    rounds = effort(6, 100)
    result = subprocess.run([str(program), str(rounds)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-5000:]
    assert result.stdout.strip() == "ok"
