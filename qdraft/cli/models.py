"""`qdraft models`: the pairs that are known by name, and the files that could become some."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from qdraft.cli import options as opt
from qdraft.errors import PairError, UsageError
from qdraft.gguf.facts import Facts, read_facts
from qdraft.gguf.pairing import INCOMPATIBLE, compare
from qdraft.pairs import editing as file_of_models
from qdraft.pairs import hub, registry
from qdraft.pairs.registry import Entry
from qdraft.pairs.scan import Proposal, gguf_files, known_folders, ollama_models, propose, read_all
from qdraft.render.console import show_json, show_line, table_console
from qdraft.render.models import entry_view, list_view, scan_view

app = typer.Typer(
    name="models", help="Pairs by name, and files that could become some.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A pair of models.yaml.")]
TargetFile = Annotated[Path, typer.Option("-m", "--model", help="Target GGUF file.")]
DraftFile = Annotated[
    Path | None, typer.Option("-d", "-md", "--model-draft", help="Draft GGUF file.")
]
Repo = Annotated[str, typer.Argument(metavar="REPO[:FILE or TYPE]", help="As owner/name:Q4_K_M.")]
Description = Annotated[str, typer.Option("--description", help="What it is.")]
Template = Annotated[
    Path | None,
    typer.Option("--template", exists=True, help="A Jinja chat template for the model's own."),
]
Context = Annotated[
    int | None, typer.Option("-c", "--context", min=0, help="Context in tokens when it is run.")
]
Folders = Annotated[list[Path] | None, typer.Argument(metavar="[FOLDER]...", help="Look here too.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the pair of that name.")]


@app.command("list")
def list_pairs(models_file: opt.ModelsFile = None, as_json: opt.Json = False) -> None:
    """The pairs of models.yaml, shipped and your own."""
    known = registry.load(models_file)
    if as_json:
        pairs = [_entry(entry) for entry in known.entries.values()]
        show_json({"default": known.default, "pairs": pairs})
    else:
        table_console().print(list_view(known))


@app.command()
def show(name: Name, models_file: opt.ModelsFile = None, as_json: opt.Json = False) -> None:
    """One pair, with all that is known of it."""
    entry = registry.load(models_file).find(name)
    if as_json:
        show_json(_entry(entry))
    else:
        table_console().print(entry_view(entry))


@app.command()
def add(
    name: Name,
    target: TargetFile,
    draft: DraftFile = None,
    description: Description = "",
    template: Template = None,
    context: Context = None,
    force: Force = False,
    models_file: opt.ModelsFile = None,
) -> None:
    """Add a pair of files to your models.yaml, once they are seen to belong together."""
    if name in registry.load(models_file, new=True).entries and not force:
        raise UsageError(f"there is a pair {name} already", hint="--force replaces it")
    facts = [read_facts(path) for path in (target, draft) if path]
    for one in facts:
        if one.kind != "model":
            raise PairError(f"{one.path} is no language model: {one.kind}")
    if len(facts) == 2 and (pairing := compare(*facts)).verdict == INCOMPATIBLE:
        first = pairing.differences[0]
        raise PairError(
            f"these files cannot pair: {first.what} is {first.first} and {first.second}",
            hint="qdraft inspect shows all differences",
        )
    more: dict[str, str | int] = {}
    if template:
        more["template"] = os.path.abspath(template)
    if context is not None:
        more["context"] = context
    where = file_of_models.add(
        name, target, draft, user_file=models_file, description=description, **more
    )
    show_line("info", f"added {name} to {where}")


@app.command()
def remove(name: Name, models_file: opt.ModelsFile = None) -> None:
    """Take a pair out of your models.yaml; its files stay."""
    where = file_of_models.remove(name, user_file=models_file)
    show_line("info", f"removed {name} from {where}")


@app.command()
def scan(folders: Folders = None, as_json: opt.Json = False) -> None:
    """Look for GGUF files where other programs keep them, and propose pairs of one model.

    Looks in the caches of the Hugging Face hub, LM Studio, Ollama and llama.cpp.
    """
    for folder in folders or []:
        if not folder.is_dir():
            raise UsageError(f"{folder} is no folder")
    paths = [*gguf_files([*(folders or []), *known_folders()]), *ollama_models()]
    models, wrong = read_all(paths)
    pairs = propose(models)
    if as_json:
        show_json(
            {
                "models": [_facts(one) for one in models],
                "pairs": [_proposal(pair) for pair in pairs],
                "unreadable": wrong,
            }
        )
        return
    table_console().print(scan_view(models, pairs))
    for message in wrong:
        show_line("warning", message)


@app.command()
def pull(repo: Repo, as_json: opt.Json = False) -> None:
    """Download a model from the Hugging Face hub into its cache, and print its path.

    Needs the extra hub: pip install 'qdraft[hub]'.
    """
    name, _, wanted = repo.partition(":")
    paths = hub.pull(name, wanted or None)
    facts = read_facts(paths[0])
    if as_json:
        show_json({"files": [str(path) for path in paths], **_facts(facts)})
    else:
        print(paths[0])
        show_line("hint", f"qdraft make {paths[0]} makes a draft of it")


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "target": entry.target,
        "draft": entry.draft,
        "from_package": entry.packaged is not None,
        "description": entry.description,
        "license": entry.license,
        "origin": entry.origin,
        "template": entry.template or None,
        "context": entry.context,
        "devices": dict(entry.devices),
        "tuned": dict(entry.tuned),
    }


def _facts(facts: Facts) -> dict[str, Any]:
    return {
        "path": str(facts.path),
        "name": facts.name,
        "architecture": facts.architecture,
        "file_type": facts.file_type,
        "n_bytes": facts.n_bytes,
        "bits_per_weight": facts.bits_per_weight,
        "n_parts": len(facts.parts),
    }


def _proposal(pair: Proposal) -> dict[str, Any]:
    return {
        "target": str(pair.target.path),
        "draft": str(pair.draft.path),
        "expected_speedup": pair.expected,
    }
