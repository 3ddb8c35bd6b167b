"""GGUF files on disk."""
