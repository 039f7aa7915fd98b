"""The ``hopon`` command, from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
import typer

from hopon.cli.engine_flags import parse_bytes
from hopon.cli.environment import cache_root

DATA = Path(__file__).parent / "data"
STORIES = DATA / "stories260k"
QUICK = ("--dtype", "f32", "--threads", "1")


def _hopon(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hopon", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)


def _error(*arguments: str | Path) -> str:
    """The one line that a failing command prints."""
    run = _hopon(*arguments)
    assert run.returncode not in (0, -signal.SIGKILL)
    assert "Traceback" not in run.stderr
    lines = run.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@contextlib.contextmanager
def _serving(model: Path | str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A server on a free port and the lines that it printed until it was ready."""
    command = [sys.executable, "-m", "hopon", "serve", str(model), "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if line.strip().startswith("curl "):
                break
        else:
            pytest.fail("the server ended: " + "\n".join(lines))
        yield process, lines
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


def _url(lines: Sequence[str]) -> str:
    found = re.search(r"http://127\.0\.0\.1:\d+", lines[0])
    assert found is not None, lines[0]
    return found[0]


def test_version() -> None:
    """The version is one line."""
    assert re.fullmatch(r"hopon \d+\.\d+\.\d+\n", _hopon("--version").stdout)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("536870912", 536870912),
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        ("1.5 gib", 3 << 29),
        ("1MB", 1_000_000),
        ("64kib", 65536),
        ("7B", 7),
    ],
)
def test_sizes_are_read_with_their_units(text: str, number: int) -> None:
    """Plain bytes, binary and decimal units, any case."""
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 XiB", "1e9", "2GiBs", "nan"])
def test_a_bad_size_is_named(text: str) -> None:
    """What is no size is an error that repeats it."""
    with pytest.raises(typer.BadParameter, match=re.escape(repr(text))):
        parse_bytes(text)


def test_the_cache_can_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """HOPON_CACHE names the cache's root; without it, it lies in the home directory."""
    monkeypatch.setenv("HOPON_CACHE", "/somewhere/else")
    assert cache_root() == Path("/somewhere/else")
    monkeypatch.delenv("HOPON_CACHE")
    assert cache_root() == Path.home() / ".cache" / "hopon"


@pytest.mark.parametrize("command", ["serve", "generate", "pull"])
def test_an_unknown_model_is_one_line(command: str) -> None:
    """Every command says what there is."""
    more = ("-p", "x") if command == "generate" else ()
    assert "smollm2-135m" in _error(command, "no-such-model", *more)


def test_a_broken_model_is_named(tmp_path: Path) -> None:
    """A file that is no model ends the start with its name and a non-zero status."""
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + bytes(20))
    assert "broken.gguf" in _error("serve", file, "--port", "0")
    assert "broken.gguf" in _error("generate", file, "-p", "x")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    """A folder without its weights ends the start with the missing file's name."""
    for path in STORIES.iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    assert "safetensors" in _error("serve", tmp_path, "--port", "0")


def test_a_port_in_use_is_named() -> None:
    """The address that cannot be had is in the error."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in _error("serve", STORIES, "--port", str(port))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--block-size", "17"), "got 17"),
        (("--num-kv-blocks", "8", "--kv-cache-memory", "1MiB"), "exclude each other"),
        (("--dtype", "fp4"), "'fp4'"),
        (("--level", "sse9"), "'sse9'"),
        (("--max-model-len", "100000"), "512"),
        (("--max-num-seqs", "64", "--max-num-batched-tokens", "32"), "max_num_batched_tokens 32"),
        (("--no-enable-chunked-prefill", "--max-num-batched-tokens", "128"), "max_model_len 512"),
        (("--threads", "-1"), "got -1"),
    ],
)
def test_v001_bad_settings_end_the_start(flags: tuple[str, ...], message: str) -> None:
    """A setting that cannot work is one line with the value and the limit."""
    assert message in _error("serve", STORIES, "--port", "0", *flags)


def test_v100_a_length_that_does_not_fit_is_told_the_one_that_does() -> None:
    """The error names the largest length; with it the server starts."""
    flags = ("--num-kv-blocks", "4", *QUICK)
    message = _error("serve", STORIES, "--port", "0", "--max-model-len", "512", *flags)
    found = re.search(r"at most (\d+)", message)
    assert found is not None, message
    with _serving(STORIES, "--max-model-len", found[1], *flags) as (_, lines):
        assert httpx.get(f"{_url(lines)}/health").status_code == 200


def test_v002_a_budget_above_the_length_is_fine() -> None:
    """With chunked prefill a step may take more tokens than the longest request has."""
    with _serving(STORIES, "--max-model-len", "256", "--max-num-batched-tokens", "2048", *QUICK) as (_, lines):
        assert httpx.get(f"{_url(lines)}/health").status_code == 200


def test_v097_the_start_says_how_much_fits() -> None:
    """Bytes, tokens and full-length requests of the KV cache are printed and agree with each other."""
    with _serving(STORIES, "--kv-cache-memory", "4MiB", "--kv-cache-dtype", "f32", *QUICK) as (_, lines):
        [line] = [line for line in lines if "KV cache" in line]
        found = re.search(
            r"([\d.]+) MiB of f32 = ([\d,]+) tokens = ([\d.]+) requests of the full length, (\d+) tok", line
        )
        assert found is not None, line
        mib, tokens, requests, length = (float(text.replace(",", "")) for text in found.groups())
        bytes_per_token = 2 * 5 * 4 * 8 * 4  # K and V, layers, KV heads, head size, f32
        assert mib * 2**20 == pytest.approx(tokens * bytes_per_token, rel=0.01)
        assert requests == pytest.approx(tokens / length, abs=0.01)
        assert any("prefix caching" in line and "16 tokens" in line for line in lines)


def test_the_printed_command_works(smollm2: Path) -> None:
    """The curl line that a start prints, sent as it is, gets an answer; Ctrl-C then ends the server with status 0."""
    with _serving("smollm2-135m", "--max-model-len", "512") as (process, lines):
        words = shlex.split(lines[-1])
        assert words[0] == "curl"
        url = next(word for word in words if word.startswith("http"))
        body = words[words.index("-d") + 1]
        answer = httpx.post(url, content=body, headers={"content-type": "application/json"}, timeout=60)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"]
        assert answer.json()["model"] == "smollm2-135m"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == 0


def test_a_server_is_named_as_asked() -> None:
    """--served-model-name gives the names that clients use."""
    names = ("--served-model-name", "tiny", "--served-model-name", "stories")
    with _serving(STORIES, *names, *QUICK) as (_, lines):
        listed = httpx.get(f"{_url(lines)}/v1/models").json()["data"]
        assert [model["id"] for model in listed][:1] == ["tiny"]
        body = {"model": "stories", "prompt": "Once", "max_tokens": 1}
        assert httpx.post(f"{_url(lines)}/v1/completions", json=body).status_code == 200


def test_generate_prints_the_golden_answer(smollm2: Path) -> None:
    """One prompt in, its greedy continuation in f32 out, as the reference implementation has it, and nothing else."""
    cases = json.loads((DATA / "golden" / "smollm2-135m-instruct-q4_1.json").read_text())["cases"]
    case = next(case for case in cases if case["name"] == "story")
    run = _hopon("generate", smollm2, "-p", case["prompt"], "--max-tokens", "32", "--ignore-eos", "--dtype", "f32")
    assert run.returncode == 0, run.stderr
    assert run.stdout == case["greedy_text"] + "\n"
    assert run.stderr == ""


def test_generate_wants_one_kind_of_input(tmp_path: Path) -> None:
    """A prompt or a file, a file with an output, --chat only with a prompt."""
    for arguments in ((), ("-p", "x", "--input", "f"), ("--input", "f"), ("--chat", "--input", "f", "--output", "g")):
        assert _hopon("generate", STORIES, *arguments).returncode == 2


def test_v042_answers_in_a_file_keep_the_order(tmp_path: Path) -> None:
    """One answer per line in the order of the prompts, with line numbers, ids and fields of their own."""
    prompts = [
        {"prompt": "Once upon a time", "max_tokens": 40},
        "Lily",
        {"prompt": [1, 2, 3], "id": "ids", "max_tokens": 1, "logprobs": 1},
        {"prompt": "One day", "id": 7},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n\n".join(json.dumps(prompt) for prompt in prompts))
    run = _hopon(
        "generate", STORIES, "--input", source, "--output", target, "--max-tokens", "5", "--ignore-eos", *QUICK
    )
    assert run.returncode == 0, run.stderr
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["line"] for answer in answers] == [1, 3, 5, 7]
    assert [answer.get("id") for answer in answers] == [None, None, "ids", 7]
    assert [answer["completion_tokens"] for answer in answers] == [40, 5, 1, 5]
    assert answers[2]["prompt_tokens"] == 3
    assert len(answers[2]["logprobs"]) == len(answers[2]["token_ids"]) == 1
    assert "logprobs" not in answers[0]
    assert "exists" in _error("generate", STORIES, "--input", source, "--output", target, *QUICK)


def test_bad_lines_are_named_before_anything_runs(tmp_path: Path) -> None:
    """Every bad line is told by its number and reason, at most five of them, and no output file appears."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bad = [
        "{",
        "[1]",
        '{"prompt": 1}',
        '{"prompt": "a", "max_tokens": 0}',
        '{"prompt": "a", "temprature": 1}',
        '{"prompt": "a", "messages": []}',
    ]
    source.write_text('"fine"\n' + "\n".join(bad) + "\n")
    message = _error("generate", STORIES, "--input", source, "--output", target)
    for number in range(2, 7):
        assert f"line {number}: " in message
    assert "and 1 more" in message
    assert "unknown field 'temprature'" in message
    assert not target.exists()


def test_a_line_that_cannot_be_answered_does_not_stop_the_others(tmp_path: Path) -> None:
    """A prompt that is too long has an error in its place, and the status tells."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(prompt) for prompt in ("a", {"prompt": [5] * 600}, "b")))
    run = _hopon("generate", STORIES, "--input", source, "--output", target, "--max-tokens", "2", *QUICK)
    assert run.returncode == 1
    assert "1 of 3 lines could not be answered, the first is line 2" in run.stderr
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["line"] for answer in answers] == [1, 2, 3]
    assert "600 tokens" in answers[1]["error"]


def test_an_interrupt_loses_no_answer(tmp_path: Path) -> None:
    """Ctrl-C in the middle leaves every finished answer in the file, each a whole line, and says how many there are."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    short = [json.dumps({"prompt": "a", "max_tokens": 1})] * 3
    endless = [json.dumps({"prompt": "a", "max_tokens": 500, "ignore_eos": True})] * 3000
    source.write_text("\n".join([*short, *endless]))
    command = [sys.executable, "-m", "hopon", "generate", str(STORIES), "--input", str(source), "--output", str(target)]
    process = subprocess.Popen([*command, *QUICK], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    deadline = time.monotonic() + 60
    while not (target.exists() and target.read_text().count("\n") >= 3):
        assert time.monotonic() < deadline, "no answers came"
        assert process.poll() is None, "it ended by itself"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode not in (0, -signal.SIGINT)
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["line"] for answer in answers[:3]] == [1, 2, 3]
    assert f"interrupted; {len(answers)} of 3003 answers are in" in stderr
    assert "Traceback" not in stderr


def test_pull_prints_where_the_model_is(smollm2: Path) -> None:
    """Pulling what is on disk prints its path."""
    run = _hopon("pull", "smollm2-135m")
    assert run.stdout.strip() == str(smollm2)


def test_simulate_prints_a_report_and_writes_json(tmp_path: Path) -> None:
    """A small simulation from the command line: the table on stdout, everything in the JSON file, twice the same."""
    arguments = ("simulate", "--policy", "orca", "--num-requests", "20", "--cost", "linear", "--seed", "3")
    first = _hopon(*arguments, "--json", tmp_path / "a.json")
    assert first.returncode == 0, first.stderr
    assert "orca" in first.stdout
    _hopon(*arguments, "--json", tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert json.loads((tmp_path / "a.json").read_text())


def test_simulate_names_what_is_wrong(tmp_path: Path) -> None:
    """Unknown policy, knob out of place, a trace whose times go back: one line each, naming it."""
    assert "'orka'" in _error("simulate", "--policy", "orka")
    assert "'bs'" in _error("simulate", "--policy", "orca", "--policy-knob", "bs=1")
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n1.0,10,10\n0.5,10,10\n")
    assert "trace.csv" in _error("simulate", "--trace", trace)
