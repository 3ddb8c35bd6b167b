"""Write the reference pages of the commands: the help page of each, as a terminal of 80 columns
shows it without colour.

    python docs/reference/build.py           writes the pages beside this script
    python docs/reference/build.py --check   fails if a page is out of date

tests/test_docs.py runs the check.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import typer

from qdraft.cli.main import app
from qdraft.cli.spellings import spelling_tables

FOLDER = Path(__file__).parent
_MARK = "<!-- build.py writes this page. -->\n"
_TERMINAL = {"COLUMNS": "80", "TERMINAL_WIDTH": "80", "NO_COLOR": "1", "TERM": "dumb"}
_INDEX = """\
# Reference

- [Exit codes, files and environment variables](environment.md)
- [models.yaml](models-yaml.md)
- [JSON](json.md)
- [Options of llama.cpp](llama-cpp.md)

## Commands

| command | |
|---|---|
"""
_FORCING = ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS")


def build_pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    command = typer.main.get_command(app)
    pages = {}
    commands: list[tuple[str, str]] = []
    for name, help_page in _help_pages(command, "qdraft"):
        pages[_file_name(name)] = f"{_MARK}# {name}\n\n```\n{help_page}```\n"
        commands.append((name, _first_paragraph(help_page)))
    pages["llama-cpp.md"] = _MARK + _spellings_page()
    rows = "".join(f"| [`{name}`]({_file_name(name)}) | {text} |\n" for name, text in commands)
    pages["README.md"] = f"{_MARK}{_INDEX}{rows}"
    return pages


_SPELLINGS = (
    """\
# Options of llama.cpp

A command line of llama-cli, llama-completion, llama-speculative or llama-server may be pasted after
`qdraft run`. Options that are not in this page have the same name in qdraft. An underscore is a
dash, as there, and `-fa` without a value is `-fa on`.

## The same under another name

| llama.cpp | qdraft |
|---|---|
""",
    """
## Not needed

qdraft leaves these out, and says so in one line.

| llama.cpp | why |
|---|---|
""",
    """
## Missing

qdraft refuses these in one line, unless their value asks for nothing, for example `--mirostat 0`.

| llama.cpp | what to do |
|---|---|
""",
)


def _spellings_page() -> str:
    """The page of llama.cpp's options."""
    page = ""
    for head, table in zip(_SPELLINGS, spelling_tables(), strict=True):
        page += head
        for text, names in table.items():
            shown = f"`{text}`" if text.startswith("--") else text.replace("|", "\\|")
            page += f"| {' '.join(f'`{name}`' for name in names)} | {shown} |\n"
    return page


def _file_name(name: str) -> str:
    return f"{name.removeprefix('qdraft ').replace(' ', '-')}.md"


def _help_pages(command: object, name: str) -> Iterator[tuple[str, str]]:
    """The name and the help page of each command below this one."""
    for child_name, child in getattr(command, "commands", {}).items():
        whole = f"{name} {child_name}"
        yield whole, _help_page(whole)
        yield from _help_pages(child, whole)


def _help_page(name: str) -> str:
    program, *args = name.split()
    environment = {key: x for key, x in os.environ.items() if key not in _FORCING}
    out = StringIO()
    with (
        patch.dict(os.environ, {**environment, **_TERMINAL}, clear=True),
        patch("typer.rich_utils.MAX_WIDTH", 80),
        patch("typer.rich_utils.FORCE_TERMINAL", None),
        redirect_stdout(out),
    ):
        app([*args, "--help"], prog_name=program, standalone_mode=False)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return "\n".join(lines).strip("\n") + "\n"


def _first_paragraph(help_page: str) -> str:
    """What a command does: the paragraph after the usage line."""
    return " ".join(help_page.split("\n\n")[1].split())


def _written_pages() -> list[Path]:
    """The pages that are there and were written by this script."""
    pages = sorted(FOLDER.glob("*.md"))
    return [path for path in pages if path.read_text("utf-8").startswith(_MARK)]


def main(args: list[str]) -> int:
    """Write the pages, or compare them with what they should be; return the exit code."""
    pages = build_pages()
    if args == ["--check"]:
        stale = [
            name
            for name, text in pages.items()
            if not (FOLDER / name).exists() or (FOLDER / name).read_text("utf-8") != text
        ]
        stale += [path.name for path in _written_pages() if path.name not in pages]
        for name in stale:
            print(f"docs/reference/{name} is out of date", file=sys.stderr)
        return 1 if stale else 0
    for path in _written_pages():
        path.unlink()
    for name, text in pages.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
