"""Commands that take llama.cpp's spellings, and mistake no cluster of letters for ``-h``."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand, TyperGroup

from qdraft.cli.downloads import use_downloads
from qdraft.cli.spellings import SPELLINGS, VALUES, Spelling, drafter_of
from qdraft.errors import UsageError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnOption:
    """An option of a command: its long name, and whether a value follows."""

    name: str
    takes_value: bool


class QdraftCommand(TyperCommand):
    """Translates llama.cpp's options before it parses, and downloads what ``-hf`` names."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        translation = Translation(args, self._own_options())
        translated = translation.run()
        if translation.left_out and "--quiet" not in args:
            names = ", ".join(dict.fromkeys(translation.left_out))
            log.info("left out what qdraft does not need: %s", names)
        return self.parse(info_name, translated, parent, **extra)

    def parse(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Return the context of a command line in qdraft's spelling."""
        context = super().make_context(info_name, list(args), parent, **extra)
        use_downloads(context.params)
        return context

    def _own_options(self) -> dict[str, OwnOption]:
        own = {name: OwnOption("--help", takes_value=False) for name in ("-h", "--help")}
        for parameter in self.params:
            names = [*parameter.opts, *parameter.secondary_opts]
            if not any(name.startswith("-") for name in names):
                continue  # an argument
            long = next((name for name in names if name.startswith("--")), names[0])
            is_flag = bool(getattr(parameter, "is_flag", False))
            own |= dict.fromkeys(names, OwnOption(long, not is_flag))
        return own


class QdraftGroup(TyperGroup):
    """A group of commands, which has no option of one dash but ``-h``."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        if args and args[0][:1] == "-" != args[0][1:2] and len(args[0]) > 2:
            raise UsageError(
                f"there is no option {args[0]} before a command",
                hint="give it to a command, for example qdraft run -hf OWNER/NAME:TYPE",
            )
        return super().make_context(info_name, args, parent, **extra)


class Translation:
    """Words of a command line, with qdraft's options in place of llama.cpp's.

    ``left_out`` are options that qdraft does not need.
    """

    def __init__(self, args: Sequence[str], own: Mapping[str, OwnOption]) -> None:
        self.left_out: list[str] = []
        self._own = own
        self._rest = deque(args)
        self._args: list[str] = []

    def run(self) -> list[str]:
        """Return the words. Raises UsageError, which says what to use, for a missing option."""
        while self._rest:
            word = self._rest.popleft()
            if word == "--":
                self._args += [word, *self._rest]
                break
            if word == "-" and "--file" in self._own:
                self._args += ["--file", word]
            elif word.startswith("-") and word != "-":
                self._take(word)
            else:
                self._args.append(word)
        return self._args

    def _take(self, word: str) -> None:
        name, sign, value = word.partition("=")
        name = self._with_dashes(name)
        spelling = SPELLINGS.get(name, Spelling())
        own = self._own.get(name) or self._own.get(spelling.option)
        if own and own.takes_value:
            if sign:
                self._rest.appendleft(value)
            self._take_value(name, own.name)
        elif own:
            self._args.append((name if name in self._own else own.name) + sign + value)
            if own.name == "--color":
                self._take_switch()
        elif name in SPELLINGS and not spelling.option:
            if sign:
                self._rest.appendleft(value)
            self._take_foreign(name, spelling)
        elif spelling.option:
            raise UsageError(f"{name} is {spelling.option} in qdraft, but this command has none")
        else:
            self._require_no_cluster(word)
            self._args.append(word)

    def _with_dashes(self, name: str) -> str:
        """Return the name as llama.cpp reads it: ``--top_k`` is ``--top-k``."""
        dashed = name.replace("_", "-") if name.startswith("--") else name
        return dashed if dashed in self._own or dashed in SPELLINGS else name

    def _take_value(self, name: str, option: str) -> None:
        """Add an option of qdraft and its value, in qdraft's words."""
        follows = self._rest[0] if self._rest else None
        if option == "--flash-attn" and (follows is None or follows.startswith("-")):
            if follows != "-1":  # older versions of llama.cpp had a flag
                self._rest.appendleft("on")
        elif follows is None:
            self._args.append(name if name in self._own else option)
            return
        value = self._rest.popleft()
        if name == "--spec-type":
            self._take_spec_type(value)
        else:
            known = name if name in self._own else option
            self._args += [known, VALUES.get(option, {}).get(value, value)]

    def _take_switch(self) -> None:
        """Take llama.cpp's value of an option that is a flag here; off takes the flag back."""
        if self._rest and (switch := VALUES["--color"].get(self._rest[0])):
            self._rest.popleft()
            if switch == "off":
                self._args.pop()

    def _take_spec_type(self, value: str) -> None:
        drafter = drafter_of(value)
        if drafter is None:
            raise UsageError(
                f"--spec-type {value} of llama.cpp is not in qdraft: use --drafter model, ngram or "
                "hybrid"
            )
        self._args += ["--drafter", drafter] if drafter else ["--no-draft"]

    def _take_foreign(self, name: str, spelling: Spelling) -> None:
        """Leave out an option that is not needed or asks for nothing; refuse any other."""
        value = self._rest.popleft() if spelling.takes_value and self._rest else ""
        if spelling.advice and not spelling.is_off(value):
            raise UsageError(f"{name} of llama.cpp is not in qdraft: {spelling.advice}")
        self.left_out.append(name)

    def _require_no_cluster(self, word: str) -> None:
        """Raise UsageError for letters that begin with a flag: ``-hx`` would show the help."""
        own = self._own.get(word[:2])
        if own and not own.takes_value and len(word) > 2:
            raise UsageError(f"there is no option {word}", hint="list the options with --help")
