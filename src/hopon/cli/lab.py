"""``hopon lab``: its flags, and files with the same picture."""

from __future__ import annotations

from typing import Annotated

import typer


def lab(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8100,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
) -> None:
    """See batching happen: a local page that plays requests through several systems, pass by pass."""
    import socket
    import threading
    import webbrowser

    import uvicorn

    from hopon.lab.app import create_app

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        name = f"[{host}]" if ":" in host else host
        url = f"http://{name}:{listener.getsockname()[1]}/"
        print(f"hopon lab: {url} (Ctrl-C ends it)", flush=True)
        if open_browser:
            threading.Timer(0.5, webbrowser.open, [url]).start()
        server = uvicorn.Server(uvicorn.Config(create_app(), log_level="warning", lifespan="off"))
        server.run(sockets=[listener])
