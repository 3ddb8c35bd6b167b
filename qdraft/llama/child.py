"""Child processes that run a module of qdraft with the import path of this process."""

from __future__ import annotations

import sys


def command(module: str, *args: str) -> list[str]:
    """Return the command line that calls ``main(args)`` of ``module`` and exits with its status.

    ``python -m`` would put the user's working directory first on the path.
    """
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    return [sys.executable, "-c", code, *args]
