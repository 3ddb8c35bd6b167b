"""Drafters: whatever proposes tokens for the target to verify."""
