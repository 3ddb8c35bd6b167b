"""A model's chat template, rendered in a child process that a template cannot outlast."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qdraft.errors import UsageError
from qdraft.gguf import template as sandbox

_LIMIT_S = 5.0  # of computing
_PATIENCE = 4.0  # times as long by the clock: other programs compute too


_OWN = ("messages", "tools", "add_generation_prompt")  # variables that qdraft sets


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a chat template gets beside the messages.

    ``kwargs`` are variables of the template, for example ``{"enable_thinking": False}``, and
    ``tools`` the functions that the model may call, as OpenAI's API has them. The prompt ends with
    the beginning of the assistant's turn if ``add_generation_prompt``, and with the last message,
    which must be the assistant's and stays open, if ``continue_last``. Raises UsageError.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_last: bool = False

    def __post_init__(self) -> None:
        if own := [name for name in _OWN if name in self.kwargs]:
            raise UsageError(f"{own[0]} is a variable of the chat template that qdraft sets itself")

    def variables(self) -> dict[str, Any]:
        """Return the variables of the template that are not the messages."""
        tools = {"tools": self.tools} if self.tools else {}
        generation = self.add_generation_prompt and not self.continue_last
        return {**self.kwargs, **tools, "add_generation_prompt": generation}


NO_OPTIONS = TemplateOptions()


class ChatTemplate:
    """A template and the child process that renders it, which starts with the first messages."""

    def __init__(self, text: str, bos: str = "", eos: str = "", limit_s: float = _LIMIT_S) -> None:
        """``bos`` and ``eos`` are the texts of these tokens. ``limit_s`` is per prompt."""
        self.text = text
        self._request = json.dumps([text, bos, eos, limit_s])
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._ended: Callable[[], object] = lambda: None

    def render(
        self, messages: Sequence[dict[str, Any]], options: TemplateOptions = NO_OPTIONS
    ) -> str:
        """Return the messages in the template, as ``options`` say.

        Raises UsageError if the template fails or does not end.
        """
        with self._lock:
            try:
                answer = self._ask(json.dumps([list(messages), options.variables()]))
            except BaseException:
                self.close()
                raise
        if "error" in answer:
            raise _failed(answer["error"])
        return answer["text"]

    def close(self) -> None:
        """End the child process; harmless when repeated."""
        self._child = None
        self._ended()

    def _ask(self, request: str) -> dict[str, str]:
        child = self._child
        if child is None:
            child = self._child = _start()
            self._ended = weakref.finalize(self, _end, child)
            request = f"{self._request}\n{request}"
        assert child.stdin is not None
        assert child.stdout is not None
        clock = threading.Timer(_PATIENCE * self._limit_s, child.kill)
        clock.daemon = True
        clock.start()
        line = ""
        try:
            with contextlib.suppress(OSError):  # the child died: its status says why
                child.stdin.write(request + "\n")
                child.stdin.flush()
            line = child.stdout.readline()
        finally:
            clock.cancel()
        if not line:
            raise _failed(self._reason(child.wait()))
        answer: dict[str, str] = json.loads(line)
        return answer

    def _reason(self, status: int) -> str:
        if -status in (
            getattr(signal, "SIGXCPU", 0),
            signal.SIGTERM,
            getattr(signal, "SIGKILL", 0),
        ):
            return f"it does not end within {self._limit_s:g} seconds"
        if status < 0:
            return f"the process that renders it died: {signal.Signals(-status).name}"
        return f"the process that renders it ended with status {status}"


def template_renders(text: str) -> bool:
    """Tell whether a template renders a message of a user, as ``qdraft run`` would."""
    with contextlib.closing(ChatTemplate(text, "<s>", "</s>")) as template:
        try:
            template.render([{"role": "user", "content": "Hello"}])
        except UsageError:
            return False
    return True


def _start() -> subprocess.Popen[str]:
    code = (
        f"import sys, runpy; sys.path[:] = {sys.path!r}; "
        f"runpy.run_path({sandbox.__file__!r}, run_name='__main__')"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
    )


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def _failed(reason: str) -> UsageError:
    return UsageError(
        f"the model's chat template fails: {reason}", hint="leave the template out with --raw"
    )
