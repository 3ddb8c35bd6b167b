"""The fields of a request's JSON object: null is as good as absent, a wrong type is an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from qdraft.serve.errors import ApiError, invalid

_LARGE = 1e300  # beyond it a whole number is not a float
_KINDS = {str: "a string", bool: "true or false", list: "a list", dict: "an object"}


class Fields:
    """Reads fields by name; ``where`` is the path of the object in the request."""

    def __init__(self, body: Mapping[str, Any], where: str = "") -> None:
        self._body = {key: value for key, value in body.items() if value is not None}
        self._where = where
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        self._read.add(name)
        return name in self._body

    @property
    def unread(self) -> list[str]:
        """The fields that nobody has asked for."""
        return sorted(self._body.keys() - self._read)

    def path(self, name: str) -> str:
        """Return the name of a field from the top of the request."""
        return f"{self._where}.{name}" if self._where else name

    def raw(self, name: str) -> Any:
        """Return a value as it is; None if it is absent."""
        self._read.add(name)
        return self._body.get(name)

    def text(self, name: str) -> str | None:
        value: str | None = self._typed(name, str)
        if value and any("\ud800" <= character <= "\udfff" for character in value):
            raise invalid(f"{self.path(name)} is not valid Unicode", self.path(name))
        return value

    def flag(self, name: str) -> bool | None:
        value: bool | None = self._typed(name, bool)
        return value

    def items(self, name: str) -> list[Any] | None:
        value: list[Any] | None = self._typed(name, list)
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        value: dict[str, Any] | None = self._typed(name, dict)
        return value

    def integer(self, name: str, least: int | None = None, most: int | None = None) -> int | None:
        """Return a whole number from ``least`` to ``most``; 3.0 is as good as 3."""
        value = self.number(name)
        if value is None:
            return None
        if value != int(value):
            raise self.wrong(name, "a whole number")
        if (least is not None and value < least) or (most is not None and value > most):
            rule = f"{least} or more" if most is None else f"from {least} to {most}"
            raise self.wrong(name, rule)
        return int(value)

    def number(self, name: str) -> float | int | None:
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(name, "a number")
        if not abs(value) < _LARGE:
            raise self.wrong(name, "a finite number")
        return value

    def wrong(self, name: str, rule: str) -> ApiError:
        """Return the error for a value that is not as ``rule`` says."""
        value = json.dumps(self._body.get(name), ensure_ascii=False)
        shown = value if len(value) <= 60 else value[:57] + "..."
        return invalid(f"{self.path(name)} is {shown} but must be {rule}", self.path(name))

    def _typed(self, name: str, kind: type) -> Any:
        value = self.raw(name)
        if value is not None and not isinstance(value, kind):
            raise self.wrong(name, _KINDS[kind])
        return value


def read_object(data: bytes) -> Fields:
    """Return the fields of a request's body. Raises ApiError unless it is a JSON object."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "brackets are nested too deep" if isinstance(error, RecursionError) else error
        raise invalid(f"the body is not JSON: {reason}") from error
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object")
    return Fields(body)
