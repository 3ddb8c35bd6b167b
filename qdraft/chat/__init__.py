"""A chat with a pair: its messages and their tokens, its transcript and its commands."""
