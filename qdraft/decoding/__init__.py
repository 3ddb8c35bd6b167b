"""The algorithm: numpy arrays in, records out; no clock, no printing, no global random state."""
