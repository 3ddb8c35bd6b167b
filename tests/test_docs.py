"""What the documents say is true of the code."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.main import get_command

import qdraft
from qdraft.cli.main import app
from qdraft.cli.spellings import SPELLINGS

TOP = Path(__file__).parent.parent
README = (TOP / "README.md").read_text(encoding="utf-8")
DOCUMENTS = sorted([*TOP.glob("*.md"), *(TOP / "docs").rglob("*.md")])
WIDTH = 100
# Where an option may have the name that it had before.
HISTORY = ("CHANGELOG.md", "docs/reference/environment.md")
# Options of pip, pytest, llama.cpp's tools and benchmarks/ that the documents name.
LONG_OPTION = re.compile(r"(?<![\w#-])--[a-z][a-z-]*")
FOREIGN = {
    "--force-reinstall",
    "--no-cache-dir",
    "--no-deps",
    "--models-preset",
    "--no-repack",
    "--page",
    "--quick",
    "--spec-draft-model",
    "--spec-draft-n-max",
    "--spec-draft-n-min",
    "--spec-draft-p-min",
    "--spec-type",
}


def relative(path: Path) -> str:
    return path.relative_to(TOP).as_posix()


every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=relative)


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Every fenced block of a document: its language and its lines."""
    for match in re.finditer(r"^ *```(\w*)\n(.*?)^ *```$", text, re.M | re.S):
        yield match[1], match[2]


def without_blocks(text: str) -> str:
    return re.sub(r"^ *```\w*\n.*?^ *```$", "", text, flags=re.M | re.S)


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object of a schema, itself first."""
    if isinstance(schema, dict):
        yield schema
    for part in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(part, (dict, list)):
            yield from subschemas(part)


def commands() -> dict[str, Any]:
    """Every command by its words, for example "run" and "models add"."""
    top: dict[str, Any] = dict(get_command(app).commands)  # type: ignore[attr-defined]
    nested = {
        f"{name} {inner}": command
        for name, group in top.items()
        for inner, command in getattr(group, "commands", {}).items()
    }
    return {**top, **nested}


def options(command: Any) -> set[str]:
    """The options that the help of a command shows."""
    shown = {
        name
        for parameter in command.params
        if not getattr(parameter, "hidden", False)
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    return {*shown, "--help", "-h"}


COMMANDS = commands()
OPTIONS = set().union(*map(options, COMMANDS.values()), {"--version"})


def command_lines(text: str) -> Iterator[tuple[str, list[str]]]:
    """Every command line of qdraft in code: the name of the command and the words after it."""
    code = [line for _, block in blocks(text) for line in block.replace("\\\n", " ").splitlines()]
    code += re.findall(r"`([^`\n]+)`", without_blocks(text))
    for line in code:
        for part in line.removeprefix("$ ").split(" && "):
            if not part.startswith("qdraft "):
                continue
            words = shlex.split(part.split(" > ")[0], comments=True)[1:]
            if " ".join(words[:2]) in COMMANDS:
                yield " ".join(words[:2]), words[2:]
            elif words[0] != "COMMAND":
                yield words[0], words[1:]


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", without_blocks(path.read_text(encoding="utf-8")), re.M)
    return {slug(heading) for heading in headings}


def test_every_package_and_module_is_in_the_file_map() -> None:
    for path in (TOP / "qdraft").iterdir():
        if not path.name.startswith("_"):
            assert re.search(rf"^  {re.escape(path.name)}/?\s", README, re.M), path.name


def test_everything_in_the_file_map_is_there() -> None:
    file_map = README.split("## File map")[1].split("```")[1]
    for line in filter(None, file_map.splitlines()):
        folder = TOP / "qdraft" if line.startswith("  ") else TOP
        assert (folder / line.split()[0]).exists(), line


def test_every_command_is_in_the_table() -> None:
    for name in COMMANDS:
        if " " not in name:
            summary = COMMANDS[name].help.strip().split("\n")[0]
            assert f"| `qdraft {name}` | {summary} |" in README


SCHEMAS = sorted((TOP / "docs/schema").glob("*.json"))
every_schema = pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.stem)


@every_schema
def test_schemas_are_valid(path: Path) -> None:
    """Each is linked in the reference, and allows no key that it does not name."""
    schema = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    reference = (TOP / "docs/reference/json.md").read_text(encoding="utf-8")
    assert f"(../schema/{path.name})" in reference
    for part in subschemas(schema):
        if "properties" in part:
            assert part["additionalProperties"] is False, part
            assert set(part["required"]) <= part["properties"].keys()


@every_schema
def test_every_key_of_a_schema_is_described(path: Path) -> None:
    """By itself, or where it is defined."""
    schema = json.loads(path.read_text(encoding="utf-8"))
    for part in subschemas(schema):
        for key, of_key in part.get("properties", {}).items():
            defined = schema["$defs"][of_key["$ref"].split("/")[-1]] if "$ref" in of_key else {}
            about = of_key.get("description") or defined.get("description", "")
            assert about, key


def test_the_changelog_names_this_version() -> None:
    assert f"## {qdraft.__version__}" in (TOP / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_pages_of_the_example_study_need_nothing_beside_themselves() -> None:
    pages = sorted((TOP / "examples/study").glob("*.html"))
    assert [page.stem for page in pages] == ["bench", "ladder", "tune"]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert "<script" not in text
        assert not re.findall(r'\b(?:src|href)="(?!#)', text)
        assert json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))


def test_reference_pages_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """`python docs/reference/build.py` writes them again."""
    path = TOP / "docs/reference/build.py"
    spec = importlib.util.spec_from_file_location("build_reference", path)
    assert spec
    assert spec.loader
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    assert build.main(["--check"]) == 0, capsys.readouterr().err


@every_document
def test_links_lead_somewhere(path: Path) -> None:
    text = without_blocks(path.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        name, _, anchor = target.partition("#")
        other = path.parent / name if name else path
        assert other.exists(), target
        if anchor:
            assert anchor in anchors(other), target


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("Measure a pair", "measure-a-pair"),
        ("What fits: `qdraft plan`", "what-fits-qdraft-plan"),
        ("`--exact`", "--exact"),
        ("See [this](that.md)", "see-this"),
    ],
)
def test_anchors_are_those_of_github(heading: str, anchor: str) -> None:
    assert slug(heading) == anchor


def test_every_document_is_in_the_index() -> None:
    index = (TOP / "docs/README.md").read_text(encoding="utf-8")
    reference = TOP / "docs/reference/README.md"
    listed = reference.read_text(encoding="utf-8") if reference.exists() else ""
    for path in (TOP / "docs").rglob("*.md"):
        name = path.relative_to(TOP / "docs").as_posix()
        is_listed = path.parent.name == "reference" and f"({path.name})" in listed
        assert name == "README.md" or f"({name})" in index or is_listed, name


@every_document
def test_every_option_exists(path: Path) -> None:
    """Whatever looks like a long option, in text or code; old names only in the history."""
    text = path.read_text(encoding="utf-8")
    if not relative(path).startswith(HISTORY):
        named = set(LONG_OPTION.findall(text))
        spellings = [*SPELLINGS, *(each.option for each in SPELLINGS.values())]
        others = set(LONG_OPTION.findall(" ".join(spellings)))
        assert named <= OPTIONS | FOREIGN | (others if path.name == "llama-cpp.md" else set())


@every_document
def test_every_command_line_is_one_of_qdraft(path: Path) -> None:
    """The command exists and has these options, the short ones too."""
    for name, words in command_lines(path.read_text(encoding="utf-8")):
        assert name in COMMANDS, name
        for word in words:
            if re.match(r"--?[a-z]", word) and word not in FOREIGN:
                assert word.split("=")[0] in options(COMMANDS[name]), f"{name} {word}"


def test_command_lines_are_found() -> None:
    text = "Run `qdraft plan --vram 12G` or\n```\n$ qdraft run -m A \\\n  -n 3 && qdraft models list\n```\n"
    assert list(command_lines(text)) == [
        ("run", ["-m", "A", "-n", "3"]),
        ("models list", []),
        ("plan", ["--vram", "12G"]),
    ]
    assert not {"--verify", "--nothing"} & OPTIONS


@every_document
def test_lines_fit(path: Path) -> None:
    """In the text; a table and a block of code may be wider."""
    for line in without_blocks(path.read_text(encoding="utf-8")).splitlines():
        assert len(line) <= WIDTH or line.startswith("|"), line


PYTHON = [
    pytest.param(block, id=f"{relative(path)}-{i}")
    for path in DOCUMENTS
    for i, (language, block) in enumerate(blocks(path.read_text(encoding="utf-8")))
    if language == "python" and "openai" not in block  # tests/test_serve_real.py runs that
]


def test_python_is_found() -> None:
    assert PYTHON


@pytest.mark.parametrize("code", PYTHON)
def test_public_names_in_python_exist(code: str) -> None:
    """Imports, attributes of qdraft, and the keywords of calls of them."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "qdraft":
            assert node.attr in qdraft.__all__
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("qdraft."):
            called = getattr(qdraft, ast.unparse(node.func).removeprefix("qdraft."))
            keywords = {keyword.arg for keyword in node.keywords if keyword.arg}
            assert keywords <= set(inspect.signature(called).parameters)


@pytest.mark.real
@pytest.mark.parametrize("code", PYTHON)
def test_python_runs(
    code: str, smollm2: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the small draft of the demo model in place of the files that a document names."""
    open_pair = qdraft.open_pair
    draft = smollm2[1]

    def open_demo(*args: Any, **kwargs: Any) -> qdraft.Pair:
        inspect.signature(open_pair).bind(*args, **kwargs)
        return open_pair(target=draft, draft=draft, params=qdraft.EngineParams(n_ctx=512))

    monkeypatch.setattr(qdraft, "open_pair", open_demo, raising=False)
    exec(compile(code, "document", "exec"), {"__name__": "document"})


@every_schema
def test_every_json_key_is_in_the_reference(path: Path) -> None:
    """Those of the object itself; the machine's are described with the bench."""
    command = path.stem.split("-")[0]
    sections = (TOP / "docs/reference/json.md").read_text(encoding="utf-8").split("\n## ")
    text = " ".join(s for s in sections if s.split("\n")[0] in (command, "bench"))
    for key in json.loads(path.read_text(encoding="utf-8"))["properties"]:
        assert f"`{key}`" in text, key


def test_the_test_command_is_where_ci_looks_for_it() -> None:
    between = README.split("<!-- test-command -->")[1].split("<!-- end -->")[0]
    lines = [line for line in between.splitlines() if line and not line.startswith("```")]
    assert lines == [
        "export CMAKE_ARGS=-DGGML_RPC=ON PIP_CACHE_DIR=~/.cache/qdraft-rpc",
        "pip install '.[demo,test]' && pytest",
    ]
