"""Pairs by name: models.yaml, and the files that it names."""
