"""The command line: one file for each command, the only modules that import typer."""
