"""Calls that survive that ggml aborts under them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from qdraft.errors import ServerError
from qdraft.llama import rpc_guard
from qdraft.llama.rpc_guard import RpcGuard

Callbacks = list[Callable[[bytes], None]]


@pytest.fixture
def callbacks() -> Callbacks:
    """What ggml calls before it aborts, with its last words."""
    return []


@pytest.fixture
def line(callbacks: Callbacks) -> RpcGuard:
    made = RpcGuard()
    made.start(callbacks.append)
    return made


def test_without_a_start_it_is_a_plain_call() -> None:
    assert RpcGuard().call(threading.get_ident) == threading.get_ident()


def test_results_and_errors_come_back(line: RpcGuard) -> None:
    assert line.call(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        line.call(divmod, 7, 0)
    assert line.call(threading.get_ident) != threading.get_ident()


def test_one_call_after_another(line: RpcGuard) -> None:
    """A second one starts when the first has ended, even if nobody waits for that any more."""
    order: list[str] = []

    def slow() -> None:
        time.sleep(0.1)
        order.append("slow")

    threads = [
        threading.Thread(target=line.call, args=(slow,)),
        threading.Thread(target=line.call, args=(order.append, "next")),
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert order == ["slow", "next"]


def test_an_abort_becomes_an_error_and_stays_one(line: RpcGuard, callbacks: Callbacks) -> None:
    """ggml's thread never returns from its callback: returning would end the process."""
    returned = threading.Event()

    def aborting() -> None:
        callbacks[0](b"/some/ggml-rpc.cpp:566: Remote RPC server crashed")
        returned.set()

    def call() -> None:
        threading.Thread(target=aborting, daemon=True).start()
        time.sleep(30)

    started = time.monotonic()
    with pytest.raises(ServerError, match="is lost: Remote RPC server crashed"):
        line.call(call)
    with pytest.raises(ServerError, match="Remote RPC server crashed"):
        line.call(divmod, 7, 2)
    assert time.monotonic() - started < 5
    assert not returned.is_set()


class Interrupted(threading.Event):
    """Whoever waits for it is interrupted."""

    def wait(self, timeout: float | None = None) -> bool:
        raise KeyboardInterrupt


def test_clean_up_never_waits_for_a_call_that_an_interrupt_has_left(
    line: RpcGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C ends the waiting for a server: the summary comes before it answers."""
    answer = threading.Event()
    order: list[str] = []

    def slow() -> None:
        answer.wait(30)
        order.append("slow")

    def job(*args: Any) -> rpc_guard._Job:
        made = plain(*args)
        made.ended = Interrupted()
        return made

    plain = rpc_guard._Job
    monkeypatch.setattr(rpc_guard, "_Job", job)
    with pytest.raises(KeyboardInterrupt):
        line.call(slow)
    monkeypatch.undo()
    assert line.has_left
    assert line.call(order.append, "clean-up", later=True) is None
    assert order == []
    answer.set()
    line.call(order.append, "next")
    assert not line.has_left
    line.call(order.append, "at once", later=True)
    assert order == ["slow", "clean-up", "next", "at once"]


def test_silence_is_told_from_slowness(line: RpcGuard) -> None:
    assert line.call(lambda: time.sleep(0.05) or "late", within=5) == "late"
    with pytest.raises(ServerError, match="no answer within 0 seconds"):
        line.call(time.sleep, 2, within=0.1)


def test_an_abort_that_nobody_waits_for_goes_its_way(
    line: RpcGuard, callbacks: Callbacks, capsys: pytest.CaptureFixture[str]
) -> None:
    callbacks[0](b"somewhere: a broken assertion")
    assert "a broken assertion" in capsys.readouterr().err
    assert line.call(divmod, 7, 2) == (3, 1)


def test_an_abort_while_a_call_begins_is_not_missed(
    line: RpcGuard, callbacks: Callbacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is lost after the caller has looked, and before its call is on the list."""

    class Slow(list[object]):
        def append(self, job: object) -> None:
            aborting = threading.Thread(target=callbacks[0], args=(b"Remote RPC server crashed",))
            aborting.daemon = True
            aborting.start()
            while not line.lost:
                time.sleep(0.001)
            super().append(job)

    line._busy = True  # a call that somebody has left alone
    monkeypatch.setattr(line, "_waiting", Slow())
    monkeypatch.setattr(line, "_jobs", queue.SimpleQueue())  # its thread reads no more
    with pytest.raises(ServerError, match="is lost"):
        line.call(divmod, 7, 2, within=5)
    assert not line._waiting
