"""Pairs by name: models.yaml, and where files come from."""
