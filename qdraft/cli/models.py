"""`qdraft models`: pairs by name, and GGUF files on this machine or the hub."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from qdraft.cli.options.group import Group, Only, takes_options
from qdraft.cli.options.models import ModelOptions
from qdraft.cli.options.output import OutputOptions
from qdraft.errors import UsageError
from qdraft.gguf.facts import Facts, read_facts
from qdraft.pairs import editing, hub, registry
from qdraft.pairs.compatibility import require_pair
from qdraft.pairs.registry import Entry
from qdraft.pairs.scan import Proposal, gguf_files, known_folders, ollama_models, propose, read_all
from qdraft.paths import why_closed
from qdraft.render.console import show_json, show_line, show_path, table_console
from qdraft.render.models import entry_view, list_view, scan_view

app = typer.Typer(
    name="models",
    help="List, show, add and remove pairs; find or download GGUF files.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of a pair in models.yaml.")]
Repository = Annotated[
    str,
    typer.Argument(
        metavar="REPO[:FILE or TYPE]", help="Repository, for example owner/name:Q4_K_M."
    ),
]
Folders = Annotated[
    list[Path] | None, typer.Argument(metavar="[FOLDER]...", help="Search these folders too.")
]
JustModelsFile = Annotated[ModelOptions, Only("models_file")]
JustJson = Annotated[OutputOptions, Only("as_json")]


@dataclass(frozen=True, kw_only=True)
class EntryOptions(Group):
    """A new entry of models.yaml."""

    target: Annotated[Path, typer.Option("-m", "--model", help="Target GGUF file.")]
    draft: Annotated[
        Path | None, typer.Option("-d", "-md", "--model-draft", help="Draft GGUF file.")
    ] = None
    description: Annotated[str, typer.Option("--description", help="Description of the pair.")] = ""
    template: Annotated[
        Path | None,
        typer.Option(
            "--template", exists=True, help="Jinja chat template to use in place of the model's."
        ),
    ] = None
    n_ctx: Annotated[
        int | None,
        typer.Option(
            "-c", "--context", min=0, help="Context size in tokens; 0 uses the model's own."
        ),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Replace the pair of the same name.")] = (
        False
    )

    def settings(self) -> dict[str, Any]:
        """Return what the entry says besides its files."""
        settings: dict[str, Any] = {"description": self.description}
        if self.template:
            settings["template"] = str(self.template.absolute())
        if self.n_ctx is not None:
            settings["context"] = self.n_ctx
        return settings


@app.command("list")
@takes_options
def list_pairs(models: JustModelsFile, output: JustJson) -> None:
    """List the pairs of models.yaml, those that come with qdraft and yours."""
    known = registry.load(models.models_file)
    if output.as_json:
        pairs = [_entry_report(entry) for entry in known.entries.values()]
        show_json({"default": known.default, "pairs": pairs})
    else:
        table_console().print(list_view(known))


@app.command()
@takes_options
def show(name: Name, models: JustModelsFile, output: JustJson) -> None:
    """Show one pair."""
    entry = registry.load(models.models_file).find(name)
    if output.as_json:
        show_json(_entry_report(entry))
    else:
        table_console().print(entry_view(entry))


@app.command()
@takes_options
def add(name: Name, entry: EntryOptions, models: JustModelsFile) -> None:
    """Add a pair to your models.yaml, after a check that its files belong together."""
    known = registry.load(models.models_file, new=True).entries
    if name in known and not entry.force:
        raise UsageError(f"a pair named {name} already exists", hint="replace it with --force")
    require_pair(entry.target, entry.draft)
    path = editing.add(
        name,
        entry.target,
        entry.draft,
        user_file=models.models_file,
        must_be_new=not entry.force,
        **entry.settings(),
    )
    show_line("info", f"added {name} to {path}")


@app.command()
@takes_options
def remove(name: Name, models: JustModelsFile) -> None:
    """Remove a pair from your models.yaml; its files stay."""
    path = editing.remove(name, user_file=models.models_file)
    show_line("info", f"removed {name} from {path}")


@app.command()
@takes_options
def scan(output: JustJson, folders: Folders = None) -> None:
    """Find GGUF files on this machine and propose pairs.

    Searches the folders of the Hugging Face hub, LM Studio, Ollama and llama.cpp.
    """
    for folder in folders or []:
        if not os.path.isdir(folder):
            why = why_closed(folder)
            raise UsageError(
                f"{folder} cannot be read: {why}" if why else f"{folder} is not a folder"
            )
    unreadable: list[str] = []
    files = gguf_files([*(folders or []), *known_folders(unreadable)], unreadable)
    models = read_all([*files, *ollama_models(unreadable)], unreadable)
    unreadable = list(dict.fromkeys(unreadable))
    pairs = propose(models)
    if output.as_json:
        show_json(
            {
                "models": [_facts_report(facts) for facts in models],
                "pairs": [_proposal_report(pair) for pair in pairs],
                "unreadable": unreadable,
            }
        )
        return
    table_console().print(scan_view(models, pairs))
    for message in unreadable:
        show_line("warning", message)


@app.command()
@takes_options
def pull(repo: Repository, output: JustJson) -> None:
    """Download a model from the Hugging Face hub and print its path.

    The model goes into the cache of the hub. Needs the hub extra: pip install 'qdraft[hub]'.
    """
    name, _, file_or_type = repo.partition(":")
    paths = hub.pull(name, file_or_type or None)
    facts = read_facts(paths[0])
    if output.as_json:
        show_json({"files": [str(path) for path in paths], **_facts_report(facts)})
    else:
        show_path(paths[0])
        show_line("hint", f"make a draft of it with qdraft make {paths[0]}")


def _entry_report(entry: Entry) -> dict[str, Any]:
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


def _facts_report(facts: Facts) -> dict[str, Any]:
    return {
        "path": str(facts.path),
        "name": facts.name,
        "architecture": facts.architecture,
        "file_type": facts.file_type,
        "n_bytes": facts.n_bytes,
        "bits_per_weight": facts.bits_per_weight,
        "n_parts": len(facts.parts),
    }


def _proposal_report(pair: Proposal) -> dict[str, Any]:
    return {
        "target": str(pair.target.path),
        "draft": str(pair.draft.path),
        "expected_speedup": pair.expected,
    }
