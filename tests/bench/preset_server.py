"""hopon's own scheduler under any preset, behind a scripted server in virtual time."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from hopon.core.config import SchedulerConfig
from hopon.core.engine import Abort, Command, Engine
from hopon.core.policy.presets import make_preset
from hopon.core.scheduler import Scheduler
from hopon.core.types import Delta, Request, SamplingParams
from hopon.testing import LedgerExecutor
from tests.bench.virtual import Call, Server


class _LoopClock:
    def now(self) -> float:
        return asyncio.get_running_loop().time()


class PresetServer:
    """A server whose steps take ``step`` seconds each. Must be closed."""

    def __init__(
        self, preset: str, knobs: dict[str, str], *, seats: int = 16, step: float = 0.01, whole: bool = False
    ) -> None:
        made = make_preset(preset, knobs)
        settings = {
            "num_blocks": 4096,
            "block_size": 16,
            "max_model_len": 1024,
            "max_num_seqs": seats,
            "max_num_batched_tokens": 256,
        }
        config = SchedulerConfig(**settings | dict(made.settings(1024)))  # type: ignore[arg-type]
        executor = LedgerExecutor(config.num_blocks, config.block_size, num_host_blocks=config.num_host_blocks)
        self._engine = Engine(Scheduler(config, made.policy(config)), executor, clock=_LoopClock())
        self._step = step
        self._whole = whole
        self._commands: list[Command] = []
        self._news: dict[str, asyncio.Queue[Delta]] = {}
        self._count = 0
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        self.server = Server(self._answer)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            patience = self._engine.patience()
            if patience != 0.0 and not self._commands:
                self._wake.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), patience)
            await asyncio.sleep(self._step)
            commands, self._commands = self._commands, []
            for delta in self._engine.step(commands):
                if delta.request_id in self._news:
                    self._news[delta.request_id].put_nowait(delta)

    async def _answer(self, call: Call) -> None:
        body = call.body
        self._count += 1
        name = str(self._count)
        self._news[name] = asyncio.Queue()
        request = Request(
            request_id=name,
            prompt=tuple(body["prompt"]),
            params=SamplingParams(temperature=0.0, max_tokens=body["max_tokens"], ignore_eos=True),
            seed=1,
            arrival=call.arrived,
        )
        self._tell(request)
        count = 0
        ended = False
        try:
            while not ended:
                delta = await self._news[name].get()
                count += len(delta.tokens)
                ended = delta.finish is not None
                if delta.tokens and not self._whole:
                    call.text("x" * len(delta.tokens))
            if self._whole:
                call.text("x" * count)
            call.end(count)
        finally:
            del self._news[name]
            if not ended:
                self._tell(Abort(name))

    def _tell(self, command: Command) -> None:
        self._commands.append(command)
        self._wake.set()
