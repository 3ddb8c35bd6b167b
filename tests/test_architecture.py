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

# Lower layers never import higher ones.
LAYERS = [
    {"errors", "paths"},
    {"hub"},
    {"types"},
    {"core"},
    {"engine.protocol", "metrics", "registry", "gguf"},
    {"engine", "drafters"},
    {"decode", "check", "exact", "source", "models_file"},
    {"text"},
    {
        "machine",
        "plan",
        "generation",
        "pair",
        "opening",
        "study",
        "calibration",
        "make",
        "testing",
    },
    {"render"},
    {"cli"},
    {"__main__"},
]


def layer(module: str) -> int:
    """The layer of a module, by its longest named prefix."""
    parts = module.split(".")
    for n in range(len(parts), 0, -1):
        for place, names in enumerate(LAYERS):
            if ".".join(parts[:n]) in names:
                return place
    raise AssertionError(f"{module} is in no layer")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def ids(path: Path) -> str:
    return name_of(path)


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_imports_go_down(path: Path) -> None:
    name = name_of(path)
    if name == "__init__":
        return
    for target in imports(path):
        if not target.startswith("qdraft."):
            continue
        other = target.removeprefix("qdraft.")
        if other == "__version__":
            continue
        same = other.split(".")[0] == name.split(".")[0]
        assert same or layer(other) < layer(name) or layer(other) == layer(name), (
            f"{name} imports {other}"
        )


@pytest.mark.parametrize(
    ("library", "home"),
    [("llama_cpp", "engine"), ("rich", "render"), ("typer", "cli"), ("gguf", ("engine", "gguf"))],
)
def test_libraries_stay_in_their_place(library: str, home: str | tuple[str, ...]) -> None:
    for path in FILES:
        name = name_of(path)
        if any(target.split(".")[0] == library for target in imports(path)):
            assert name.startswith(home), f"{name} imports {library}"


@pytest.mark.parametrize(
    "path",
    [f for f in FILES if name_of(f).startswith(("core", "drafters", "decode", "metrics", "types"))],
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
        ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Name, ast.Attribute))
    }
    assert not {u for u in used if u == "print" or u.startswith("np.random.")} - {
        "np.random.Generator", "np.random.PCG64",
    }  # fmt: skip


def test_engine_does_not_know_the_loop() -> None:
    for path in (PACKAGE / "engine").glob("*.py"):
        for target in imports(path):
            assert not target.startswith(("qdraft.core", "qdraft.drafters", "qdraft.decode"))


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


def test_the_loop_fits_one_screen() -> None:
    tree = ast.parse((PACKAGE / "decode.py").read_text(encoding="utf-8"))
    loop = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "decode")
    assert loop.end_lineno is not None
    assert loop.end_lineno - loop.lineno < 85


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_modules_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 300
