"""The draft policy: how many tokens to draft, and the costs that decide it."""
