"""Seen from outside: gauges, reasons, steps, goodput, traces, and a dashboard whose queries name what there is."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hopon.core.config import SchedulerConfig
from hopon.core.policy.systems.hopon import Hopon
from hopon.serve.metrics import WINDOW, Histogram, Overcommitment
from hopon.serve.notes import Notebook
from hopon.serve.slo import Slo, Times, judge
from tests.core.harness import Harness, config, request
from tests.serve.conftest import Server, eventually, running, write_model

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "hopon.json"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two seats, traces, metrics with colons, 16 tokens per step of 10 ms."""
    folder = write_model(tmp_path_factory.mktemp("models") / "traced", fake={"step_time": 0.01})
    engine = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_kv_blocks": 66}
    with running(folder, engine=engine, request_traces=True, metrics_colon_names=True) as server:
        yield server


# ---- notes ----


def noted(settings: SchedulerConfig) -> tuple[Harness, Notebook]:
    h = Harness.make(settings, policy=Hopon().policy(settings))
    notebook = Notebook(with_chunks=True)
    policy = h.scheduler.policy
    object.__setattr__(policy, "observers", (notebook,))
    return h, notebook


def test_notes_say_why_others_wait() -> None:
    """Seats, tokens of the step, blocks with those behind in line; nothing where nobody waits."""
    h, notebook = noted(config(64, max_num_seqs=2))
    h.add(*(request(str(i), 8) for i in range(5)))
    h.step()
    assert (notebook.take().waiting.seats, h.scheduler.num_waiting) == (3, 3)
    h, notebook = noted(config(64, max_num_batched_tokens=16))
    h.add(*(request(str(i), 30) for i in range(3)))
    h.step()
    assert notebook.take().waiting.tokens == 2
    h, notebook = noted(config(4))
    h.add(*(request(str(i), 40) for i in range(4)))
    h.step()
    waiting = notebook.take().waiting
    assert (waiting.blocks, waiting.order) == (1, 2)
    h.run()
    last = notebook.take().waiting
    assert (last.seats, last.tokens, last.blocks, last.order) == (0, 0, 0, 0)


def test_notes_tell_seats_chunks_and_useful_rows() -> None:
    """Who came in and went out, what each computed; a prompt computed again is no useful row."""
    h, notebook = noted(config(5, max_num_batched_tokens=16, enable_prefix_caching=False))
    h.add(request("a", 20, 40), request("b", 20, 40))
    admitted: list[str] = []
    preempted: list[str] = []
    rows = useful = 0
    computed = {"a": 0, "b": 0}
    while h.scheduler.has_work:
        h.step()
        notes = notebook.take()
        admitted += notes.admitted
        preempted += notes.preempted
        rows += notes.num_rows
        useful += notes.num_useful_rows
        for name, _, count in notes.chunks:
            computed[name] += count
        assert notes.num_tokens == sum(count for _, _, count in notes.chunks)
    assert preempted
    assert len(admitted) == 2 + len(preempted)
    assert useful < rows
    assert useful >= 80, "every generated token is useful"
    assert sum(computed.values()) == h.scheduler.counters.num_scheduled_tokens


# ---- small parts ----


def test_histogram_buckets_include_their_bound() -> None:
    """Counts are cumulative, a value on a bound belongs to it, what is above all bounds is in +Inf."""
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 9):
        histogram.observe(value)
    histogram.observe(0.0, 3)
    assert histogram.buckets() == ([("1.0", 5), ("2.0", 7), ("+Inf", 8)], 14.0)


def test_v085_overcommitment_is_a_share_of_a_window() -> None:
    """A tenth computed again is too much; the next window without is not; idle is not."""
    memory = Overcommitment()
    memory.look(100.0, 0, 0)
    memory.look(100.0 + WINDOW / 2, 1000, 900)
    assert not memory.is_high, "the window is not over"
    memory.look(100.0 + WINDOW, 2000, 900)
    assert memory.share == 0.45
    assert memory.is_high
    memory.look(100.0 + 2 * WINDOW, 3000, 950)
    assert not memory.is_high
    memory.look(100.0 + 3 * WINDOW, 3000, 950)
    assert memory.share == 0.0


def times(first: float | None, last: float | None, count: int, completed: bool = True) -> Times:
    return Times(arrival=10.0, first=first, last=last, num_tokens=count, completed=completed)


def test_slo_takes_the_worst_output() -> None:
    """Each limit against the worst of the outputs; one token meets any tpot; what did not complete has met nothing."""
    slo = Slo(ttft=1.0, tpot=0.1, e2e=5.0)
    good = judge(slo, [times(10.5, 11.5, 11), times(11.0, 11.0, 1)])
    assert good.met
    assert good.ttft is not None
    assert good.ttft.value_ms == 1000.0
    bad = judge(slo, [times(10.5, 11.5, 11), times(10.5, 12.0, 11)])
    assert not bad.met
    assert bad.each == {"ttft": True, "tpot": False, "e2e": True}
    assert judge(slo, [times(10.5, 11.5, 11, completed=False)]).each == {"ttft": False, "tpot": False, "e2e": False}
    assert judge(Slo(e2e=1.0), [times(None, None, 0)]).each == {"e2e": True}
    assert judge(Slo(), [times(None, None, 0)]).met


# ---- through HTTP ----


def test_slo_is_reported_and_counted(server: Server) -> None:
    """Met and missed, in whole answers and at the end of streams, and the goodput counts."""
    before = server.metrics()
    loose = {"ttft_ms": 1e6, "tpot_ms": 1e6, "e2e_ms": 1e6}
    whole = server.complete("x", max_tokens=3, slo=loose)["usage"]["slo"]
    assert whole["met"] is True
    assert whole["ttft"]["limit_ms"] == 1e6
    assert 0 < whole["ttft"]["value_ms"] <= whole["e2e"]["value_ms"]
    last = server.stream(prompt="x", max_tokens=3, slo={"e2e_ms": 1e-3})[-1]
    assert last["choices"] == []
    assert last["usage"]["slo"]["met"] is False
    assert last["usage"]["slo"]["ttft"] is None
    assert "slo" not in server.complete("x", max_tokens=1)["usage"]
    after = server.metrics()
    grown = {name: after[name] - before[name] for name in after if "slo" in name}
    assert grown['hopon_slo_requests_total{met="true"}'] == 1
    assert grown['hopon_slo_requests_total{met="false"}'] == 1
    assert grown['hopon_slo_limits_total{limit="e2e",met="false"}'] == 1
    assert grown['hopon_slo_limits_total{limit="ttft",met="true"}'] == 1


@pytest.mark.parametrize("slo", [{"ttft_ms": 0}, {"ttft_ms": "1"}, {"unknown_ms": 1}, 5, {"e2e_ms": -1}])
def test_bad_slo_is_named(server: Server, slo: Any) -> None:
    """A 400 that names the field."""
    assert server.refused(prompt="x", slo=slo)["param"].startswith("slo")


def test_gauges_are_right_when_nothing_runs(server: Server) -> None:
    """After the last request, however it ended, every gauge of work reads zero without another step."""
    server.complete([7] * 100, max_tokens=5)
    with server.begin({"prompt": [99, 12], "max_tokens": 900, "ignore_eos": True}):
        eventually(lambda: server.metrics()["vllm_num_requests_running"] == 1)
        assert server.metrics()["vllm_kv_cache_usage_perc"] > 0

    def idle() -> bool:
        metrics = server.metrics()
        names = ["vllm_num_requests_running", "vllm_num_requests_waiting", "vllm_kv_cache_usage_perc"]
        names += ["hopon_queue_places", "hopon_queue_tokens", "hopon_queue_age_seconds"]
        names += [f'hopon_waiting_requests{{reason="{r}"}}' for r in ("seats", "tokens", "blocks", "order", "new")]
        return all(metrics[name] == 0 for name in names)

    eventually(idle)


def test_steps_are_accounted_for(server: Server) -> None:
    """The parts of steps sum to the busy time, rows and tokens of steps to those of the engine."""
    server.complete([8] * 50, max_tokens=20)
    eventually(lambda: server.num_busy() == 0)
    metrics = server.metrics()
    parts = [value for name, value in metrics.items() if name.startswith("hopon_step_part_seconds_total")]
    assert len(parts) == 4
    assert sum(parts) == pytest.approx(metrics["hopon_busy_seconds_total"])
    assert metrics["hopon_step_seconds_sum"] == pytest.approx(sum(parts))
    assert metrics["vllm_iteration_tokens_total_sum"] == metrics["hopon_scheduled_tokens_total"]
    assert metrics["hopon_step_seconds_count"] == metrics["hopon_steps_total"]
    assert metrics["hopon_useful_slot_steps_total"] <= metrics["hopon_slot_steps_total"]


def test_colon_names(traced: Server) -> None:
    """vllm: in place of vllm_ in names, nowhere else; our own names stay."""
    text = traced.http.get("/metrics").text
    assert "\nvllm:num_requests_running{" in text
    assert "# TYPE vllm:num_requests_running gauge" in text
    assert "vllm_" not in text
    assert "\nhopon_steps_total{" in text


def test_a_life_is_told_step_by_step(traced: Server) -> None:
    """Queued, admitted, computed in chunks, tokens one by one, finished; the numbers are those of the answer."""
    answer = traced.complete([50 + i for i in range(40)], max_tokens=5)
    trace = traced.http.get(f"/v1/requests/{answer['id']}/trace").json()
    events = trace["events"]
    kinds = [event["event"] for event in events]
    assert kinds[:2] == ["queued", "admitted"]
    assert kinds[-1] == "finished"
    assert events[0]["prompt_tokens"] == 40
    chunks = [(event["start"], event["tokens"]) for event in events if event["event"] == "computed"]
    assert chunks[:3] == [(0, 16), (16, 16), (32, 8)]
    assert len(chunks) == 3 + 4
    assert [event["index"] for event in events if event["event"] == "generated"] == [0, 1, 2, 3, 4]
    assert (events[-1]["reason"], events[-1]["tokens"]) == ("length", 5)
    moments = [event["at"] for event in events]
    assert moments == sorted(moments)
    assert traced.http.get("/v1/requests/cmpl-none/trace").status_code == 404


def test_a_preempted_life(traced: Server) -> None:
    """Who loses its seat is shown to lose it, and to get another one."""
    names: list[str] = []
    bodies = [{"prompt": [30 + i] * 400, "max_tokens": 200, "ignore_eos": True, "request_id": f"p{i}"} for i in (0, 1)]
    with traced.begin(bodies[0]), traced.begin(bodies[1]):
        eventually(lambda: traced.http.get("/load").json()["server_load"] == 2)
        eventually(lambda: traced.http.get("/load").json()["server_load"] == 0, patience=60)
    for body in bodies:
        trace = traced.http.get(f"/v1/requests/cmpl-{body['request_id']}/trace").json()
        kinds = [event["event"] for event in trace["events"]]
        assert kinds.count("admitted") == 1 + kinds.count("preempted")
        names += kinds
    assert "preempted" in names


def test_v085_preemptions_and_the_age_of_the_queue_are_seen(traced: Server, slow_server: Server) -> None:
    """A tight pool shows in counters of preemptions and recomputed tokens, a long wait in the age of the oldest."""
    before = traced.metrics()
    bodies = [{"prompt": [40 + i] * 400, "max_tokens": 200, "ignore_eos": True} for i in (0, 1)]
    with traced.begin(bodies[0]), traced.begin(bodies[1]):
        names = ("vllm:num_preemptions_total", "hopon_recomputed_tokens_total")
        eventually(lambda: all(traced.metrics()[name] > before[name] for name in names), patience=60)
    body = {"prompt": [70], "max_tokens": 900, "ignore_eos": True}
    with slow_server.begin(body), slow_server.begin(body):
        eventually(lambda: slow_server.metrics()["hopon_queue_age_seconds"] > 0.1)
    slow_server.check_alive()
    assert slow_server.metrics()["hopon_queue_age_seconds"] == 0


def test_no_traces_unless_asked_for(server: Server) -> None:
    """Off by default, and the answer says how to switch them on."""
    answer = server.complete("x", max_tokens=1)
    response = server.http.get(f"/v1/requests/{answer['id']}/trace")
    assert response.status_code == 404
    assert "--request-traces" in response.json()["error"]["message"]


def test_the_load_is_the_number_of_open_requests(server: Server) -> None:
    """Up and down again."""
    with server.begin({"prompt": [99, 12], "max_tokens": 500, "ignore_eos": True}):
        eventually(lambda: server.http.get("/load").json() == {"server_load": 1})
    eventually(lambda: server.http.get("/load").json() == {"server_load": 0})


# ---- the dashboard ----


def queries() -> list[str]:
    """Every query of the dashboard."""
    dashboard = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def test_the_dashboard_asks_for_what_there_is(server: Server) -> None:
    """Every metric that a query names is one that /metrics renders."""
    rendered = {re.split(r"[{ ]", line)[0] for line in server.http.get("/metrics").text.splitlines() if line[0] != "#"}
    asked = {name for query in queries() for name in re.findall(r"\b(?:vllm|hopon)_\w+", query)}
    assert len(queries()) >= 15
    assert asked <= rendered, asked - rendered


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no prometheus on the path")
def test_a_real_prometheus_answers_every_query(server: Server, tmp_path: Path) -> None:
    """It scrapes the server and evaluates each query of the dashboard without an error."""
    server.complete("x", max_tokens=3)
    target = httpx.URL(server.url)
    scrape = {"job_name": "hopon", "scrape_interval": "1s", "static_configs": [{"targets": [target.netloc.decode()]}]}
    (tmp_path / "prometheus.yml").write_text(json.dumps({"scrape_configs": [scrape]}))  # JSON is YAML
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", verify=False) as http:

            def ask(query: str) -> dict[str, Any]:
                answer: dict[str, Any] = http.get("/api/v1/query", params={"query": query}).json()
                return answer

            def scraped() -> bool:
                try:
                    return bool(ask("count_over_time(hopon_steps_total[1m]) > 2")["data"]["result"])
                except (httpx.ConnectError, ValueError):  # it is starting
                    return False

            eventually(scraped, patience=40)
            for query in queries():
                answer = ask(query.replace("$__rate_interval", "1m"))
                assert answer["status"] == "success", (query, answer)
            assert ask("sum(hopon_seats)")["data"]["result"][0]["value"][1] == "64"
            assert ask("rate(broken")["status"] == "error"
    finally:
        process.terminate()
        process.wait()
