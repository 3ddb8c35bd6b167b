"""What this process may use of its machine: threads and memory, read from fakes of /proc and /sys."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from qdraft import host
from qdraft.host import MemoryBound, default_threads, free_memory, memory_bound

GIB = 2**30
# Mount points as of cgroup version 2, and of version 1, where a container sees its own group.
UNIFIED = "31 23 0:28 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw"
V1 = [
    "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
]


def machine(root: Path, files: dict[str, object], n_cpus: int = 16) -> Path:
    """A machine with two CPUs on each core, 20 GiB of free memory, and these files."""
    threads = {
        f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": f"{i // 2 * 2}"
        for i in range(n_cpus)
    }
    memory = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {20 * 2**20} kB\n"}
    for name, content in {**threads, **memory, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


@pytest.fixture(autouse=True)
def _cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_allowed_cpus", lambda: set(range(16)))


def test_without_limits(tmp_path: Path) -> None:
    root = machine(tmp_path, {})
    assert default_threads(root) == 8
    assert memory_bound(root) == MemoryBound(20 * GIB, "")
    assert free_memory(tmp_path / "nothing") is None
    assert default_threads(tmp_path / "nothing") == 8  # two threads on each core are assumed


class TestVersion2:
    def test_the_own_group_and_its_parents(self, tmp_path: Path) -> None:
        """The root of the mount has no limits; a parent's may be lower than its child's."""
        group = "sys/fs/cgroup/user.slice/run.scope"
        files = {
            "proc/self/cgroup": "0::/user.slice/run.scope",
            "proc/self/mountinfo": UNIFIED,
            f"{group}/cpu.max": "max 100000",
            f"{group}/memory.max": 6 * GIB,
            f"{group}/memory.current": 3 * GIB,
            f"{group}/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file {GIB // 2}",
            "sys/fs/cgroup/user.slice/cpu.max": "350000 100000",
            "sys/fs/cgroup/user.slice/memory.max": "max",
            "sys/fs/cgroup/user.slice/memory.current": 9 * GIB,
        }
        root = machine(tmp_path, files)
        assert default_threads(root) == 3
        bound = memory_bound(root)
        assert bound == MemoryBound(9 * GIB // 2, "the memory limit of this control group")
        assert str(bound) == "4.50 GiB are free under the memory limit of this control group"
        (root / "sys/fs/cgroup/user.slice/memory.high").write_text(f"{10 * GIB}")
        assert free_memory(root) == GIB  # the system slows a group down above it

    def test_a_quota_of_less_than_a_cpu(self, tmp_path: Path) -> None:
        files = {
            "proc/self/cgroup": "0::/",
            "proc/self/mountinfo": UNIFIED,
            "sys/fs/cgroup/cpu.max": "20000 100000",
        }
        assert default_threads(machine(tmp_path, files)) == 1


@pytest.mark.parametrize(
    ("shown", "own", "below"),
    [("/", "/docker/12", "docker/12"), ("/docker/12", "/docker/12", ""), ("/", "/../12", "")],
    ids=["on the host", "in a container", "in a namespace"],
)
def test_version_1(tmp_path: Path, shown: str, own: str, below: str) -> None:
    cpu, memory = (f"sys/fs/cgroup/{name}/{below}" for name in ("cpu,cpuacct", "memory"))
    files = {
        "proc/self/cgroup": f"5:cpu,cpuacct:{own}\n4:memory:{own}\n1:name=systemd:/\n0::/",
        "proc/self/mountinfo": "\n".join(V1).format(root=shown),
        f"{cpu}/cpu.cfs_quota_us": 200000,
        f"{cpu}/cpu.cfs_period_us": 100000,
        f"{memory}/memory.limit_in_bytes": 4 * GIB,
        f"{memory}/memory.usage_in_bytes": 3 * GIB,
        f"{memory}/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file 0",
    }
    root = machine(tmp_path, files)
    assert default_threads(root) == 2
    assert free_memory(root) == 2 * GIB
    (root / f"{cpu}/cpu.cfs_quota_us").write_text("-1")
    (root / f"{memory}/memory.limit_in_bytes").write_text("9223372036854771712")
    assert default_threads(root) == 8
    assert free_memory(root) == 20 * GIB


def test_slow_cores_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six fast cores with two threads each and eight slow ones; then an ARM of two kinds."""
    intel = {
        "sys/devices/cpu_core/cpus": "0-9,10-11",
        "sys/devices/cpu_atom/cpus": "12-15",
        **{
            f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": i for i in range(12, 16)
        },
    }
    root = machine(tmp_path / "intel", intel)
    assert default_threads(root) == 6
    arm: dict[str, object] = {
        f"sys/devices/system/cpu/cpu{i}/cpu_capacity": 1024 if i >= 12 else 300 + i
        for i in range(16)
    }
    assert default_threads(machine(tmp_path / "arm", arm)) == 2
    monkeypatch.setattr(host, "_allowed_cpus", lambda: {12, 13})
    assert default_threads(root) == 2  # only slow ones are allowed


@pytest.mark.skipif(sys.platform != "linux", reason="ulimit -v is Linux's")
def test_the_limit_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    assert host.address_bound() is None
    limit = resource.getrlimit
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda kind: (2**50, 2**50) if kind == resource.RLIMIT_AS else limit(kind),
    )
    bound = host.address_bound()
    assert bound is not None
    assert 2**49 < bound.n_bytes < 2**50
    assert str(bound).endswith("GiB are free under ulimit -v")
