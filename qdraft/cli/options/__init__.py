"""The options of the commands, one dataclass a group."""
