"""Where target and draft go: what they need, and what fits."""
