"""Downloads from a stand-in for the hub's HTTP interface."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jsonschema
import pytest
import tiny
from invoke import qdraft_batch, qdraft_process, schema

from qdraft.errors import UsageError
from qdraft.pairs.hub import choose_files

FILES = ["README.md", "m-F16.gguf", "m-Q4_0.gguf", "mmproj-F16.gguf"]
SPLIT = ["big/m-Q8_0-00001-of-00002.gguf", "big/m-Q8_0-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("files", "wanted", "chosen"),
    [
        (FILES, "Q4_0", ["m-Q4_0.gguf"]),
        (FILES, "q4_0", ["m-Q4_0.gguf"]),
        (FILES, "F16", ["m-F16.gguf"]),
        (FILES, "mmproj-F16.gguf", ["mmproj-F16.gguf"]),
        ([*FILES, *SPLIT], "Q8_0", SPLIT),
        ([*FILES, *SPLIT], SPLIT[1], SPLIT),
        (["a/only.gguf", "x.txt"], None, ["a/only.gguf"]),
        (["Q4_0/m.gguf", "Q8_0/m.gguf"], "q4_0", ["Q4_0/m.gguf"]),
        (["m-Q4_0/m-00001-of-00001.gguf", "m-Q8_0/m.gguf"], "Q8_0", ["m-Q8_0/m.gguf"]),
        (["m-Q4_0.gguf", "m-Q8_0.gguf.part1of2", "m-Q8_0.gguf.part2of2"], "Q4_0", ["m-Q4_0.gguf"]),
    ],
)
def test_choice(files: list[str], wanted: str | None, chosen: list[str]) -> None:
    assert choose_files(files, wanted) == chosen


@pytest.mark.parametrize(("files", "wanted"), [(FILES, None), (FILES, "Q2_K"), (["a.txt"], "Q4_0")])
def test_no_choice(files: list[str], wanted: str | None) -> None:
    with pytest.raises(UsageError):
        choose_files(files, wanted)


@pytest.mark.parametrize(
    "ends", [("part1of2", "part2of2"), ("part-a", "part-b"), ("part0", "part1")]
)
def test_pieces_of_a_file_are_joined_with_cat(ends: tuple[str, str]) -> None:
    pieces = [f"m-Q8_0.gguf.{end}" for end in ends]
    for files, wanted in (([*FILES, *pieces], "Q8_0"), (pieces, None)):
        with pytest.raises(
            UsageError, match=f"m-Q8_0.gguf is there in pieces.*{ends[1]}"
        ) as caught:
            choose_files(files, wanted)
        assert "cat PIECE... > m-Q8_0.gguf" in str(caught.value.hint)


def cached(folder: Path, sha: str, *names: str) -> list[str]:
    """Lay out a snapshot of owner/tiny in the hub's cache."""
    snapshot = folder / "hub/models--owner--tiny/snapshots" / sha
    for name in names:
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        tiny.windowed(snapshot / name)
    return [str(snapshot / name) for name in names]


def test_without_network_the_cache_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the hub was reached last by a commit, which leaves no reference to a branch."""
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (whole,) = cached(tmp_path, "a" * 40, "m-Q4_0.gguf")
    (other,) = cached(tmp_path, "b" * 40, "m-F16.gguf")
    ways = ("owner/tiny:Q4_0", "owner/tiny:F16", "owner/tiny:Q8_0", "owner/none")
    four, full, lacking, none = qdraft_batch(*(("models", "pull", way) for way in ways))
    assert (four.stdout.strip(), full.stdout.strip()) == (whole, other)
    assert "HF_HUB_OFFLINE is set: this is the copy in the cache" in " ".join(four.stderr.split())
    for failed, model in ((lacking, "owner/tiny:Q8_0"), (none, "owner/none")):
        assert failed.returncode == 1
        words = " ".join(failed.stderr.split())
        assert f"HF_HUB_OFFLINE is set, and the cache has no {model}" in words


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """One repository, owner/tiny, with one file of each kind."""
    pytest.importorskip("huggingface_hub")
    model = tiny.windowed(tmp_path / "a.gguf")
    with model.open("ab") as file:
        file.write(bytes(2**20))  # a scan leaves smaller files out
    content = {
        "README.md": b"# tiny\n",
        "tiny-F32.gguf": model.read_bytes(),
        "broken-Q4_0.gguf": b"<!DOCTYPE html>",
    }
    sha = "a" * 40

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = self.path.split("?")[0]
            name = path.rsplit("/", 1)[-1]
            if path.startswith("/api/models/owner/tiny"):
                siblings = [{"rfilename": file} for file in content]
                siblings.append({"rfilename": "huge-Q8_0.gguf", "size": 10**18})
                data = json.dumps({"id": "owner/tiny", "sha": sha, "siblings": siblings}).encode()
                self.reply(200, data, body, {"Content-Type": "application/json"})
            elif path.startswith(f"/owner/tiny/resolve/{sha}/") and name in content:
                etag = hashlib.sha256(content[name]).hexdigest()
                self.reply(200, content[name], body, {"X-Repo-Commit": sha, "ETag": f'"{etag}"'})
            else:
                self.reply(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})

        def reply(self, status: int, data: bytes, body: bool, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_pull(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("HF_ENDPOINT", hub),
        ("HF_HOME", str(tmp_path / "hf")),
        ("HF_HUB_DISABLE_TELEMETRY", "1"),
    ):
        monkeypatch.setenv(name, value)
    refused = (
        ("owner/tiny", 2, "more than one language model"),
        ("owner/tiny:Q2_K", 2, "this repository has no Q2_K"),
        ("owner/none:F32", 2, "no repository owner/none"),
        ("owner/tiny:Q4_0", 3, "is a web page"),
        ("owner/tiny:Q8_0", 1, "the download of owner/tiny needs 1000000000.0 GB in"),
        ("not a name", 2, "is not a repository name"),
    )
    # In a process of its own: the library reads its address when it is imported.
    done, as_json, scan, *failures = qdraft_batch(
        ("models", "pull", "owner/tiny:F32"),
        ("models", "pull", "owner/tiny:F32", "--json"),
        ("models", "scan", "--json"),
        *(("models", "pull", name) for name, _, _ in refused),
    )
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path.read_bytes() == (tmp_path / "a.gguf").read_bytes()
    shown = json.loads(as_json.stdout)
    jsonschema.validate(shown, schema("models-pull"))
    assert (shown["files"], shown["architecture"]) == ([str(path)], "gemma3")
    scanned = json.loads(scan.stdout)
    assert [Path(model["path"]).resolve() for model in scanned["models"]] == [path.resolve()]
    assert scanned["unreadable"] == []
    for (_, status, message), failed in zip(refused, failures, strict=True):
        assert failed.returncode == status, failed.stderr
        assert message in " ".join(failed.stderr.split())
    dead = qdraft_process("models", "pull", "owner/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert dead.returncode == 1
    assert "the hub cannot be reached" in dead.stderr
