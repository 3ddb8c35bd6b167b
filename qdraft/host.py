"""This machine: its CPU, memory and load, and how much of them this process may use."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path


def cpu_name() -> str:
    """Return the name of the CPU, as its maker writes it."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in info.splitlines() if "model name" in line)
    return next(names, platform.machine())


def cpu_id() -> str:
    """Identify this CPU by its model and the instruction sets that it advertises."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{platform.machine()} {platform.processor()}".strip()
    lines = info.split("\n\n", 1)[0].splitlines()
    traits = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    return f"{platform.machine()}-{hashlib.sha256(' '.join(traits).encode()).hexdigest()[:16]}"


def default_threads() -> int:
    """Return the number of physical cores, within the CPUs and the quota of this process."""
    allowed = _allowed_cpus()
    quota = _cgroup_quota()
    return max(1, min(_physical_cores(allowed), quota or len(allowed)))


def load_average() -> float | None:
    """Return how many threads wanted a CPU in the last minute, on average; None if unknown."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # not on Windows
        return None


def is_overloaded() -> bool:
    """Tell whether other programs want more CPU time than this machine has.

    Two OpenMP threads that have to share a core can take a hundred times as long for a token.
    """
    load = load_average()
    # A text that qdraft has just finished adds one thread for each core.
    return load is not None and load > 2 * (os.cpu_count() or 1)


def free_memory() -> int | None:
    """Return the bytes of memory that programs can still take; None if it is unknown."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None


def resident_memory() -> int | None:
    """Return the bytes of this process that are in memory; None if it is unknown."""
    try:
        n_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    import resource

    return n_pages * resource.getpagesize()


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _physical_cores(cpus: set[int]) -> int:
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    try:
        return len({Path(topology.format(cpu)).read_text() for cpu in cpus})
    except OSError:
        # As llama.cpp guesses if the topology is unknown: two threads on each core.
        return len(cpus) if len(cpus) <= 4 else len(cpus) // 2


def _cgroup_quota() -> int | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return None
