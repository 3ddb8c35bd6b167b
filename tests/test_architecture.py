"""The rules of design: who may import what, and what must not be used where."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import qdraft

PACKAGE = Path(qdraft.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
ROOT = Path(__file__).parent.parent
ALL_FILES = FILES + sorted(
    f for folder in ("tests", "benchmarks", "examples") for f in (ROOT / folder).rglob("*.py")
)

# A module imports from lower layers and from its own package, never from a package beside it.
LAYERS = [
    {"cgroups", "errors", "paths"},
    {"disk", "text_file"},
    {"decoding"},
    {"constraints", "gguf", "host"},
    {"llama"},
    {"pairs", "placement"},
    {"session"},
    {"chat", "making"},
    {"serve", "study"},
    {"render"},
    {"cli"},
    {"__main__"},
]
TOP = {"__init__", "__main__", "cgroups", "disk", "errors", "host", "paths", "testing", "text_file"}


def layer(module: str) -> int:
    """The layer of a module or a package."""
    top = module.split(".")[0]
    for place, names in enumerate(LAYERS):
        if top in names:
            return place
    raise AssertionError(f"{module} is in no layer")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> list[str]:
    imported = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported += [f"{node.module}.{alias.name}" for alias in node.names]
    return imported


def ids(path: Path) -> str:
    if path.is_relative_to(PACKAGE):
        return name_of(path)
    return path.relative_to(ROOT).as_posix()


def upward(name: str, targets: list[str]) -> list[str]:
    """Those imports of a module that do not go down."""
    own = name.split(".")[0]
    return [
        target
        for target in targets
        if target.startswith("qdraft.")
        and (other := target.split(".")[1]) not in (own, "__version__")
        and layer(other) >= layer(own)
    ]


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_imports_go_down(path: Path) -> None:
    name = name_of(path)
    if name in ("__init__", "testing"):  # the public names, and fakes of every layer
        return
    assert not upward(name, imports(path))


@pytest.mark.parametrize("place", range(1, len(LAYERS)))
def test_every_layer_can_fail(place: int) -> None:
    """A module of the layer below that imported this one would be seen, and so would a neighbour."""
    above, below = sorted(LAYERS[place])[0], sorted(LAYERS[place - 1])[0]
    assert upward(f"{below}.module", [f"qdraft.{above}.other"])
    assert not upward(f"{above}.module", [f"qdraft.{below}.other"])
    for neighbour in LAYERS[place] - {above}:
        assert upward(f"{above}.module", [f"qdraft.{neighbour}.other"])


def imported_modules(path: Path, names: set[str]) -> set[str]:
    """Those modules of ``names`` that a file imports when it is run."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    modules = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node in for_types:
            continue
        if node.module and node.module.startswith("qdraft"):
            module = node.module.removeprefix("qdraft.")
            members = {f"{module}.{alias.name}".removeprefix("qdraft.") for alias in node.names}
            modules |= {member if member in names else module for member in members}
    return modules & names


def test_few_modules_at_the_top() -> None:
    assert {name_of(f) for f in FILES if f.parent == PACKAGE and f.name != "__init__.py"} <= TOP


def test_no_import_cycles() -> None:
    """Between modules, also by imports inside functions; those under TYPE_CHECKING aside."""
    names = {name_of(f) for f in FILES}
    arrows = {name_of(f): imported_modules(f, names) for f in FILES}
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"cycle: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for other in sorted(arrows[name]):
                walk(other, (*path, name))
            done.add(name)

    for name in sorted(names):
        walk(name, ())


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("llama_cpp", "llama"),
        ("rich", "render"),
        ("typer", "cli"),
        ("prompt_toolkit", "cli"),
        ("gguf", ("llama", "gguf")),
        ("llguidance", "constraints"),
        ("starlette", "serve"),
        ("uvicorn", "serve"),
    ],
)
def test_libraries_stay_in_their_place(library: str, home: str | tuple[str, ...]) -> None:
    for path in FILES:
        name = name_of(path)
        if any(target.split(".")[0] == library for target in imports(path)):
            assert name.startswith(home), f"{name} imports {library}"


@pytest.mark.parametrize(
    "path",
    [f for f in FILES if name_of(f).startswith("decoding")],
    ids=ids,
)
def test_no_clock_print_environment_or_global_randomness(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not {t.split(".")[0] for t in imports(path)} & {
        "time",
        "os",
        "random",
        "secrets",
        "datetime",
        "sys",
    }
    used = {
        ast.unparse(node).split("(")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Name, ast.Attribute))
    }
    assert not {u for u in used if u == "print" or u.startswith("np.random.")} - {
        "np.random.Generator",
        "np.random.PCG64",
    }


def test_product_code_does_not_import_testing() -> None:
    assert not [f for f in FILES if "qdraft.testing" in " ".join(imports(f))]


def test_importing_the_package_does_not_load_the_native_library() -> None:
    code = "import sys, qdraft; sys.exit('llama_cpp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_exist_and_are_documented() -> None:
    assert len(set(qdraft.__all__)) == len(qdraft.__all__)
    for name in qdraft.__all__:
        assert getattr(qdraft, name).__doc__, name
    with pytest.raises(AttributeError):
        qdraft.nothing  # noqa: B018 (the access is the test)


def test_the_loop_fits_one_screen_and_names_its_stages() -> None:
    source = (PACKAGE / "decoding" / "loop.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    decoding = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Decoding")
    step = next(n for n in decoding.body if isinstance(n, ast.FunctionDef) and n.name == "step")
    assert step.end_lineno is not None
    assert step.end_lineno - step.lineno < 60
    body = "\n".join(source.splitlines()[step.lineno : step.end_lineno])
    stages = ("# Draft ", "# Verify: ", "# Accept ", "# Cut ", "# Commit: ")
    places = [body.index(stage) for stage in stages]
    assert places == sorted(places)


WORDS = {"found", "one", "told"}  # names that say nothing of what they hold


@pytest.mark.parametrize("path", ALL_FILES, ids=ids)
def test_names_say_what_they_hold(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    stored = {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    arguments = {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    assert not (stored | arguments | functions) & WORDS


@pytest.mark.parametrize("path", ALL_FILES, ids=ids)
def test_the_formatter_is_never_switched_off(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not [switch for switch in ("skip", "off") if f"fmt: {switch}" in text]


def test_importing_the_package_is_quick() -> None:
    """It takes 0.1 s or less; what makes an import slow is one of these libraries."""
    slow = (
        "llama_cpp",
        "statistics",
        "rich",
        "typer",
        "gguf",
        "ruamel",
        "huggingface_hub",
        "matplotlib",
        "jinja2",
    )
    code = f"import sys, qdraft; sys.exit(bool(set(sys.modules) & set({slow!r})))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
