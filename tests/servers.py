"""RPC servers on this machine, and what can be wrong with the way to them."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from qdraft.llama.native import lib


def require_rpc() -> None:
    """Skip where llama-cpp-python was built without it."""
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    if not lib().llama_supports_rpc():
        pytest.skip("needs llama-cpp-python built with GGML_RPC=ON")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server(
    host: str = "127.0.0.1", *, prefix: Sequence[str] = (), port: int | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`qdraft rpc-server` of one thread: its HOST:PORT, and its process.

    ``prefix`` is a command that runs it (in a network namespace, with less memory).
    """
    port = port or free_port()
    process = subprocess.Popen(
        [
            *prefix,
            sys.executable,
            "-m",
            "qdraft",
            "rpc-server",
            "-H",
            host,
            "-p",
            str(port),
            "-t",
            "1",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait(host, port)
        yield f"{host}:{port}", process
    finally:
        process.kill()
        process.wait()


def _wait(host: str, port: int) -> None:
    for _ in range(100):
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
            return
        time.sleep(0.05)
    raise AssertionError(f"nothing listens at {host}:{port}")


class Relay:
    """A relay to a server that holds every byte back for ``delay`` seconds, as a long way does."""

    def __init__(self, server: str, delay: float) -> None:
        host, port = server.split(":")
        self._to = (host, int(port))
        self._delay = delay
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._open.append(near)
                far = socket.create_connection(self._to)
                self._open.append(far)
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._pump(near, far)
                self._pump(far, near)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        held: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

        def read() -> None:
            data = b"-"
            while data:
                try:
                    data = source.recv(1 << 18)
                except OSError:
                    data = b""
                held.put((time.monotonic() + self._delay, data))

        def write() -> None:
            while True:
                due, data = held.get()
                time.sleep(max(0.0, due - time.monotonic()))
                with contextlib.suppress(OSError):
                    if data:
                        sink.sendall(data)
                    else:
                        sink.shutdown(socket.SHUT_RDWR)
                if not data:
                    return

        for work in (read, write):
            self._start(work)

    def close(self) -> None:
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(timeout=5)
        for connection in self._open:
            connection.close()


@contextlib.contextmanager
def namespaces(n: int) -> Iterator[list[tuple[list[str], str, str]]]:
    """Hosts of their own on this machine, in network namespaces: for each the command prefix that
    runs something there, its address, and the name of the near end of its link.

    Skips where they cannot be made (no root, no iproute2).
    """
    if not shutil.which("ip") or os.geteuid() != 0:
        pytest.skip("needs root and iproute2")
    made: list[tuple[list[str], str, str]] = []
    try:
        for i in range(n):
            name, near, far = f"qdraft{os.getpid()}n{i}", f"qd{os.getpid() % 10000}a{i}", "eth0"
            net = f"10.{77 + i}.{os.getpid() % 200}"
            commands = (
                f"ip netns add {name}",
                f"ip link add {near} type veth peer name {far} netns {name}",
                f"ip addr add {net}.1/24 dev {near}",
                f"ip link set {near} up",
                f"ip -n {name} addr add {net}.2/24 dev {far}",
                f"ip -n {name} link set {far} up",
                f"ip -n {name} link set lo up",
            )
            for command in commands:
                done = subprocess.run(command.split(), capture_output=True, text=True)
                if done.returncode and command.startswith("ip netns add"):
                    pytest.skip(f"network namespaces cannot be made: {done.stderr.strip()}")
                assert not done.returncode, (command, done.stderr)
                if command.startswith("ip netns add"):
                    made.append((["ip", "netns", "exec", name], f"{net}.2", near))
        yield made
    finally:
        for prefix, _, near in made:
            subprocess.run(["ip", "link", "del", near], capture_output=True)
            subprocess.run(["ip", "netns", "del", prefix[-1]], capture_output=True)
