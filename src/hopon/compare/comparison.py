"""All contenders, one after another, and what they did side by side."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import hopon
from hopon.compare import table
from hopon.compare.contender import Contender, make_plan
from hopon.compare.run import Outcome, run
from hopon.core.config import EngineOptions
from hopon.core.plan import Deployment, ExecutorFactory, Report
from hopon.sim.timeline import Timeline
from hopon.workload.ask import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Outcomes of contenders on the same requests.

    Args:
        manifest: model, machine and workload.
        outcomes: of those that ran to the end, in the order asked for.
        missing: labels of those that did not, after Ctrl-C.
    """

    manifest: Mapping[str, Any]
    outcomes: Sequence[Outcome]
    missing: Sequence[str] = ()

    @property
    def differing(self) -> list[str]:
        """Requests that were served to their end by all, and not with the same tokens."""
        served: list[set[str]] = [
            {record.request_id for record in outcome.result.records if record.completed} for outcome in self.outcomes
        ]
        common = set.intersection(*served) if served else set()
        first = self.outcomes[0].outputs if self.outcomes else {}
        return sorted(
            (name for name in common if any(one.outputs[name] != first[name] for one in self.outcomes)), key=int
        )

    def to_json(self) -> str:
        """All of it."""
        content = {
            "hopon": "compare",
            "version": 1,
            "manifest": dict(self.manifest),
            "missing": list(self.missing),
            "differing_requests": self.differing,
            "policies": [
                {"label": one.label, "outputs_sha256": one.digest} | one.result.content() for one in self.outcomes
            ],
        }
        return json.dumps(content, indent=1) + "\n"

    def text(self) -> str:
        """For people, in at most 120 columns."""
        return table.text(self)


def compare(
    *,
    contenders: Sequence[Contender],
    given: Mapping[str, Any],
    workload: Workload,
    context_length: int,
    vocab_size: int,
    kv_tokens: int | None,
    host_tokens: int,
    factory: ExecutorFactory,
    report: Report,
    with_timelines: bool = False,
) -> Comparison:
    """Run every contender; all of them are checked before the first one runs. Ctrl-C returns what is done.

    Args:
        contenders: who.
        given: see :func:`make_plan`, as for the next four.
        workload: what.
        context_length: of the model.
        vocab_size: of the model, for prompts.
        kv_tokens: size of the KV cache.
        host_tokens: size of the host tier.
        factory: loads the model; executors are shared by contenders in a row whose settings are the same.
        report: hears what is being done, and which share of it is.
        with_timelines: note every step.

    Raises:
        ValueError: see :func:`make_plan` and :func:`run`.
        OSError: a file cannot be read.
    """
    plans = [
        make_plan(
            contender,
            given,
            workload,
            context_length=context_length,
            kv_tokens=kv_tokens,
            host_tokens=host_tokens,
        )
        for contender in contenders
    ]
    manifest: dict[str, Any] = {
        "version": hopon.__version__,
        "workload": "; ".join((f"{len(workload)} requests: {workload.name}", *workload.notes)),
        "input_tokens": sum(ask.input_tokens for ask in workload),
        "output_tokens": sum(workload.output_lengths),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
    outcomes: list[Outcome] = []
    deployment: Deployment | None = None
    loaded: EngineOptions | None = None
    try:
        for place, plan in enumerate(plans):

            def tell(what: str, share: float, place: int = place) -> None:
                report(f"{place + 1} of {len(plans)}, {what}", share)

            if deployment is None or loaded != plan.executor_options:
                if deployment is not None:
                    deployment.executor.close()
                deployment = None  # its memory is free before the next one asks for some
                deployment, loaded = factory(plan.executor_options, tell), plan.executor_options
            manifest["model"] = dict(deployment.summary)
            try:
                timeline = Timeline() if with_timelines else None
                outcomes.append(run(plan, deployment, workload, vocab_size, tell, timeline))
            except ValueError as error:
                raise ValueError(f"{plan.contender.label}: {error}") from error
    except KeyboardInterrupt:
        pass
    finally:
        if deployment is not None:
            deployment.executor.close()
    missing = [plan.contender.label for plan in plans[len(outcomes) :]]
    return Comparison(manifest=manifest, outcomes=outcomes, missing=missing)
