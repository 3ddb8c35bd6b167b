"""Pure maths on numpy arrays: no clock, no printing, no global random state."""
