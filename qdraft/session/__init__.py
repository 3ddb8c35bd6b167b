"""A loaded pair, and the texts made with it."""
