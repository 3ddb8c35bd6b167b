"""The `qdraft` command: its subcommands, and the one place where errors become lines."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from qdraft import __version__
from qdraft.cli import models
from qdraft.cli.bench import bench
from qdraft.cli.chat import ChatCommand, chat
from qdraft.cli.command import QdraftCommand, QdraftGroup
from qdraft.cli.compare import compare
from qdraft.cli.devices import devices
from qdraft.cli.explain import explain
from qdraft.cli.export import export_pair
from qdraft.cli.inspect import inspect
from qdraft.cli.make import make
from qdraft.cli.pair_command import PairCommand
from qdraft.cli.plan import plan
from qdraft.cli.replay import replay
from qdraft.cli.rpc_server import rpc_server
from qdraft.cli.run import INTERRUPTED, run
from qdraft.cli.serve import serve
from qdraft.cli.stop import StopSignals
from qdraft.cli.tune import tune
from qdraft.errors import QDraftError
from qdraft.llama.rpc_guard import GUARD
from qdraft.render.console import LogToTalk, show_line

app = typer.Typer(
    name="qdraft",
    cls=QdraftGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=PairCommand)(run)
app.command(cls=ChatCommand)(chat)
app.command(cls=PairCommand)(serve)
app.command()(make)
app.command(cls=PairCommand)(bench)
app.command()(compare)
app.command()(tune)
app.command()(replay)
app.command()(explain)
app.command()(inspect)
app.command()(devices)
app.command(cls=PairCommand)(plan)
app.command("export", cls=PairCommand)(export_pair)
app.command("rpc-server")(rpc_server)
app.add_typer(models.app, cls=QdraftGroup)
for _each in (*app.registered_commands, *models.app.registered_commands):
    if not (isinstance(_each.cls, type) and issubclass(_each.cls, QdraftCommand)):
        _each.cls = QdraftCommand


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from qdraft.llama.native import library_version

        print(f"qdraft {__version__}, llama-cpp-python {library_version()}")
        raise typer.Exit()


@app.callback()
def _top(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the versions of qdraft and llama-cpp-python.",
        ),
    ] = False,
) -> None:
    """Generate text from GGUF models faster, without changing the text.

    A low-bit draft of the model proposes tokens, and the model itself verifies them.
    """


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of the console script; exits with the documented codes."""
    _prepare_streams()
    log = logging.getLogger("qdraft")
    log.addHandler(handler := LogToTalk())
    log.setLevel(logging.INFO)
    log.propagate = False
    with StopSignals() as stop:
        try:
            status = _run(args)
        finally:
            log.removeHandler(handler)
            handler.show_held()
        if status == INTERRUPTED:
            show_line("warning", "interrupted")
            status = stop.status
    if GUARD.has_left:  # a thread waits for a server in native code, which must not end under it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _run(args: Sequence[str] | None) -> int:
    """Run the command and return its exit status; an error becomes lines."""
    try:
        status = int(app(args, standalone_mode=False) or 0)
        sys.stdout.flush()
    except QDraftError as error:
        status = _fail(error, error.hint, error.exit_code)
    except typer.TyperException as error:
        # Without a command typer has shown the help page, and the message is empty.
        if message := error.format_message().removesuffix("."):
            message = message[0].lower() + message[1:]
            _fail(message, f"list the options with qdraft {_command(error)}--help", error.exit_code)
        status = error.exit_code
    except MemoryError:
        status = _fail("out of memory", "use a smaller context (-c)", 1)
    except BrokenPipeError:
        # The reader of stdout is gone (qdraft run ... | head), so there is nobody to tell.
        _drop_stdout()
        status = 1
    except OSError as error:
        named = f": {error.filename}" if error.filename else ""
        status = _fail(f"{error.strerror or error}{named}", None, 1)
        _drop_stdout()
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    return status


def _command(error: typer.TyperException) -> str:
    """The subcommand of a usage error, followed by a space; empty at the top level."""
    context = getattr(error, "ctx", None)
    return f"{context.info_name} " if context and context.parent else ""


def _prepare_streams() -> None:
    """Make sure that both streams exist and never fail on a character.

    Pipes and files get UTF-8 unless PYTHONIOENCODING says otherwise; a terminal keeps its
    encoding, and shows a question mark for a character that it lacks.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            keep = stream.isatty() or "PYTHONIOENCODING" in os.environ
            stream.reconfigure(encoding=None if keep else "utf-8", errors="replace")


def _drop_stdout() -> None:
    """Send the rest of stdout nowhere, so that the flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: object, hint: str | None, status: int) -> int:
    show_line("error", str(message))
    if hint:
        show_line("hint", hint)
    return status


if __name__ == "__main__":
    main()
