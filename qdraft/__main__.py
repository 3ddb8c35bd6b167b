"""``python -m qdraft``."""

from qdraft.cli.main import main

main()
