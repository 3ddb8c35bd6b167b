"""How many tokens to draft, and the costs that this follows from."""
