"""Commands on a pair: options that are not given are those of its entry in models.yaml."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from qdraft import registry
from qdraft.errors import UsageError
from qdraft.registry import Entry

# Options that --no-draft does not go together with.
_OF_DRAFT = (
    "drafter",
    "draft-policy",
    "n-draft",
    "p-min",
    "verify",
    "share-kv",
    "gpu-layers-draft",
)


class PairCommand(TyperCommand):
    """Parses twice: once to see which pair is meant, then with the entry's options as defaults."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        context = super().make_context(info_name, list(args), parent, **extra)
        entry = _entry_meant(context.params)
        if entry is None or not entry.options:
            return context
        defaults = self._defaults(entry, alone=bool(context.params.get("no_draft")))
        return super().make_context(info_name, list(args), parent, default_map=defaults, **extra)

    def _defaults(self, entry: Entry, *, alone: bool) -> dict[str, str]:
        """The entry's options by the names of this command's parameters."""
        names = {
            option.removeprefix("--"): parameter.name
            for parameter in self.params
            for option in parameter.opts
            if option.startswith("--") and parameter.name
        }
        return {
            names[option]: value
            for option, value in entry.options.items()
            if option in names and not (alone and option in _OF_DRAFT)
        }


def _entry_meant(params: dict[str, Any]) -> Entry | None:
    """The entry that the options name, or the default; the command itself says what is wrong."""
    names = ("target", "draft", "pair", "models_file")
    target, draft, pair, models_file = (params.get(name) for name in names)
    try:
        return registry.meant(target, draft, pair, models_file)
    except UsageError:
        return None
