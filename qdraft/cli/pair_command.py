"""Commands on a pair: the entry of models.yaml sets the options that the command line does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qdraft.cli.command import QdraftCommand
from qdraft.cli.options.devices import draft_fields
from qdraft.decoding.drafters.kinds import KINDS
from qdraft.errors import UsageError
from qdraft.pairs import registry
from qdraft.pairs.registry import Entry

# Options of a draft model, which cannot be combined with --no-draft or a drafter without a model.
_OF_DRAFT = ("share-kv", *(name.replace("_", "-") for name in draft_fields()))
# If the command line sets one of these, also by its old name, the entry sets none of them.
_HOW = (*registry.HOW_TO_DRAFT, *registry.OLD_NAMES)


class PairCommand(QdraftCommand):
    """Parses twice: to see which pair is meant, then with the entry's options as defaults."""

    def parse(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        context = super().parse(info_name, args, parent, **extra)
        entry = _find_entry(context.params)
        defaults = self._defaults(entry, context) if entry else {}
        if not defaults:
            return context
        return super().parse(info_name, args, parent, default_map=defaults, **extra)

    def _defaults(self, entry: Entry, context: Any) -> dict[str, str]:
        """The entry's options by the names of this command's parameters.

        Old names of options are hidden and are not keys of an entry: ``--verify`` of ``plan`` has
        nothing to do with the verification of an entry.
        """
        names = {
            option.removeprefix("--"): parameter.name
            for parameter in self.params
            for option in parameter.opts
            if option.startswith("--") and parameter.name
        }
        hidden = {parameter.name for parameter in self.params if getattr(parameter, "hidden", 0)}

        def is_given(option: str) -> bool:
            source = context.get_parameter_source(names.get(option, ""))
            return source is not None and source.name == "COMMANDLINE"

        alone = bool(context.params.get("no_draft"))
        settings = settings_of(entry, context.params.get("drafter", ""), alone, is_given)
        return {
            names[option]: value
            for option, value in settings.items()
            if option in names and names[option] not in hidden
        }


def settings_of(
    entry: Entry, drafter: str, alone: bool, is_given: Callable[[str], bool]
) -> dict[str, str]:
    """The options of an entry that hold beside those of a command line, by their long names.

    ``alone`` says that the target runs alone, and ``is_given`` tells whether the command line sets
    an option.
    """
    kind = KINDS.get(drafter)
    no_model = alone or (kind is not None and not kind.needs_draft)
    left_out = [
        *(_OF_DRAFT if no_model else ()),
        *(_HOW if alone or any(map(is_given, _HOW)) else ()),
    ]
    return {option: value for option, value in entry.options.items() if option not in left_out}


def _find_entry(params: dict[str, Any]) -> Entry | None:
    """The entry that the options name, or the default one; None if the options are wrong.

    The command itself says what is wrong, and sees to several pairs.
    """
    if params.get("pairs"):
        return None
    names = ("target", "draft", "pair", "models_file")
    target, draft, pair, models_file = (params.get(name) for name in names)
    try:
        return registry.find_entry(target, draft, pair, models_file)
    except UsageError:
        return None
