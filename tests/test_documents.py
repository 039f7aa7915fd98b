"""README and docs say what the programs say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

from hopon.cli import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def commands() -> dict[str, Any]:
    """By name; their parameters have ``opts``, ``secondary_opts`` and ``default``."""
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def flags(command: Any) -> dict[str, Any]:
    """Parameters by each of their flags."""
    return {flag: option for option in command.params for flag in (*option.opts, *option.secondary_opts)}


def test_every_flag_of_serve_is_in_a_table() -> None:
    """README and the page on operations have them all, and nothing else."""
    text = "".join((ROOT / name).read_text() for name in ("README.md", "docs/operations.md"))
    serve = commands()["serve"]
    options = [[*option.opts, *option.secondary_opts] for option in serve.params if option.opts[0].startswith("--")]
    assert len(options) > 30
    assert not [names for names in options if not any(f"`{name}" in text for name in names)]
    knobs = re.findall(r"^\| (`--.+?) \|", text, re.MULTILINE)
    assert set(re.findall(r"`(--[a-z-]+)`", " ".join(knobs))) <= set(flags(serve))


def test_defaults_in_the_readme_are_those_of_the_command() -> None:
    """Where the command has a plain default of its own, its row in the table shows it."""
    for names, shown in re.findall(r"^\| (`--.+?) \| (.+?) \|", (ROOT / "README.md").read_text(), re.MULTILINE):
        options = [flags(commands()["serve"])[name] for name in re.findall(r"`(--[a-z-]+)`", names)]
        expected = [option.default for option in options if isinstance(option.default, str | int | float)]
        values = [part.strip() for part in shown.split(",")]
        assert [str(value) for value in expected] == values[: len(expected)], names


def test_commands_in_the_documents_exist() -> None:
    """Every ``hopon COMMAND --flag`` of a block of shell lines is one that the program knows."""
    known = commands()
    for path in DOCUMENTS:
        blocks = "\n".join(re.findall(r"^```sh$(.+?)^```$", path.read_text(), re.MULTILINE | re.DOTALL))
        for line in re.findall(r"^(?:\$ )?hopon ([a-z].*)$", blocks.replace("\\\n", " "), re.MULTILINE):
            words = line.split("#")[0].split()
            assert words[0] in known, (path.name, line)
            outside = re.sub(r"\"[^\"]*\"|'[^']*'", "", line.split("#")[0])  # flags within quotes are another command's
            for flag in re.findall(r"(?<=\s)--[a-z-]+", outside):
                assert flag in flags(known[words[0]]) or flag == "--help", (path.name, line, flag)


def test_links_lead_somewhere() -> None:
    """Files and sections that documents point to exist."""
    for path in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?://)([^)]+)\)", path.read_text()):
            name, _, section = target.partition("#")
            file = (path.parent / name) if name else path
            assert file.exists(), (path.name, target)
            if section:
                heads = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
                anchors = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
                assert section in anchors, (path.name, target)
