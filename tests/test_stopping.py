"""What stops a command: Ctrl-C, kill, a closed terminal, a dead parent; nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qdraft.errors import EngineError, ModelFileError, QDraftError
from qdraft.llama.child import command, run_job
from qdraft.llama.interrupts import STOP_SIGNALS, interruptible

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals of this kind are POSIX")
PATHS = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


def start(code: str, *args: str, **kwargs: Any) -> subprocess.Popen[str]:
    """Run Python code in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PATHS},
        **kwargs,
    )


def wait_until(what: Callable[[], bool]) -> None:
    for _ in range(600):
        if what():
            return
        time.sleep(0.05)
    raise AssertionError("it does not happen")


def is_locked(path: Path) -> bool:
    """Is the process alive that holds a lock on the file?"""
    import fcntl

    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


class TestChildJobs:
    def test_a_crash_costs_one_job(self) -> None:
        """A process of its own gives its memory back, even after a crash.

        https://github.com/abetlen/llama-cpp-python/issues/1442
        """
        with pytest.raises(EngineError, match="a child process died: SIGKILL"):
            run_job("job_modules", {"do": "die"})
        with pytest.raises(ModelFileError, match="the job's own words") as raised:
            run_job("job_modules", {"do": "fail"})
        assert raised.value.hint == "its hint"
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            run_job("job_modules", {"do": "bug"})
        with pytest.raises(QDraftError, match="No space left on device: logits"):
            run_job("job_modules", {"do": "no space"})

    def test_progress_and_answer(self) -> None:
        reported: list[tuple[str, float, float]] = []
        result = run_job("job_modules", {"do": "work"}, lambda *x: reported.append(x))
        assert (result, reported) == ({"did": "work"}, [("half", 1, 2)])

    def test_what_it_prints_besides_does_no_harm(self) -> None:
        """More than a pipe holds on stderr, and lines on stdout that are no messages."""
        assert run_job("job_modules", {"do": "talk"}) == {"did": "talk"}

    @posix
    def test_it_ends_with_its_parent(self, tmp_path: Path) -> None:
        """As after ``kill -9``, which lets the parent end nothing itself."""
        path = tmp_path / "lock"
        code = (
            "import sys; from qdraft.llama.child import run_job; "
            "run_job('job_modules', {'do': 'wait', 'path': sys.argv[1]}, "
            "lambda *x: print(*x, flush=True))"
        )
        with start(code, str(path)) as parent:
            assert parent.stdout
            while "waiting" not in parent.stdout.readline():
                assert parent.poll() is None
            assert is_locked(path)
            parent.kill()
        wait_until(lambda: not is_locked(path))

    @posix
    def test_it_ends_when_nobody_holds_its_stdin(self, tmp_path: Path) -> None:
        """How systems without a signal for it learn that the parent is gone."""
        path = tmp_path / "lock"
        request = json.dumps({"do": "wait", "path": str(path)})
        child = subprocess.Popen(
            command("qdraft.llama.child", "job_modules"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdin
        assert child.stdout
        with child.stdout:
            child.stdin.write(request + "\n")
            child.stdin.flush()
            while "waiting" not in child.stdout.readline():
                assert child.poll() is None
            for number in STOP_SIGNALS:  # the parent has them too, and ends the child
                child.send_signal(number)
            assert is_locked(path)
            child.stdin.close()
            assert child.wait(timeout=60) == 1


@posix
class TestSignals:
    STUB = (
        "import sys, time, typer; from qdraft.cli import main; from qdraft.paths import new_file\n"
        "from pathlib import Path\n"
        "def stub(args, **kwargs):\n"
        "    with new_file(Path(sys.argv[1])) as part:\n"
        "        part.write_bytes(b'half')\n"
        "        print('ready', flush=True)\n"
        "        for _ in range(6000):\n"
        "            time.sleep(0.01)\n"  # a signal just before a long sleep waits for its end
        "main.app = stub\n"
        "main.main([])\n"
    )

    def test_a_kill_leaves_no_part_and_what_is_ignored_stays_ignored(self, tmp_path: Path) -> None:
        """Under ``nohup``, and in the background of a shell, some signals are ignored."""
        ignore = (
            "import signal; [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGHUP, "
            "signal.SIGINT)]\n"
        )
        with start(ignore + self.STUB, str(tmp_path / "out.gguf")) as child:
            assert child.stdout
            assert child.stdout.readline() == "ready\n"
            assert len(list(tmp_path.iterdir())) == 1
            for number in STOP_SIGNALS:
                child.send_signal(number)
            _, err = child.communicate(timeout=60)
        assert child.returncode == 128 + signal.SIGTERM
        assert err == "warning: interrupted\n"
        assert list(tmp_path.iterdir()) == []

    def test_a_terminal_that_is_gone(self, tmp_path: Path) -> None:
        """Nothing can be written there any more; the clean-up goes on."""
        near, far = os.openpty()
        child = subprocess.Popen(
            [sys.executable, "-c", self.STUB, str(tmp_path / "out.gguf")],
            stdin=far,
            stdout=far,
            stderr=far,
            start_new_session=True,
        )
        os.close(far)
        assert os.read(near, 5) == b"ready"
        os.close(near)
        child.send_signal(signal.SIGHUP)
        assert child.wait(timeout=60) == 128 + signal.SIGHUP
        assert list(tmp_path.iterdir()) == []

    def test_native_calls_hold_every_stop_signal_back(self) -> None:
        """Raised inside a callback of native code, it would be lost."""
        received: list[int] = []
        before = {n: signal.signal(n, lambda n, _: received.append(n)) for n in STOP_SIGNALS}
        try:
            for number in STOP_SIGNALS:
                with interruptible() as interrupted:
                    os.kill(os.getpid(), number)
                    assert interrupted()
                    assert number not in received
                assert received[-1] == number
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def test_a_handler_that_waits_lets_a_native_call_go_on(self) -> None:
        """As Ctrl-C in an answer of a chat: the first one waits for the round."""

        class Once:
            presses = 0

            @property
            def waits(self) -> bool:
                return not self.presses

            def __call__(self, number: int, frame: object) -> None:
                self.presses += 1

        handler = Once()
        before = signal.signal(signal.SIGINT, handler)
        try:
            with interruptible() as interrupted:
                signal.raise_signal(signal.SIGINT)
                assert not interrupted()
                assert handler.presses == 1
                signal.raise_signal(signal.SIGINT)
                assert interrupted()
                assert handler.presses == 1
            assert handler.presses == 2
        finally:
            signal.signal(signal.SIGINT, before)
