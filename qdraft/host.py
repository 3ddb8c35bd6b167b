"""This machine: its CPU, and how much of it this process may use."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path


def cpu_name() -> str:
    """The CPU's name, for people."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.split(":", 1)[1].strip() for line in info.splitlines() if "model name" in line)
    return next(named, platform.machine())


def cpu_id() -> str:
    """Names this CPU: its model and the instruction sets that it advertises."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{platform.machine()} {platform.processor()}".strip()
    lines = info.split("\n\n", 1)[0].splitlines()
    told = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    return f"{platform.machine()}-{_digest(' '.join(told))}"


def default_threads() -> int:
    """Physical cores, bounded by the CPUs and the quota that this process is given."""
    allowed = _allowed_cpus()
    quota = _cgroup_quota()
    return max(1, min(_physical_cores(allowed), quota or len(allowed)))


def overload() -> str | None:
    """In words, that other programs want more than this machine has; None where they do not.

    Two OpenMP threads that have to share a core can take a hundred times as long for a token.
    """
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # not on Windows
        return None
    cores = os.cpu_count() or 1
    if load <= 2 * cores:  # a text of ours that has just ended counts for as much as the cores
        return None
    return f"the load of this machine is {load:.1f} on {cores} cores: times will say little"


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _physical_cores(cpus: set[int]) -> int:
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    try:
        return len({Path(topology.format(cpu)).read_text() for cpu in cpus})
    except OSError:
        # llama.cpp's own guess where the topology is not known: two threads a core.
        return len(cpus) if len(cpus) <= 4 else len(cpus) // 2


def _cgroup_quota() -> int | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
