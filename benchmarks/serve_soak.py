"""A server under clients that come and go: 200 requests from 16 clients, of which some leave.

Each client asks for chats, half of them as streams, and leaves a third of them at a random moment.
At the end nothing may run or wait, every answer that was read to its end must be whole, and the
server must not have grown by more than 32 MiB since the first 50 requests.

    qdraft serve --port 8080
    python benchmarks/serve_soak.py --address http://127.0.0.1:8080
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

N_CLIENTS, N_REQUESTS, N_WARM_UP = 16, 200, 50
MOST_GROWTH = 32 * 2**20


class Soak:
    """The clients, and what went wrong."""

    def __init__(self, address: str, pid: int | None) -> None:
        parts = urlsplit(address)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port
        self._pid = pid
        self._left = N_REQUESTS
        self._lock = threading.Lock()
        self.n_whole = self.n_abandoned = 0
        self.faults: list[str] = []
        self.sizes: list[int] = []

    def run(self) -> None:
        threads = [threading.Thread(target=self._client, args=(i,)) for i in range(N_CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._require_idle()

    def _client(self, i: int) -> None:
        chance = random.Random(i)
        while True:
            with self._lock:
                if not self._left:
                    return
                self._left -= 1
                if N_REQUESTS - self._left in (N_WARM_UP, N_REQUESTS):
                    self.sizes.append(self._resident())
            try:
                self._ask(chance)
            except (OSError, ValueError, http.client.HTTPException) as error:
                self.faults.append(repr(error))

    def _ask(self, chance: random.Random) -> None:
        leaves, streams = chance.random() < 1 / 3, chance.random() < 1 / 2
        body = {
            "messages": [{"role": "user", "content": f"Write about {chance.random()}."}],
            "max_tokens": chance.randint(1, 12),
            "stream": streams,
        }
        connection = http.client.HTTPConnection(self._host, self._port, timeout=600)
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        if leaves:
            time.sleep(chance.random())
            connection.close()
            self.n_abandoned += 1
            return
        response = connection.getresponse()
        data = response.read()
        connection.close()
        ends_well = data.endswith(b"data: [DONE]\n\n") if streams else b'"usage"' in data
        if response.status != 200 or not ends_well:
            self.faults.append(f"{response.status}: {data[-200:]!r}")
        self.n_whole += 1

    def _require_idle(self) -> None:
        for _ in range(100):
            connection = http.client.HTTPConnection(self._host, self._port, timeout=60)
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
            connection.close()
            busy = [line for line in lines if "requests_" in line and line.endswith(" 0")]
            if len(busy) == 2:
                return
            time.sleep(0.1)
        self.faults.append("a request still runs or waits")

    def _resident(self) -> int:
        """Return the bytes of the server's own memory, without mapped files."""
        if self._pid is None:
            return 0
        status = Path(f"/proc/{self._pid}/status").read_text(encoding="utf-8")
        line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", default="http://127.0.0.1:8080")
    parser.add_argument("--pid", type=int, help="process of the server, whose memory is watched")
    args = parser.parse_args()
    soak = Soak(args.address, args.pid)
    soak.run()
    growth = soak.sizes[-1] - soak.sizes[0]
    if growth > MOST_GROWTH:
        soak.faults.append(f"the server has grown by {growth / 2**20:.0f} MiB")
    report = {
        "whole": soak.n_whole,
        "abandoned": soak.n_abandoned,
        "growth_mib": round(growth / 2**20, 1),
        "faults": soak.faults,
    }
    print(json.dumps(report, indent=1))
    sys.exit(bool(soak.faults))


if __name__ == "__main__":
    main()
