"""The clipboard: a program that sets it, or the terminal itself."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys

from qdraft.errors import UsageError

# The variable that says that a display is there ("" needs none), and the command.
_PROGRAMS = (
    ("WAYLAND_DISPLAY", ("wl-copy",)),
    ("DISPLAY", ("xclip", "-selection", "clipboard")),
    ("DISPLAY", ("xsel", "--clipboard", "--input")),
    ("", ("pbcopy",)),
    ("", ("clip.exe",)),
    ("TERMUX_VERSION", ("termux-clipboard-set",)),
)
_PATIENCE_S = 5.0


def copy_text(text: str) -> str:
    """Put a text on the clipboard; return what did it.

    Raises UsageError if there is neither a program for that nor a terminal that may do it.
    """
    for variable, command in _PROGRAMS:
        if (not variable or os.environ.get(variable)) and _run(command, text):
            return command[0]
    terminal = next((s for s in (sys.stdout, sys.stderr) if s.isatty()), None)
    if terminal is None or os.environ.get("TERM", "dumb") == "dumb":
        names = ", ".join(command[0] for _, command in _PROGRAMS[:3])
        raise UsageError("there is no clipboard here", hint=f"install one of {names}")
    # OSC 52 of xterm. A terminal that does not know it shows nothing.
    terminal.write(f"\x1b]52;c;{base64.b64encode(text.encode('utf-8', 'replace')).decode()}\x07")
    terminal.flush()
    return "the terminal, if it lets programs do that"


def _run(command: tuple[str, ...], text: str) -> bool:
    """Give the text to a program; return False if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return False
    encoding = "utf-16-le" if command[0] == "clip.exe" else "utf-8"
    try:
        done = subprocess.run(
            command,
            input=text.encode(encoding, "replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
