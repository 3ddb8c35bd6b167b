"""Running a module of qdraft in a child process, with this process's import path and no other."""

from __future__ import annotations

import sys


def command(module: str, *args: str) -> list[str]:
    """The command line that calls ``main(args)`` of ``module`` and exits with its status.

    Not ``python -m``: that would put the user's working directory first on the path.
    """
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    return [sys.executable, "-c", code, *args]
