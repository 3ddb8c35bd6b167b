"""Where two copies of a model go: what they need, what fits, and whether it was true."""
