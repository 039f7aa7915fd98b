"""What a run was: everything that must be equal, or be known to differ, before two runs are compared."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

import hopon
from hopon.bench.sampling import read_settings
from hopon.bench.schedule import Schedule
from hopon.bench.target import Client, Target
from hopon.metrics import Distribution
from hopon.workload.ask import Piece

INCIDENTAL = frozenset({"date", "command", "url", "salt"})
"""Fields that differ between any two runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A run's circumstances.

    Args:
        date: when it began, UTC.
        command: how it was asked for.
        url: of the server.
        model: as asked for.
        server: name and version of the server where it tells.
        settings: of the server where it tells.
        serve_flags: of a hopon that was started for the run.
        client: version of this load generator.
        client_machine: processor, cores, memory of the client.
        server_hardware: as declared; empty where the client does not know.
        endpoint: completions or chat.
        workload: what was asked.
        load: how it was sent.
        requests: how many.
        input_tokens: asked for, where they are made up.
        output_tokens: asked for.
        seed: of all that is drawn.
        cache: cold or warm, as declared: are prompts new to the server?
        salt: what made-up prompts depend on.
        fields: of every request.
        slo: what was promised.
        capacity: of a provider, as declared: shared or reserved.
    """

    date: str
    command: str
    url: str
    model: str
    server: str
    settings: Mapping[str, str]
    serve_flags: Sequence[str]
    client: str
    client_machine: str
    server_hardware: str
    endpoint: str
    workload: str
    load: str
    requests: int
    input_tokens: Mapping[str, Any]
    output_tokens: Mapping[str, Any]
    seed: int
    cache: str
    salt: str
    fields: Mapping[str, Any]
    slo: str
    capacity: str = field(default="")


@dataclass(frozen=True, kw_only=True, slots=True)
class Declared:
    """What only the user can say of a run; see Manifest."""

    command: str = ""
    load: str = ""
    seed: int = 0
    cache: str = "cold"
    slo: str = ""
    serve_flags: tuple[str, ...] = ()
    server_hardware: str = ""
    capacity: str = ""


async def describe(target: Target, schedule: Schedule, declared: Declared) -> Manifest:
    """Ask the server who it is, and put down the rest."""
    client = Client(target, 0.0)
    page = await client.get("/metrics")
    server = await _version(client)
    client.close()
    turns = [turn for session in schedule.sessions for turn in session.turns]
    sizes = [
        sum(piece.count for piece in turn.content if isinstance(piece, Piece))
        for turn in turns
        if not isinstance(turn.content, str)
    ]
    limits = [turn.max_tokens for turn in turns if turn.max_tokens is not None]
    return Manifest(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=declared.command,
        url=target.base,
        model=target.model,
        server=server,
        settings=read_settings(page or b""),
        serve_flags=declared.serve_flags,
        client=f"hopon {hopon.__version__}",
        client_machine=machine(),
        server_hardware=declared.server_hardware,
        endpoint="chat" if target.chat else "completions",
        workload=schedule.name,
        load=declared.load,
        requests=len(turns),
        input_tokens=asdict(Distribution.of([size for size in sizes if size])),
        output_tokens=asdict(Distribution.of(limits)),
        seed=declared.seed,
        cache=declared.cache,
        salt=schedule.writer.salt,
        fields={"temperature": target.temperature, "ignore_eos": target.ignore_eos, **target.fields},
        slo=declared.slo,
        capacity=declared.capacity,
    )


async def _version(client: Client) -> str:
    """Who owns the models, and /version; else what the OpenAPI document of FastAPI servers says."""
    version = await _read(client, "/version", "version")
    if isinstance(version, str):
        models = await _read(client, "/v1/models", "data")
        owner = models[0].get("owned_by", "") if isinstance(models, list) and models else ""
        return f"{owner} {version}".strip()
    info = await _read(client, "/openapi.json", "info")
    return " ".join(str(info.get(key, "")) for key in ("title", "version")).strip() if isinstance(info, dict) else ""


async def _read(client: Client, path: str, key: str) -> Any:
    """A member of a JSON object; None where there is none."""
    page = await client.get(path)
    try:
        return msgspec.json.decode(page)[key] if page else None
    except (msgspec.DecodeError, LookupError, TypeError):
        return None


def machine() -> str:
    """Processor, how many of its cores may be used, memory."""
    name = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            name = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Where two manifests differ in what matters, a line each."""
    found = []
    for name in sorted((one.keys() | other.keys()) - INCIDENTAL):
        left, right = one.get(name), other.get(name)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += [
                f"{name}.{key}: {left.get(key)!r} and {right.get(key)!r}"
                for key in sorted(left.keys() | right.keys())
                if left.get(key) != right.get(key)
            ]
        elif left != right:
            found.append(f"{name}: {left!r} and {right!r}")
    return found
