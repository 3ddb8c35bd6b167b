"""What a user may set while a chat goes on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from qdraft.decoding.records import DecodeParams, SamplingParams
from qdraft.errors import UsageError

# Of DecodeParams; how many tokens to draft has a command of its own.
_OF_DECODING = ("n_predict", "seed", "draft_policy", "p_min", "verification")
_ALIASES = {"temp": "temperature", "color": "colour", "n": "n_predict"}
_CHOICES = {"colour": ("off", "draft"), "think": ("on", "off", "hide")}
_FROM_TEXT: dict[type, str] = {int: "a whole number", float: "a number"}
_HINTS = get_type_hints(SamplingParams) | get_type_hints(DecodeParams)


@dataclass
class Settings:
    """How the next answers are made and shown.

    ``colour`` "draft" styles each token by where it comes from. ``think`` is
    "on" (reasoning is shown), "hide" (it is not), or "off" (the chat template asks for none).
    """

    sampling: SamplingParams
    decode: DecodeParams
    colour: str = "off"
    think: str = "on"

    def values(self) -> dict[str, Any]:
        """Every value that ``set`` takes, by its key."""
        of_sampling = {
            each.name: value
            for each in dataclasses.fields(self.sampling)
            if isinstance(value := getattr(self.sampling, each.name), (int, float, str))
        }
        of_decoding = {name: getattr(self.decode, name) for name in _OF_DECODING}
        return of_sampling | of_decoding | {"colour": self.colour}

    def set(self, key: str, text: str) -> None:
        """Set a value by its key, for example ``set("temp", "0.7")``.

        A key may have dashes. Raises UsageError for an unknown key or a value that is not allowed.
        """
        name = key.lstrip("-").replace("-", "_").casefold()
        name = _ALIASES.get(name, name)
        values = self.values()
        if name not in values:
            raise UsageError(f"there is no setting {key}", hint="/set lists the settings")
        if name in _CHOICES:
            self.choose(name, text)
        elif name in _OF_DECODING:
            self.decode = dataclasses.replace(self.decode, **{name: _parse(name, text)})
        else:
            value = _parse(name, text)
            self.sampling = dataclasses.replace(self.sampling, **{name: value})

    def choose(self, name: str, text: str) -> None:
        """Set ``colour`` or ``think``. Raises UsageError for a value that it does not have."""
        choices = _CHOICES[name]
        if text not in choices:
            raise UsageError(f"{name} is {text} but must be one of {', '.join(choices)}")
        setattr(self, name, text)


def _parse(name: str, text: str) -> Any:
    """Return the value of a parameter from its text. Raises UsageError."""
    hint = _HINTS[name]
    kind = next(each for each in (float, int, str) if each is hint or each in get_args(hint))
    try:
        return kind(text)
    except ValueError as error:
        raise UsageError(f"{name} is {text} but must be {_FROM_TEXT[kind]}") from error
