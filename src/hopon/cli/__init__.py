"""The ``hopon`` command: a module per command, which reads its flags and wires the parts together.

Imports of parts happen inside the commands, so that ``hopon --help`` is quick and ``hopon serve`` starts its engine
process before it loads anything else.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

import hopon
from hopon.cli import (
    bench,
    calibrate,
    capacity,
    compare,
    generate,
    lab,
    plan,
    policies,
    probe,
    pull,
    reproduce,
    serve,
    simulate,
    tune,
)

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
for _command in (
    bench.bench,
    probe.probe,
    capacity.capacity,
    plan.plan,
    tune.tune,
    simulate.simulate,
    calibrate.calibrate,
    policies.policies,
    reproduce.reproduce,
    lab.lab,
    pull.pull,
    serve.serve,
    compare.compare,
    generate.generate,
):
    app.command()(_command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"hopon {hopon.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Continuous batching for language models on CPUs."""


def main() -> None:
    """Run the command line; an error is one line on stderr and a non-zero status."""
    from hopon.catalogue import HashMismatchError, ModelNotFoundError

    sys.path.append(str(Path.cwd()))  # for policies of one's own, module:Class; last, so that nothing is shadowed
    try:
        app()
    except (ModelNotFoundError, HashMismatchError, ValueError, OSError) as error:
        sys.exit(f"hopon: {' '.join(str(error).split()) or type(error).__name__}")
