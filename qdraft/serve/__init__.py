"""An OpenAI-compatible server for pairs."""
