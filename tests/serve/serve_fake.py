"""Runs a server as a process of its own: ``python -m tests.serve.serve_fake FOLDER JSON``.

It prints progress and, when it is ready, its address, each as a line of JSON. The argument holds fields of
ServerOptions, and of EngineOptions under "engine".
"""

from __future__ import annotations

import json
import sys

from hopon.core.config import EngineOptions
from hopon.serve.server import ReadyServer, ServerOptions, run_server


def announce(ready: ReadyServer) -> None:
    print(json.dumps({"url": ready.url, "curl": ready.curl(), "notices": ready.notices}), flush=True)


def progress(what: str, share: float) -> None:
    print(json.dumps({"what": what, "share": share}), flush=True)


if __name__ == "__main__":
    folder, fields = sys.argv[1], json.loads(sys.argv[2])
    engine = EngineOptions(model=folder, **fields.pop("engine", {}))
    options = ServerOptions(engine=engine, port=0, **{"factory": "tests.serve.fake:load", **fields})
    sys.exit(run_server(options, announce, progress))
