"""The control groups of this process, of Linux's version 1 and 2: what they let it use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_NO_LIMIT = 2**60  # version 1 writes a number of this order if there is none


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPUs' worth of time that this process may use; None without a quota.

    ``root`` is the directory that holds /proc and /sys, here and below.
    """
    quotas = []
    for group in _groups("cpu", root):
        quota, period = [*_words(group / "cpu.max"), "", ""][:2]
        if not quota:  # version 1
            quota = "".join(_words(group / "cpu.cfs_quota_us"))
            period = "".join(_words(group / "cpu.cfs_period_us"))
        if quota.isdecimal() and period.isdecimal() and int(period):  # not "max" or -1
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that the groups still let this process take; None without limit.

    Cached files count as free, because the system drops them before it kills anything.
    """
    rooms = []
    for group in _groups("memory", root):
        limits = (
            _number(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
        )
        known = [limit for limit in limits if limit is not None and limit < _NO_LIMIT]
        if known:
            rooms.append(max(0, min(known) - _used(group)))
    return min(rooms, default=None)


def _used(group: Path) -> int:
    """Return the bytes that a group uses, without cached files."""
    used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
    words = _words(group / "memory.stat")
    statistics = dict(zip(words[::2], words[1::2], strict=False))
    # In version 1 only the names that begin with total_ count the groups below.
    prefix = "total_" if "total_inactive_file" in statistics else ""
    cached = (statistics.get(f"{prefix}{kind}_file", "0") for kind in ("inactive", "active"))
    return max(0, used - sum(map(int, cached)))


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Give the directories of the process's own group and of its parents, in both versions."""
    own = {}  # by version 2's name for all controllers, "", and version 1's names
    for line in _lines(root / "proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        own.update(dict.fromkeys(names.split(","), path))
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, rest = line.partition(" - ")
        kind, _, options = [*rest.split(), "", "", ""][:3]
        name = controller if kind == "cgroup" else ""
        known = kind == "cgroup2" or (kind == "cgroup" and controller in options.split(","))
        if not known or name not in own:
            continue
        shown, mount = (_unescape(field) for field in fields.split()[3:5])
        top = root / mount.lstrip("/")
        # A container sees its group, or a group above it, as the root of the mount.
        group = Path(own[name])
        group = top / (group.relative_to(shown) if group.is_relative_to(shown) else "")
        while group != top:
            yield group
            group = group.parent
        yield top


def _unescape(text: str) -> str:
    """Return a path of mountinfo, which writes spaces and the like as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _number(path: Path) -> int | None:
    text = "".join(_words(path))
    return int(text) if text.isdecimal() else None


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    """Return the lines of a file; none if it is missing or unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
