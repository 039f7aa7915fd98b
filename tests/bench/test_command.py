"""What the command line asks for becomes a schedule; runs become files that can be compared."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hopon.bench import command, report
from hopon.bench.command import Asked, make_schedule, make_slo, make_writer, measure, shared_tokens
from hopon.bench.manifest import Declared
from hopon.bench.play import play
from hopon.bench.sampling import read_settings
from hopon.bench.schedule import MIXED, Writer
from hopon.bench.server import Started, serve
from hopon.bench.summary import parse_slo, summarise
from hopon.bench.target import Client, Target, TargetError
from hopon.workload.ask import Piece
from tests.bench.virtual import Server, steady, virtual

STORIES = Path(__file__).parents[1] / "data" / "stories260k"


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    with serve(str(STORIES), ("--dtype", "f32", "--threads", "1")) as server:
        yield server


@pytest.mark.parametrize("tokens", [1, 17, 400])
def test_v106_prompts_have_the_length_asked_for(started: Started, tokens: int) -> None:
    """The server counts exactly as many prompt tokens as were asked for."""
    asked = Asked(input_len=str(tokens), output_len="4", concurrency=2, num_requests=4, vocab_size=512)
    measured = asyncio.run(measure(Target(url=started.url), asked, Declared()))
    assert [call.input_tokens for call in measured.records.calls] == [tokens] * 4
    assert measured.summary.warnings == ()


def test_v106_words_are_fitted_to_the_server_s_tokenizer(started: Started) -> None:
    """As text, lengths are about right on average, although this tokenizer needs three tokens for a word."""
    asked = Asked(input_len="150", output_len="2", concurrency=4, num_requests=40, as_text=True)
    measured = asyncio.run(measure(Target(url=started.url), asked, Declared()))
    mean = sum(call.input_tokens for call in measured.records.calls) / 40
    assert mean == pytest.approx(150, rel=0.1)


def test_v107_the_same_seed_twice_measures_no_cache_unless_it_is_declared_warm(started: Started) -> None:
    """Cold: a repeated run hits nothing. Warm: it finds its own prompts. And who declares cold but is not, is told."""

    def cached(cache: Any) -> int:
        asked = Asked(
            input_len="64", output_len="2", concurrency=2, num_requests=6, vocab_size=512, cache=cache, seed=7
        )
        measured = asyncio.run(measure(Target(url=started.url), asked, Declared()))
        return measured.summary.served.cached_tokens

    assert [cached("cold"), cached("cold")] == [0, 0]
    assert cached("warm") == 0
    assert cached("warm") >= 6 * 48  # whole blocks, never the whole prompt

    async def told() -> str:
        asked = Asked(input_len="64", output_len="2", concurrency=1, num_requests=1, vocab_size=512)
        writer = make_writer(asked)
        schedule = make_schedule(asked, writer)
        target = Target(url=started.url, model="stories260k")
        for _ in range(2):
            records = await play(target, schedule)
        return " ".join(summarise(records, shared_tokens=shared_tokens(schedule)).warnings)

    assert "the cache was not cold" in asyncio.run(told())


def test_shared_prefixes_are_no_cheating(started: Started) -> None:
    """What the run's own prompts share may come from the cache without a warning."""
    asked = Asked(
        input_len="32",
        output_len="2",
        prefix_groups=2,
        prefix_len=64,
        concurrency=1,
        num_requests=8,
        vocab_size=512,
    )
    measured = asyncio.run(measure(Target(url=started.url), asked, Declared()))
    assert measured.summary.served.cached_tokens == 6 * 64
    assert measured.summary.warnings == ()


def test_a_run_as_a_file(started: Started, tmp_path: Path) -> None:
    """The command line writes who was measured, how, every request, and the server's numbers on the run's timeline."""
    path = tmp_path / "run.json"
    words = f"--workload mixed --length-scale 0.2 --rate 20 --num-requests 30 --vocab-size 512 --json {path}"
    declared = ("--slo", "short: ttft<9s; long-answer: e2e<9s", "--capacity-kind", "reserved", "--hardware", "a box")
    run = subprocess.run(
        [sys.executable, "-m", "hopon", "bench", started.url, *words.split(), *declared],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "goodput" in run.stdout
    content = report.read(path)
    manifest = content["manifest"]
    assert manifest["model"] == "stories260k"
    assert manifest["settings"]["max_num_seqs"] == "64"
    assert manifest["server"].startswith("hopon")
    assert (manifest["capacity"], manifest["server_hardware"], manifest["cache"]) == ("reserved", "a box", "cold")
    assert len(content["requests"]) == 30
    assert content["samples"][0]["running"] is not None
    assert content["summary"]["served"]["attainment"] == 1.0
    other = json.loads(path.read_text())
    other["manifest"]["model"] = "another"
    (tmp_path / "other.json").write_text(json.dumps(other))
    shown = command.compare_files([path, tmp_path / "other.json"])
    assert "THESE RUNS DIFFER" in shown
    assert "model: 'stories260k' and 'another'" in shown
    assert "DIFFER" not in command.compare_files([path, path])


def test_an_interrupted_run_writes_what_it_measured(started: Started, tmp_path: Path) -> None:
    """Ctrl-C in the middle: the table and the file of what was measured until then, and status 130."""
    path = tmp_path / "run.json"
    before = asyncio.run(_answered(started.url))
    words = f"--rate 50 --num-requests 100000 --input-len 8 --output-len 2 --vocab-size 512 --json {path}"
    process = subprocess.Popen(
        [sys.executable, "-m", "hopon", "bench", started.url, *words.split()], stdout=subprocess.PIPE, text=True
    )
    for _ in range(600):
        if asyncio.run(_answered(started.url)) > before + 20:
            break
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "ended early" in output
    assert any(request["reason"] for request in report.read(path)["requests"])


async def _answered(url: str) -> float:
    """Requests that the server has finished, as its metrics tell."""
    client = Client(Target(url=url), 0.0)
    page = await client.get("/metrics")
    client.close()
    assert page is not None
    lines = page.decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm_request_success_total"))


def test_two_servers_in_alternation() -> None:
    """A server twice as slow has twice the TTFT in every window, and both get the same prompts in the same windows."""

    async def main() -> tuple[str, dict[str, Any], list[Any], list[Any]]:
        fast, slow = Server(steady(0.1, 0.01), port=80), Server(steady(0.2, 0.01), port=81)
        targets = (Target(url=fast.url, model="m"), Target(url=slow.url, model="m"))
        asked = Asked(input_len="8", output_len="4", rate=20.0, num_requests=10, cache="warm")
        text, content = await command.alternate(
            targets, asked, Declared(capacity="shared"), windows=3, stop=asyncio.Event()
        )
        return text, content, fast.calls, slow.calls

    text, content, fast, slow = virtual(main)
    ratios = {entry["figure"]: entry["ratios"] for entry in content["ratios"]}
    assert ratios["TTFT p50"] == pytest.approx([2.0, 2.0, 2.0])
    assert ratios["TPOT p50"] == pytest.approx([1.0, 1.0, 1.0])
    assert "above" in next(line for line in text.splitlines() if line.startswith("TTFT p50"))
    assert "shared" in text
    assert sorted(call.raw for call in fast) == sorted(call.raw for call in slow)
    assert len({call.raw for call in fast}) > 20


def test_a_server_that_refuses_the_first_request_ends_the_run() -> None:
    """A run against a server that answers nothing ends before it begins, with the server's words."""

    async def script(call: Any) -> None:
        call.reply(400, "no such model")

    async def main() -> None:
        await measure(Target(url=Server(script).url), Asked(rate=1.0), Declared())

    with pytest.raises(TargetError, match="HTTP 400: no such model"):
        virtual(main)


def test_promises() -> None:
    """Limits for all, or for each class; units are converted, and nonsense is named."""
    slo = parse_slo("ttft<500ms tpot<60ms")
    assert (slo.default.ttft, slo.default.tpot) == (0.5, 0.06)
    slo = parse_slo("short: ttft<1s; long-answer: e2e<30s itl<=2s")
    assert (slo.kinds["short"].ttft, slo.kinds["long-answer"].e2e, slo.default.ttft) == (1.0, 30.0, None)
    for bad in ("", "ttft>1s", "ttft<1", "a: ttft<1s; a: e2e<1s", ": ttft<1s", "ttft<1s ttft<2s"):
        with pytest.raises(ValueError, match=r"looks like|limited twice"):
            parse_slo(bad)
    with pytest.raises(ValueError, match="class 'chat'; this workload has short, long-prompt, long-answer"):
        make_slo(Asked(workload="mixed", rate=1.0, slo="chat: ttft<1s"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "--rate for an open loop or --concurrency"),
        ({"rate": 1.0, "concurrency": 1}, "give one of them"),
        ({"rate": 1.0, "burstiness": 0.0}, "burstiness must be above 0"),
        ({"rate": 1.0, "duration": -1.0}, "duration must be above 0"),
    ],
)
def test_bad_loads_are_named(fields: dict[str, Any], message: str) -> None:
    """A load that makes no sense is refused with the reason."""
    with pytest.raises(ValueError, match=message):
        Asked(**fields)


def test_a_duration_has_all_arrivals_of_its_time() -> None:
    """Ten seconds at 50 per second have about 500 requests, the last one near the end; a ramp has its mean."""
    for burstiness in (1.0, 0.05):
        asked = Asked(rate=50.0, duration=10.0, arrivals="gamma", burstiness=burstiness)
        sessions = make_schedule(asked, Writer()).sessions
        assert 9.0 < sessions[-1].arrival < 10.0
    assert len(make_schedule(Asked(rate=50.0, duration=10.0), Writer()).sessions) == pytest.approx(500, rel=0.15)
    ramp = make_schedule(Asked(rate=10.0, ramp_to=30.0, duration=10.0, arrivals="constant"), Writer())
    assert len(ramp.sessions) == pytest.approx(200, abs=2)


def test_a_mix_has_its_classes_by_weight() -> None:
    """Classes come as often as their weights say, with lengths of their own."""
    schedule = make_schedule(Asked(workload="mixed", rate=1.0, num_requests=4000), Writer())
    turns = [session.turns[0] for session in schedule.sessions]
    for kind in MIXED:
        mine = [turn for turn in turns if turn.kind == kind.name]
        assert len(mine) / len(turns) == pytest.approx(kind.weight, abs=0.03)
        assert max(turn.max_tokens or 0 for turn in mine) <= kind.outputs.high  # type: ignore[attr-defined]


def test_prompts_of_a_file_keep_their_fields(tmp_path: Path) -> None:
    """Texts, ids and conversations come as they are, each with its own length and sampling."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('"one"\n{"prompt": [1, 2], "max_tokens": 3, "top_k": 5}\n')
    schedule = make_schedule(Asked(rate=0.0, num_requests=4, prompts_file=path, output_len="9"), Writer())
    turns = [session.turns[0] for session in schedule.sessions]
    assert sorted((str(t.content), t.max_tokens, dict(t.fields)) for t in turns[:2]) == [
        ("(1, 2)", 3, {"top_k": 5}),
        ("one", 9, {}),
    ]
    assert turns[:2] == turns[2:]


def test_equal_pieces_are_equal_prompts_and_salts_make_others() -> None:
    """A shared piece gives the same tokens in every prompt of a run, and other tokens in another run."""
    one, other = Writer(salt="a"), Writer(salt="b")
    shared, mine, yours = Piece(1, 20), Piece(2, 10), Piece(4, 10)
    assert one.prompt((shared, mine))[:20] == one.prompt((shared, yours))[:20]
    assert one.prompt((shared, mine))[20:] != one.prompt((shared, yours))[20:]
    assert one.prompt((shared, mine)) != other.prompt((shared, mine))
    assert all(100 <= int(str(token)) < 10_000 for token in one.prompt((shared,)))


def test_settings_are_read_from_the_metrics() -> None:
    """Labels of the configuration are settings, with escapes and all."""
    page = b'# HELP x\nvllm:cache_config_info{block_size="16",engine="0",name="a\\"b"} 1.0\n'
    assert read_settings(page) == {"block_size": "16", "engine": "0", "name": 'a\\"b'}
    assert read_settings(b"nothing 1\n") == {}


def test_a_measurement_that_is_killed_leaves_no_server() -> None:
    """The server of one's own ends with the process that started it, however that ends."""
    code = (
        "import time\n"
        "from hopon.bench.server import serve\n"
        f"with serve({str(STORIES)!r}, ('--dtype', 'f32', '--threads', '1')) as server:\n"
        "    print(server.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as measurement:
        assert measurement.stdout is not None
        server = int(measurement.stdout.readline())
        measurement.kill()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{server}").exists() and not _is_zombie(server):
        assert time.monotonic() < deadline, f"process {server} is still there"
        time.sleep(0.05)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True
