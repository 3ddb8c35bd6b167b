"""Constraints: from a JSON schema, a grammar or a regex to the tokens that may follow a text."""
