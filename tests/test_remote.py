"""Layers on another device: an RPC server on loopback is one, so all of it runs without a GPU.

Each case runs in a process of its own: servers that were added stay for the life of a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from invoke import one_error, qdraft_batch, schema
from servers import Relay, free_port, namespaces, require_rpc, server

pytestmark = pytest.mark.real

SHORT = ("-p", "Why is the sky blue?", "-n", "16", "--temp", "0", "-t", "1", "-c", "512")
FIXED = ("--draft-policy", "fixed")
SHARED = ("--share-kv", "on")  # whether it pays off for so small a model is a matter of chance
Files = tuple[str, ...]


@pytest.fixture(scope="module")
def far() -> Iterator[str]:
    require_rpc()
    with server() as (address, _):
        yield address


@pytest.fixture(scope="module")
def files(shallow: tuple[Path, Path]) -> Files:
    """A pair of six layers and an output, which counts as a layer."""
    return ("-m", str(shallow[0]), "-d", str(shallow[1]))


@pytest.fixture(scope="module")
def whole(smollm2: tuple[Path, Path], source_file: Path) -> Files:
    """A pair of thirty layers and an output, for plans that put a part of it elsewhere."""
    return ("-m", str(source_file), "-d", str(smollm2[1]))


def qdraft(*args: str) -> subprocess.CompletedProcess[str]:
    (result,) = qdraft_batch(args)
    return result


def run_json(*args: str, status: int = 0) -> dict[str, object]:
    result = qdraft("run", *args, "--json")
    assert result.returncode == status, result.stderr
    report = json.loads(result.stdout)
    jsonschema.validate(report, schema("run"))
    return dict(report)


class TestPlacement:
    def test_all_layers_elsewhere_and_the_draft_here(self, far: str, files: Files) -> None:
        """The same text, verified by the target alone, on cells that came over the link."""
        report = run_json(*files, *SHORT, *FIXED, *SHARED, "--rpc", far, "--check")
        target, draft = report["placed"]
        assert target["n_offloaded"] == 7
        assert target["devices"]["RPC0"]["n_layers"] == 7
        assert target["devices"]["RPC0"]["weights"] > 43e6
        assert target["surprises"] == []
        assert draft["n_offloaded"] == 0
        assert report["kv"] == {"shared": True, "reason": ""}
        assert report["check"]["same"] or report["check"]["explained"]
        assert report["summary"]["n_accepted"] > 0

    def test_some_layers_of_both(self, far: str, files: Files) -> None:
        report = run_json(
            *files,
            *SHORT,
            *FIXED,
            *SHARED,
            "--rpc",
            far,
            "-ngl",
            "3",
            "-ngld",
            "2",
            "-devd",
            "RPC0",
        )
        target, draft = report["placed"]
        assert {n: s["n_layers"] for n, s in target["devices"].items()} == {"CPU": 4, "RPC0": 3}
        assert {n: s["n_layers"] for n, s in draft["devices"].items()} == {"CPU": 5, "RPC0": 2}
        kv = {name: share["kv"] for name, share in target["devices"].items()}
        assert kv["CPU"] == 2 * kv["RPC0"]  # the output has none: 4 layers and 2
        assert report["kv"]["shared"]

    def test_a_file_as_its_own_draft_stays_near_alpha_1(self, far: str, files: Files) -> None:
        """Target elsewhere, draft here, the same file: cells and positions are right."""
        report = run_json(
            "-m",
            files[1],
            "-d",
            files[1],
            *SHORT,
            *FIXED,
            "--rpc",
            far,
            "-n",
            "60",
            "--temp",
            "1",
            "--top-k",
            "0",
            "--top-p",
            "1",
            "--min-p",
            "0",
            "-s",
            "7",
        )
        assert report["placed"][0]["n_offloaded"] == 7
        assert report["placed"][1]["n_offloaded"] == 0
        assert report["summary"]["alpha"] > 0.97

    def test_caches_and_tensors_kept_here(self, far: str, files: Files) -> None:
        report = run_json(
            *files,
            *SHORT,
            "--rpc",
            far,
            "-ngl",
            "all",
            "-nkvo",
            "-ot",
            r"blk\.[01]\.ffn_up=CPU",
            "-ctkd",
            "q8_0",
            "-ctvd",
            "q8_0",
            "-sm",
            "none",
            "-devd",
            "none",
        )
        target, draft = report["placed"]
        assert target["devices"]["RPC0"]["kv"] == 0
        assert target["devices"]["CPU"]["kv"] > draft["devices"]["CPU"]["kv"] > 0
        assert target["moved"] == {"CPU": 2}
        assert not report["kv"]["shared"]

    def test_cells_of_a_long_prompt_come_from_a_server(self, far: str, files: Files) -> None:
        """More of them than a physical batch, in quantized caches; the text is the target's own."""
        long = ("--raw", "-p", "The cat sat on the mat. " * 25, "-n", "8", "--temp", "0", "-t", "1")
        caches = ("-c", "512", "-ub", "128", "-ctk", "q8_0", "-ctv", "q8_0", "--rpc", far)
        report = run_json(*files, *long, *caches, "--share-kv", "on", "--check")
        assert report["kv"]["shared"]
        assert report["summary"]["n_prompt"] > 128
        assert report["check"]["same"] or report["check"]["explained"]

    def test_devices_of_an_entry_in_models_yaml(
        self, far: str, files: Files, tmp_path: Path
    ) -> None:
        own = tmp_path / "models.yaml"
        own.write_text(
            f"pairs:\n  far:\n    target: {files[1]}\n    draft: {files[3]}\n    context: 512\n"
            f"    devices:\n      rpc: {far}\n      device: RPC0\n      gpu-layers: 4\n"
            "      device-draft: none\n",
            encoding="utf-8",
        )
        report = run_json("--pair", "far", "--models-file", str(own), "-p", "Hi.", "-n", "4")
        assert [placed["n_offloaded"] for placed in report["placed"]] == [4, 0]
        plan = qdraft("plan", "--pair", "far", "--models-file", str(own), "--json")
        assert json.loads(plan.stdout)["devices"][0]["target"]["n_layers"] == 4

    def test_the_draft_elsewhere_and_the_target_here(self, far: str, files: Files) -> None:
        report = run_json(
            *files, *SHORT, "--rpc", far, "-dev", "none", "-devd", "RPC0", "-ngld", "all"
        )
        assert [placed["n_offloaded"] for placed in report["placed"]] == [0, 7]

    def test_what_is_shown(self, far: str, files: Files) -> None:
        said = qdraft("run", *files, *SHORT, "--rpc", far, "-ngl", "4").stderr
        assert "placed   target 4 layers on RPC0 (" in said
        assert "draft 7 layers on CPU" in said
        report = json.loads(qdraft("devices", "--rpc", far, "--json").stdout)
        jsonschema.validate(report, schema("devices"))
        assert {"RPC0", "CPU"} == {device["name"] for device in report["devices"]}
        assert next(d for d in report["devices"] if d["name"] == "RPC0")["remote"]
        assert not report["build"]["gpu_offload"]

    def test_what_is_refused_before_loading(self, far: str, files: Files) -> None:
        refused = (
            (("-dev", "RPC5"), "there is no device RPC5"),
            (("-dev", "CPU"), "there is no device CPU to put layers on"),
            (("-ngld", "5"), "all devices are RPC servers"),
            (("-ngl", "5", "-ngld", "5"), "all devices are RPC servers"),
            (
                ("-sm", "none", "-mg", "3"),
                "--main-gpu is 3 but must be less than the number of devices (1)",
            ),
            (("-ts", "1,2"), "--tensor-split has 2 parts but must have at most 1, one"),
            (("-dev", "none", "-ngl", "3"), "--device is none, so --gpu-layers must be 0"),
            (("-dev", "none", "-nkvo"), "--device is none, so --no-kv-offload must be left out"),
            (("-ot", "x=RPC9"), "tensors cannot be put on RPC9"),
            (("-sm", "row"), "--split-mode row does not work with RPC0"),
            (
                ("-devd", "none", "-ngld", "3"),
                "--gpu-layers-draft cannot be combined with --device-draft none",
            ),
            (("-devd", "none", "-otd", "x=RPC0"), "tensors cannot be put on RPC0"),
        )
        results = qdraft_batch(
            *(("run", *files, *SHORT, "--rpc", far, *options) for options, _ in refused)
        )
        for (_, words), result in zip(refused, results, strict=True):
            assert words in one_error(result, 2)


class TestPlan:
    def test_a_plan_is_what_llama_cpp_then_takes(self, far: str, whole: Files) -> None:
        """Weights, two caches and compute buffers of each device agree within 5 %.

        https://github.com/ollama/ollama/issues/17951
        """
        result = qdraft(
            "plan",
            *whole,
            "--rpc",
            far,
            "--vram",
            "80M",
            "-c",
            "1024",
            "--compare-loaded",
            "--json",
        )
        assert result.returncode == 0, result.stdout + result.stderr
        report = json.loads(result.stdout)
        jsonschema.validate(report, schema("plan"))
        assert 0 < report["devices"][0]["target"]["n_layers"] < 31
        kinds = {(row["device"], row["model"], row["kind"]) for row in report["verified"]}
        assert len(kinds) == 9  # three of the target on each device, three of the draft here
        assert all(row["agrees"] for row in report["verified"])
        exact = [r for r in report["verified"] if r["kind"] != "weights" or r["device"] != "CPU"]
        assert all(row["off"] < 0.005 for row in exact)

    def test_what_a_plan_does_not_take(self, far: str, whole: Files) -> None:
        refused = (
            (("-ts", "1"), "cannot be combined with --tensor-split"),
            (("-ot", "x=CPU"), "cannot be combined with --tensor-split"),
            (("--vram", "1G,1G"), "2 memory sizes are given but must be at most 1, one for"),
            (("--vram", "lots"), "must be a size such as 12G"),
        )
        *results, forced = qdraft_batch(
            *(("plan", *whole, "--rpc", far, *options) for options, _ in refused),
            ("plan", *whole, "--rpc", far, "-ngl", "31", "--vram", "50M"),
        )
        for (_, words), result in zip(refused, results, strict=True):
            assert words in one_error(result, result.returncode)
            assert result.returncode in (2, 6)
        assert "does not fit RPC0" in forced.stdout

    def test_auto_does_what_the_plan_says(self, far: str, files: Files) -> None:
        planned = json.loads(qdraft("plan", *files, "--rpc", far, "-c", "512", "--json").stdout)
        report = run_json(*files, *SHORT, "--rpc", far)
        n = planned["devices"][0]["target"]["n_layers"]
        assert report["placed"][0]["n_offloaded"] == n == 7

    def test_the_options_that_a_plan_prints_do_what_it_says(self, far: str, whole: Files) -> None:
        """Over two devices, of which each has room for a part."""
        require_rpc()
        with server() as (second, _):
            both = ("--rpc", f"{far},{second}", "-c", "512")
            planned = qdraft("plan", *whole, *both, "--vram", "60M,70M", "--json")
            plan = json.loads(planned.stdout)
            jsonschema.validate(plan, schema("plan"))
            counts = {use["device"]: use["target"]["n_layers"] for use in plan["devices"]}
            assert all(0 < n < 31 for n in counts.values()), counts
            report = run_json(*whole, *SHORT, *plan["run"].split())
            main = run_json(*whole, *SHORT, *both, "-ngl", "all", "-sm", "none", "-mg", "1")
        placed = report["placed"][0]["devices"]
        assert {name: placed[name]["n_layers"] for name in counts} == counts
        assert main["placed"][0]["devices"]["RPC1"]["n_layers"] == 31
        assert "RPC0" not in main["placed"][0]["devices"]

    def test_memory_that_runs_out_is_explained_and_tried_again_smaller(self, whole: Files) -> None:
        """The server claims the memory of the machine, but may take less."""
        require_rpc()
        if not Path("/proc/self/status").exists():
            pytest.skip("needs /proc")
        with server() as (_, process):
            status = Path(f"/proc/{process.pid}/status").read_text()
        most = int(status.split("VmPeak:")[1].split()[0]) + 200_000  # kB; all of it takes 300 MB
        less = ("bash", "-c", f'ulimit -v {most}; exec "$@"', "-")
        with server(prefix=less) as (address, _):
            result = qdraft("run", *whole, *SHORT, "--rpc", address, "-c", "8192", "--json")
            assert result.returncode == 0, result.stderr
            assert "trying again with 90 %" in result.stderr
            report = json.loads(result.stdout)
            assert report["text"]
            result = qdraft("run", *whole, *SHORT, "--rpc", address, "-c", "8192", "-ngl", "31")
            assert "failed to allocate" in one_error(result, 6)
            assert "qdraft plan says that this fits" in result.stderr


class TestServers:
    def test_one_that_is_down(self, files: Files) -> None:
        require_rpc()
        started = time.monotonic()
        said = one_error(qdraft("run", *files, *SHORT, "--rpc", f"127.0.0.1:{free_port()}"), 6)
        assert "no RPC server answers at 127.0.0.1" in said
        assert time.monotonic() - started < 15

    def test_one_that_is_named_wrongly(self, files: Files) -> None:
        wrong = ("host", "host:", "host:99999", "a:1,b")
        for result in qdraft_batch(*(("run", *files, *SHORT, "--rpc", name) for name in wrong)):
            assert "must be HOST:PORT" in one_error(result, 2)

    def test_one_of_another_version(self, files: Files) -> None:
        """A greeting of version 99, and a program that speaks something else."""
        require_rpc()
        reply = (4 + 24).to_bytes(8, "little") + bytes([99, 0, 0, 0]) + bytes(24)
        for answer in (reply, b"HTTP/1.1 400 Bad Request\r\n\r\n"):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                threading.Thread(target=_answer, args=(listener, answer), daemon=True).start()
                port = listener.getsockname()[1]
                result = qdraft("run", *files, *SHORT, "--rpc", f"127.0.0.1:{port}")
                assert "does not answer as an RPC server of this version" in one_error(result, 6)
                assert "the same version of llama-cpp-python" in result.stderr

    def test_one_that_is_killed_in_the_middle_of_a_text(self, files: Files) -> None:
        """An error within seconds, and the text so far; llama.cpp itself would abort."""
        require_rpc()
        long = ("-p", "Tell a long story.", "-n", "400", "--ignore-eos", "-t", "1", "-c", "512")
        with server() as (address, process):
            text, said, status, waited = _lose(
                ["run", *files, *long, "--rpc", address],
                lambda: process.send_signal(signal.SIGKILL),
            )
        assert status == 6
        assert len(text) > 20
        assert "an RPC server is lost" in said
        assert "qdraft rpc-server" in said
        assert "ended by an error" in said  # the summary is there too
        assert waited < 10

    def test_one_client_at_a_time(self, far: str) -> None:
        """The second one is told, and not at the cost of the first; a study lets its cells in."""
        second = (
            "import sys; from qdraft.llama import rpc; rpc._GREETING_S = 3.0; "
            "from qdraft.cli.main import main; main(['devices', '--rpc', sys.argv[1]])"
        )
        code = (
            "import subprocess, sys; from qdraft.llama.rpc import connect; "
            "connect([sys.argv[1]], hold=sys.argv[2] == 'hold'); "
            f"second = {second!r}; "
            "sys.exit(subprocess.run([sys.executable, '-c', second, sys.argv[1]]).returncode)"
        )
        for hold, status in (("free", 0), ("hold", 6), ("free", 0)):
            done = subprocess.run(
                [sys.executable, "-c", code, far, hold], capture_output=True, text=True, timeout=60
            )
            assert done.returncode == status, done.stderr
            assert ("one client at a time" in done.stderr) == (status == 6)

    def test_a_port_that_is_taken(self, far: str) -> None:
        said = one_error(qdraft("rpc-server", "-p", far.split(":")[1]), 6)
        assert "the RPC server cannot listen at" in said
        assert ": Address already in use" in said

    def test_a_device_that_is_not_there(self) -> None:
        require_rpc()
        said = one_error(qdraft("rpc-server", "-dev", "CUDA9", "-p", str(free_port())), 2)
        assert "there is no device CUDA9" in said

    def test_the_warning_of_an_open_port(self) -> None:
        require_rpc()
        process = subprocess.Popen(
            [sys.executable, "-m", "qdraft", "rpc-server", "-H", "0.0.0.0", "-p", str(free_port())],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        assert process.stdout is not None
        lines = [process.stderr.readline() for _ in range(2)]
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)  # Ctrl-C ends it at once
        out, _ = process.communicate(timeout=10)
        assert out == ""
        assert any("no authentication" in line for line in lines)


def test_a_slow_link_makes_fewer_and_longer_rounds(far: str, files: Files) -> None:
    """By the costs that are measured: an answer takes 20 ms, whatever the number of rows.

    The draft then keeps cells of its own: to copy them takes an answer for each layer.
    """
    args = (*files, *SHORT, "-n", "80", "-p", "Count from 1 to 40.")
    relay = Relay(far, 0.01)
    try:
        reports = [run_json(*args, "--rpc", address) for address in (far, relay.address)]
    finally:
        relay.close()
    near, slow = ([r["n_emitted"] for r in run["rounds"][8:]] for run in reports)
    assert sum(slow) / len(slow) > 1.3 * sum(near) / len(near)
    assert "copying cells takes" in reports[1]["kv"]["reason"]


def test_a_target_over_two_machines_and_a_cable_that_is_pulled(files: Files) -> None:
    """Two hosts in network namespaces; what llama.cpp would wait for without end is noticed."""
    require_rpc()
    port = free_port()
    long = ("-p", "Tell a long story.", "-n", "400", "--ignore-eos", "-t", "1", "-c", "512")
    with (
        namespaces(2) as hosts,
        server(hosts[0][1], prefix=hosts[0][0], port=port) as (first, _),
        server(hosts[1][1], prefix=hosts[1][0], port=port) as (second, _),
    ):
        both = ("--rpc", f"{first},{second}")
        report = run_json(*files, *SHORT, *SHARED, *both, "-ngl", "all", "-ts", "1,1")
        layers = {n: s["n_layers"] for n, s in report["placed"][0]["devices"].items()}
        assert layers == {"RPC0": 4, "RPC1": 3, "CPU": 0}
        assert report["kv"]["shared"]
        for split in ((), ("-ts", "3,1")):
            tensor = (*both, "-ngl", "all", "-sm", "tensor", *split)
            as_one = run_json(*files, *SHORT, *tensor, "--check")
            assert as_one["placed"][0]["n_offloaded"] == 7
            assert as_one["placed"][0]["surprises"] == []
            assert as_one["check"]["same"] or as_one["check"]["explained"]
        text, said, status, waited = _lose(
            ["run", *files, *long, *both, "-ngl", "all", "-ts", "1,1"],
            lambda: subprocess.run(["ip", "link", "set", hosts[1][2], "down"], check=True),
        )
        assert status == 6
        assert len(text) > 20
        assert "an RPC server is lost" in said
        assert waited < 30


def _answer(listener: socket.socket, answer: bytes) -> None:
    """Take connections (the first one only looks whether anybody is there) and say one thing."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError):
            if connection.recv(1):
                connection.recv(1000)
                connection.sendall(answer)
                connection.recv(1000)


def _lose(args: list[str], lose: object) -> tuple[str, str, int, float]:
    """Run, ``lose`` the server once there is text: stdout, stderr, status, seconds until the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "qdraft", *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ,
    )
    assert process.stdout is not None
    text = process.stdout.read(40)
    started = time.monotonic()
    lose()  # type: ignore[operator]
    rest, said = process.communicate(timeout=60)
    waited = time.monotonic() - started
    return (text + rest).decode(), said.decode(), process.returncode, waited
