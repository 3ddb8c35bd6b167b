"""This machine: its CPU, memory and load, and how much of them this process may use."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

from qdraft import cgroups

_ROOT = Path("/")
# A core with less than this share of the fastest one's capacity only holds the others up.
_SLOW = 0.5
_SAMPLE = 2**25  # bytes that one part of a measurement of the disk reads


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """The bytes that this process can still take, and whose limit that is."""

    n_bytes: int
    limit: str  # "" for the machine's memory, or where the limit comes from

    def __str__(self) -> str:
        where = f" under {self.limit}" if self.limit else ""
        return f"{self.n_bytes / 2**30:.2f} GiB are free{where}"


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


def default_threads(root: Path = _ROOT) -> int:
    """Return the number of fast physical cores, within the CPUs and the quota of this process.

    All threads wait for the slowest one, so cores made to save power are left out. ``root`` is the
    directory that holds /proc and /sys, here and below.
    """
    cpus = _fast_cpus(_allowed_cpus(), root)
    quota = cgroups.cpu_quota(root)
    most = len(cpus) if quota is None else int(quota)
    return max(1, min(_physical_cores(cpus, root), most))


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


def free_memory(root: Path = _ROOT) -> int | None:
    """Return the bytes of memory that this process can still take; None if it is unknown.

    The memory of mapped files counts as free, because the system can drop it.
    """
    bound = memory_bound(root)
    return bound.n_bytes if bound else None


def memory_bound(root: Path = _ROOT) -> MemoryBound | None:
    """Return what bounds the memory of this process: the machine, or a control group's limit."""
    of_group = cgroups.free_memory(root)
    bounds = [
        MemoryBound(n_bytes, limit)
        for n_bytes, limit in (
            (_available(root), ""),
            (of_group, "the memory limit of this control group"),
        )
        if n_bytes is not None
    ]
    return min(bounds, key=lambda bound: bound.n_bytes, default=None)


def address_bound() -> MemoryBound | None:
    """Return what bounds memory and mapped files together, which is `ulimit -v`; None without."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return None
        n_pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError, ValueError, IndexError):
        return None
    return MemoryBound(max(0, limit - n_pages * resource.getpagesize()), "ulimit -v")


def _available(root: Path) -> int | None:
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
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


def disk_speed(path: Path) -> float | None:
    """Measure how many bytes a second the disk gives of a file; None where that is impossible.

    Reads parts of the file that the system is first asked to drop from memory; the fastest counts,
    because other programs may use the disk too.
    """
    if not hasattr(os, "posix_fadvise"):
        return None
    size, speeds = path.stat().st_size, [0.0]
    with path.open("rb", buffering=0) as file:
        for share in (0.2, 0.5, 0.8):
            start = int(share * size)
            os.posix_fadvise(file.fileno(), start, _SAMPLE, os.POSIX_FADV_DONTNEED)
            file.seek(start)
            started = time.perf_counter()
            n_read = len(file.read(_SAMPLE))
            speeds.append(n_read / max(1e-9, time.perf_counter() - started))
    return max(speeds) or None


def bytes_read() -> int:
    """Return the bytes that this process has read from disks so far; 0 where it is unknown."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return 512 * resource.getrusage(resource.RUSAGE_SELF).ru_inblock


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _fast_cpus(cpus: set[int], root: Path) -> set[int]:
    """Return the CPUs without those of slow cores; all of them if no other is allowed.

    Linux lists the fast CPUs of an Intel hybrid, and the capacity of each CPU of an ARM one.
    """
    listed = _parse_cpus(root / "sys/devices/cpu_core/cpus")
    if listed:
        return cpus & listed or cpus
    capacity = root / "sys/devices/system/cpu"
    try:
        capacities = {
            cpu: int((capacity / f"cpu{cpu}/cpu_capacity").read_text(encoding="ascii"))
            for cpu in cpus
        }
    except (OSError, ValueError):
        return cpus
    fastest = max(capacities.values(), default=0)
    return {cpu for cpu, value in capacities.items() if value >= _SLOW * fastest}


def _parse_cpus(path: Path) -> set[int]:
    """Return the CPUs of a list such as 0-3,8; none if there is no such file."""
    try:
        parts = path.read_text(encoding="ascii").strip().split(",")
        ends = [[int(end) for end in part.split("-")] for part in parts]
    except (OSError, ValueError):
        return set()
    return {cpu for first, *last in ends for cpu in range(first, (last or [first])[0] + 1)}


def _physical_cores(cpus: set[int], root: Path) -> int:
    folder = root / "sys/devices/system/cpu"
    try:
        files = [folder / f"cpu{cpu}/topology/thread_siblings_list" for cpu in cpus]
        return len({file.read_text() for file in files})
    except OSError:
        # As llama.cpp guesses if the topology is unknown: two threads on each core.
        return len(cpus) if len(cpus) <= 4 else len(cpus) // 2
