"""Servers that compute for long, and those whose machine is gone."""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time

import pytest

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

from qdraft.llama import rpc


@pytest.mark.skipif(sys.platform != "linux", reason="tcp_info is Linux's")
class TestSilence:
    """A server that computes for long takes no data, but its machine answers."""

    def test_a_busy_server_keeps_its_connection(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A batch of a long prompt can take longer than a cut cable is given."""
        monkeypatch.setattr(rpc, "_SILENT_S", 1)
        monkeypatch.delattr(socket, "TCP_KEEPCNT")  # which cannot be negative
        n_bytes = 2**26  # more than both ends hold
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = socket.create_connection(listener.getsockname())
            server = listener.accept()[0]
        with client, server:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
            monkeypatch.setitem(rpc._servers, "busy", server.getsockname())
            rpc.keep_alive()
            sending = threading.Thread(target=client.sendall, args=(bytes(n_bytes),))
            sending.start()
            time.sleep(2)
            info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
            assert not rpc.is_silent(info)
            n_taken = 0
            while n_taken < n_bytes:
                n_taken += len(server.recv(2**20))
            sending.join()

    @pytest.mark.parametrize(
        ("n_retransmits", "n_probes", "answered_s", "is_silent"),
        [
            (0, 0, 60, False),  # nothing to send
            (0, 1, 60, False),  # no room at the other end, and the next probe is on its way
            (1, 0, 2, False),  # a packet was lost
            (4, 0, 11, True),
            (0, 3, 11, True),
        ],
    )
    def test_unanswered_data_and_probes(
        self, n_retransmits: int, n_probes: int, answered_s: int, is_silent: bool
    ) -> None:
        info = bytearray(104)
        info[2:4] = n_retransmits, n_probes
        struct.pack_into("=I", info, 56, 1000 * answered_s)
        assert rpc.is_silent(bytes(info)) is is_silent
