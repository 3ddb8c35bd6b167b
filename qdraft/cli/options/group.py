"""Groups of options: a dataclass that writes each option once, and the commands that take it.

A command takes groups as parameters, and ``takes_options`` expands their fields into options:

    @takes_options
    def plan(models: ModelOptions, devices: Annotated[DeviceOptions, Without("batch_size")]) -> None
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from operator import getitem
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from qdraft.errors import ParameterError, UsageError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Base of the groups. ``given`` holds the fields that the command line sets."""

    given: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    def first_given(self, *names: str) -> str | None:
        """The option of the first field that the command line changes; of any if without names."""
        for name, option in option_names(type(self)).items():
            if name in self.given and (not names or name in names) and self._is_changed(name):
                return option
        return None

    def _is_changed(self, name: str) -> bool:
        """False for an option that was given with its default: it asks for nothing."""
        default = type(self).__dataclass_fields__[name].default
        return default is MISSING or bool(getattr(self, name) != default)


GroupType = TypeVar("GroupType", bound=Group)


@dataclass(frozen=True)
class Sets:
    """A mark of an option: the parameter of the library that it sets, if that has another name."""

    parameter: str


@dataclass(frozen=True)
class Formerly:
    """A mark of an option: its old name, which works for one release, with a warning."""

    option: str


@dataclass(frozen=True, init=False)
class Only:
    """A mark of a group: a command takes only these of its fields."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)


@dataclass(frozen=True, init=False)
class Without:
    """A mark of a group: a command takes all of its fields but these."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)


@dataclass(frozen=True, init=False)
class Defaults:
    """A mark of a group: a command has other defaults for these fields."""

    values: Mapping[str, Any]

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "values", values)


def option(panel: str, *names: str, help: str, default: str | None = None, **more: Any) -> Any:
    """An option in a panel of the help page; ``default`` says in words what None means."""
    return typer.Option(
        *names, help=help, rich_help_panel=panel, show_default=default or True, **more
    )


def with_settings(group: GroupType, settings: Mapping[str, str]) -> GroupType:
    """The group with settings by the long names of its options, unless the command line has them.

    Raises UsageError for a value that an option cannot have.
    """
    changes: dict[str, Any] = {}
    hints = _hints_of(type(group))
    for name, option in option_names(type(group)).items():
        value = settings.get(option.removeprefix("--"))
        if value is None or name in group.given:
            continue
        kinds = get_args(get_args(hints[name])[0]) or (get_args(hints[name])[0],)
        number = next((kind for kind in (int, float) if kind in kinds), None)
        try:
            changes[name] = number(value) if number else value
        except ValueError as error:
            raise UsageError(f"{option} is {value} but must be a number") from error
    return replace(group, **changes)


def option_names(group: type[Group]) -> dict[str, str]:
    """The long option of each field of a group: ``{"top_k": "--top-k", ...}``."""
    hints = _hints_of(group)
    return {
        each.name: name for each in _options_of(group) if (name := _long_name(hints[each.name]))
    }


def parameter_names(group: type[Group]) -> dict[str, str]:
    """The long option of each parameter of the library: ``{"n_ctx": "--ctx-size", ...}``."""
    hints = _hints_of(group)
    names = option_names(group)
    return {
        mark.parameter: name
        for field_name, name in names.items()
        for mark in get_args(hints[field_name])
        if isinstance(mark, Sets)
    } | names


def rename_parameters(text: str, names: Mapping[str, str]) -> str:
    """The text with options in place of parameters: "--top-p is 1.5" for "top_p is 1.5".

    A name without an underscore is an ordinary word, and counts only if the text starts with it
    and says what it is, for example "seed is -2".
    """

    def rename(match: re.Match[str]) -> str:
        return names.get(match[0], match[0])

    return re.sub(r"^[a-z]+(?= is )|(?<![\w/.-])[a-z]+_\w+(?![\w/.-])", rename, text)


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of each group in place of the parameter that takes it.

    Errors of the library that name a parameter name the option that sets it.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, _Expanded] = {}
    parameters = [inspect.Parameter("command_context", _KEYWORD, annotation=typer.Context)]
    for own in inspect.signature(command).parameters.values():
        hint = hints[own.name]
        group = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if is_dataclass(group) and isinstance(group, type) and issubclass(group, Group):
            groups[own.name] = expanded = _Expanded.of(group, hint)
            parameters += expanded.parameters
        else:
            parameters.append(own.replace(kind=_KEYWORD, annotation=hint))
    names = {k: v for each in groups.values() for k, v in parameter_names(each.group).items()}

    def expanded_command(command_context: typer.Context, **values: Any) -> None:
        given = {name for name in values if _is_given(command_context, name)}
        warn = log.debug if values.get("quiet") else log.warning
        try:
            collected = {name: each.collect(values, given, warn) for name, each in groups.items()}
            command(**collected, **values)
        except ParameterError as error:
            error.args = (rename_parameters(str(error), names),)
            error.hint = error.hint and rename_parameters(error.hint, names)
            raise

    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    expanded_command.__doc__ = "\n\n".join(" ".join(text.split()) for text in paragraphs)
    expanded_command.__name__ = command.__name__
    expanded_command.__annotations__ = {each.name: each.annotation for each in parameters}
    vars(expanded_command)["__signature__"] = inspect.Signature(parameters)
    return expanded_command


_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_HINTS: dict[type[Group], dict[str, Any]] = {}
_OLD = "_formerly"  # ends the name of the hidden parameter of an old option


@dataclass(frozen=True)
class _Expanded:
    """A group as one command takes it: the parameters that its options become."""

    group: type[Group]
    defaults: Mapping[str, Any]
    parameters: list[inspect.Parameter]

    @classmethod
    def of(cls, group: type[Group], hint: Any) -> _Expanded:
        marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        kept = [each.name for each in _options_of(group)]
        defaults: dict[str, Any] = {}
        for each in marks:
            if isinstance(each, Only):
                kept = [name for name in kept if name in each.names]
            elif isinstance(each, Without):
                kept = [name for name in kept if name not in each.names]
            elif isinstance(each, Defaults):
                defaults |= each.values
        hints = _hints_of(group)
        parameters = []
        for own in _options_of(group):
            if own.name not in kept:
                continue
            default = defaults.get(own.name, inspect.Parameter.empty)
            if own.name not in defaults and own.default is not MISSING:
                default = own.default
            annotation = hints[own.name]
            if defaults.get(own.name) is not None:
                annotation = _with_default_shown(annotation)
            parameters.append(
                inspect.Parameter(own.name, _KEYWORD, default=default, annotation=annotation)
            )
            parameters += _old_options(own.name, annotation)
        return cls(group, defaults, parameters)

    def collect(self, values: dict[str, Any], given: set[str], warn: Callable[..., None]) -> Group:
        """Take the values of this group out of those of the command; ``warn`` of old names."""
        own = {each.name: values.pop(each.name) for each in self.parameters}
        for old in [name for name in own if name.endswith(_OLD)]:
            name, value = old.removesuffix(_OLD), own.pop(old)
            if old not in given:
                continue
            new, former = option_names(self.group)[name], _old_name(self.group, name)
            if name in given:
                raise UsageError(f"{former} cannot be combined with {new}, which replaces it")
            warn("%s is now called %s; the next release removes the old name", former, new)
            own[name] = value
            given.add(name)
        return self.group(given=frozenset(given & own.keys()), **{**self.defaults, **own})


def _hints_of(group: type[Group]) -> dict[str, Any]:
    """The annotations of a group's fields, with their options; each group is read once."""
    if group not in _HINTS:
        _HINTS[group] = get_type_hints(group, include_extras=True)
    return _HINTS[group]


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _options_of(group: type[Group]) -> Iterator[Field[Any]]:
    return (each for each in fields(group) if each.name != "given")


def _long_name(hint: Any) -> str | None:
    """The first long name of an option; None for an argument."""
    for mark in get_args(hint):
        declared = [getattr(mark, "default", None), *(getattr(mark, "param_decls", None) or ())]
        for name in declared:
            if isinstance(name, str) and name.startswith("--"):
                return name
    return None


def _with_default_shown(hint: Any) -> Any:
    """The option with the value of its default on the help page, in place of words."""
    shown = []
    for mark in get_args(hint)[1:]:
        if hasattr(mark, "show_default"):
            mark = copy(mark)
            mark.show_default = True
        shown.append(mark)
    annotated: Any = Annotated
    return getitem(annotated, (get_args(hint)[0], *shown))


def _old_name(group: type[Group], name: str) -> str:
    hint = _hints_of(group)[name]
    return next(each.option for each in get_args(hint) if isinstance(each, Formerly))


def _old_options(name: str, hint: Any) -> Iterator[inspect.Parameter]:
    """The hidden option under the old name of an option, if it has one."""
    for mark in get_args(hint):
        if isinstance(mark, Formerly):
            flag = get_args(hint)[0] is bool
            kind: Any = bool if flag else get_args(hint)[0] | None
            yield inspect.Parameter(
                name + _OLD,
                _KEYWORD,
                default=False if flag else None,
                annotation=Annotated[kind, typer.Option(mark.option, hidden=True)],
            )
