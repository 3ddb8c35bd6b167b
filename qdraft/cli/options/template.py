"""The chat template: which one, its variables, and the reasoning that it begins."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from qdraft.cli.options.group import Group, option
from qdraft.errors import UsageError
from qdraft.llama.chat_template import TemplateOptions
from qdraft.session.reasoning import switch_reasoning
from qdraft.session.text import TextVocab
from qdraft.text_file import read_text

_PANEL = "Chat template"
_CHOICES = {
    "--reasoning": ("on", "off", "auto"),
    "--reasoning-format": ("auto", "deepseek", "none"),
}


@dataclass(frozen=True, kw_only=True)
class ChatTemplateOptions(Group):
    """The chat template and the reasoning of the model."""

    chat_template_file: Annotated[
        Path | None,
        option(
            _PANEL,
            "--chat-template-file",
            help="Use the Jinja chat template in this file.",
            default="the model's own",
        ),
    ] = None
    chat_template_kwargs: Annotated[
        str | None,
        option(
            _PANEL,
            "--chat-template-kwargs",
            help="Variables of the chat template, as a JSON object.",
        ),
    ] = None
    reasoning: Annotated[
        str,
        option(
            _PANEL,
            "-rea",
            "--reasoning",
            help="Switch reasoning on or off, if the chat template can; auto leaves it to the "
            "template.",
        ),
    ] = "auto"
    reasoning_format: Annotated[
        str,
        option(
            _PANEL,
            "--reasoning-format",
            help="Keep the reasoning apart from the text, on stderr (auto, deepseek), or leave it "
            "in the text (none).",
        ),
    ] = "auto"
    hide_reasoning: Annotated[
        bool, option(_PANEL, "--hide-reasoning", help="Do not show the reasoning.")
    ] = False

    def __post_init__(self) -> None:
        for name, value in (
            ("--reasoning", self.reasoning),
            ("--reasoning-format", self.reasoning_format),
        ):
            if value not in _CHOICES[name]:
                choices = ", ".join(_CHOICES[name])
                raise UsageError(f"{name} is {value} but must be one of {choices}")
        if self.hide_reasoning and not self.splits:
            raise UsageError("--hide-reasoning cannot be combined with --reasoning-format none")
        self.kwargs()

    @property
    def splits(self) -> bool:
        """Tell whether the reasoning is kept apart from the text."""
        return self.reasoning_format != "none"

    def refuse_raw(self) -> None:
        """Raise UsageError for an option of the template, which --raw leaves out."""
        if option := self.first_given():
            raise UsageError(f"{option} cannot be combined with --raw")

    def template_text(self) -> str | None:
        """Return the template that replaces the model's own. Raises UsageError."""
        return None if self.chat_template_file is None else read_text(self.chat_template_file)

    def kwargs(self) -> dict[str, Any]:
        """Return the variables of the template. Raises UsageError."""
        if self.chat_template_kwargs is None:
            return {}
        try:
            kwargs = json.loads(self.chat_template_kwargs)
        except ValueError as error:
            raise UsageError(f"--chat-template-kwargs is not JSON: {error}") from error
        if not isinstance(kwargs, dict):
            raise UsageError("--chat-template-kwargs must be a JSON object")
        return dict(TemplateOptions(kwargs).kwargs)

    def for_model(self, vocab: TextVocab) -> TemplateOptions:
        """Return what the template of a model gets beside the messages. Raises UsageError."""
        needed = self.first_given("chat_template_kwargs", "reasoning")
        if needed and not vocab.has_chat_template:
            raise UsageError(f"{needed} needs a chat template, but this model has none")
        kwargs = self.kwargs()
        if self.reasoning == "auto":
            return TemplateOptions(kwargs)
        try:
            switch = switch_reasoning(vocab, on=self.reasoning == "on")
        except UsageError as error:
            hint = "--hide-reasoning shows the answer alone" if self.reasoning == "off" else None
            raise UsageError(f"--reasoning is {self.reasoning}, but {error}", hint=hint) from error
        if twice := [name for name in switch if name in kwargs]:
            raise UsageError(
                f"--reasoning cannot be combined with {twice[0]} in --chat-template-kwargs"
            )
        return TemplateOptions({**kwargs, **switch})
