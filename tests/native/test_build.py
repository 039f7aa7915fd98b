"""Compiling and loading the kernels: what is rebuilt, and errors that say what to do."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hopon.native as native
from hopon.native import build as builder


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """A stand-in that writes its arguments as the output and counts its calls."""
    path = tmp_path / "fake-c++"
    path.write_text(
        "#!/bin/sh\n"
        'case "$*" in *-mamx-tile*) [ -e "$0.old" ] && { echo "unrecognized -mamx-tile" >&2; exit 1; };; esac\n'
        'case "$*" in *-fsyntax-only*) exit 0;; esac\n'
        f"echo run >> {tmp_path}/calls\n"
        "for last; do :; done\n"
        'case "$*" in\n'
        '*AVX2*) [ -e "$0.broken" ] && { echo "no such register" >&2; exit 3; };;\n'
        "esac\n"
        'echo "$@" > "$last"\n'
    )
    path.chmod(0o755)
    return path


def calls(compiler: Path) -> int:
    """How many libraries it made: each takes two calls, to compile and to link."""
    log = compiler.parent / "calls"
    return len(log.read_text().splitlines()) // 2 if log.exists() else 0


LEVELS = builder.levels_of_machine()


def test_paths_and_levels_agree_between_the_two_modules() -> None:
    """The builder, which may not import the binding, names the same levels and files."""
    assert tuple(builder.LEVEL_FLAGS) == native.LEVELS
    assert all(native.library_path(level) == builder.library_path(level) for level in native.LEVELS)
    assert builder.levels_of_machine("x86_64") == native.LEVELS
    assert builder.levels_of_machine("aarch64") == ("portable",)


def test_only_what_changed_is_compiled(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing twice; all again after a change of a source, of flags or of the compiler; one after a loss."""
    sources = tmp_path / "src"
    shutil.copytree(builder.SOURCES, sources)
    folder = tmp_path / "lib"

    def compiled() -> int:
        before = calls(compiler)
        builder.build(compiler=[str(compiler)], sources=sources, folder=folder)
        return calls(compiler) - before

    assert compiled() == len(LEVELS)
    assert compiled() == 0
    (sources / "hopon.h").write_text((sources / "hopon.h").read_text() + "\n")
    assert compiled() == len(LEVELS)
    builder.library_path("portable", folder).unlink()
    assert compiled() == 1
    monkeypatch.setitem(builder.LEVEL_FLAGS, "portable", ["-DX"])
    assert compiled() == 1
    other = compiler.with_name("other-c++")
    shutil.copy(compiler, other)
    builder.build(compiler=[str(other)], sources=sources, folder=folder)
    assert calls(other) == 3 * len(LEVELS) + 2
    (folder / "build.json").write_text("{ half")
    assert compiled() == len(LEVELS)


def test_a_failing_compiler_is_quoted(compiler: Path, tmp_path: Path) -> None:
    """The error has the command, the exit code and the compiler's words; the old library stays."""
    if "avx2" not in LEVELS:
        pytest.skip("this architecture has one level")
    folder = tmp_path / "lib"
    (path,) = builder.build(compiler=[str(compiler)], levels=["avx2"], folder=folder)
    old = path.read_text()
    Path(f"{compiler}.broken").touch()
    with pytest.raises(builder.BuildError, match=r"avx2 kernels failed with exit code 3") as error:
        builder.build(compiler=[str(compiler)], levels=["avx2"], folder=folder, force=True)
    assert "no such register" in str(error.value)
    assert "-mfma" in str(error.value)
    assert path.read_text() == old
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "build.json", "hopon-avx2.so"]


def test_levels_that_an_old_compiler_does_not_know_are_left_out(
    compiler: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default the others are built and the missing one is named; asked for by its name, it is an error."""
    if "amx" not in LEVELS:
        pytest.skip("this architecture has one level")
    Path(f"{compiler}.old").touch()
    paths = builder.build(compiler=[str(compiler)], folder=tmp_path / "lib")
    assert [path.name for path in paths] == [f"hopon-{level}.so" for level in LEVELS if level != "amx"]
    said = capsys.readouterr().err
    assert "leaving out the amx kernels" in said
    assert "unrecognized -mamx-tile" in said
    with pytest.raises(builder.BuildError, match="amx kernels failed"):
        builder.build(compiler=[str(compiler)], levels=["amx"], folder=tmp_path / "lib")


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    """A command that does not exist is an error with its name."""
    with pytest.raises(builder.BuildError, match="no-such-compiler"):
        builder.build(compiler=["no-such-compiler"], levels=["portable"], folder=tmp_path / "lib")


def test_unknown_levels_are_refused(tmp_path: Path) -> None:
    """The error names the level and those that are possible."""
    with pytest.raises(builder.BuildError, match=r"'sse9'.*portable"):
        builder.build(levels=["sse9"], folder=tmp_path)


def test_without_any_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler on PATH: the ziglang wheel if it is there, else an error that says how to get it."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(builder.BuildError, match="pip install ziglang"):
        builder.find_compiler()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert builder.find_compiler()[1:4] == ["-m", "ziglang", "c++"]


def test_importing_the_binding_loads_and_builds_nothing() -> None:
    """No library is mapped and no thread started by an import."""
    code = (
        "import hopon.native, os; maps = open('/proc/self/maps').read(); "
        "print('hopon-' in maps, len(os.listdir('/proc/self/task')))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split()[0] == "False"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of the one with the libraries."""
    monkeypatch.setattr(native, "library_path", lambda level: tmp_path / f"hopon-{level}.so")
    return tmp_path


def test_levels_are_chosen_with_a_reason(built_levels: tuple[str, ...]) -> None:
    """The best level by itself, a forced one if it is there, and an error for an unknown one."""
    level, reason = native.choose_level()
    assert level == built_levels[0]
    assert "best" in reason
    assert native.choose_level("portable") == ("portable", "asked for")
    with pytest.raises(native.NativeError, match=r"'sse9'.*avx512, vnni, avx2, portable"):
        native.choose_level("sse9")
    with pytest.raises(native.NativeError, match="sse9"):
        native.load("sse9")


def test_missing_libraries_are_named(elsewhere: Path) -> None:
    """Without libraries the error has the folder and the command that builds them."""
    assert native.available_levels() == ()
    with pytest.raises(native.NativeError, match=r"python -m hopon\.native\.build"):
        native.choose_level()
    with pytest.raises(native.NativeError, match=rf"avx2 is not built.*{elsewhere}"):
        native.load("avx2")
    with pytest.raises(native.NativeError, match="avx2 is not built"):
        native.choose_level("avx2")


def test_foreign_libraries_are_refused(
    elsewhere: Path, built_levels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No library at all, one of another ABI, one with other structs: each is an error with the path."""
    path = elsewhere / "hopon-portable.so"
    path.write_text("not a library")
    with pytest.raises(native.NativeError, match=rf"cannot load {path}"):
        native.load("portable")
    path.unlink()
    shutil.copy(builder.library_path("portable"), path)
    with monkeypatch.context() as patch:
        patch.setattr(native, "ABI", 99)
        with pytest.raises(native.NativeError, match=rf"{path} has ABI \d+, this hopon needs 99"):
            native.load("portable")
    with monkeypatch.context() as patch:
        patch.setattr(native, "STRUCTS", (*native.STRUCTS[:-1], native.Buffer))
        with pytest.raises(native.NativeError, match=r"Buffer has 16 bytes here and \d+ in"):
            native.load("portable")
    assert native.load("portable").level == "portable"
