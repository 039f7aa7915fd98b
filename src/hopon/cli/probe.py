"""``hopon probe``: its flags. What it does is in :mod:`hopon.bench.probe`."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

from hopon.cli.load_flags import Endpoint, Header, ModelName, ServeFlags, Timeout
from hopon.cli.target import served


def probe(
    server: Annotated[str, typer.Argument(help="A server's address, or a model that hopon then serves itself.")],
    streams: Annotated[int, typer.Option(help="Long streams that saturate the server.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of the shortest; the longest has four times as many.")] = 64,
    endpoint: Annotated[Endpoint, typer.Option(help="Completions or chat.")] = Endpoint.COMPLETIONS,
    text: Annotated[bool, typer.Option("--text", help="Prompts as text, not as token ids; chats always are.")] = False,
    vocab_size: Annotated[int, typer.Option(help="Made-up token ids are below this.")] = 10_000,
    model_name: ModelName = "",
    header: Header = None,
    timeout: Timeout = 120.0,
    serve_flags: ServeFlags = "",
) -> None:
    """Is this server batching continuously? Long streams saturate it, short requests show when they are let in."""
    from hopon.bench import command
    from hopon.bench.probe import Verdict
    from hopon.bench.probe import probe as find_out

    is_chat = endpoint is Endpoint.CHAT
    writer = command.make_writer(command.Asked(concurrency=1, as_text=text or is_chat, vocab_size=vocab_size))
    with served(server, serve_flags, header, {"model": model_name, "chat": is_chat, "timeout": timeout}) as target:

        async def work(stop: asyncio.Event) -> Verdict | None:
            probing = asyncio.create_task(
                find_out(await command.named(target), writer, num_streams=streams, tokens=tokens)
            )
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({probing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if probing.done():
                return probing.result()
            probing.cancel()
            return None

        verdict: Verdict | None = command.run(work)
    if verdict is None:
        sys.exit(130)
    print(verdict.text())
