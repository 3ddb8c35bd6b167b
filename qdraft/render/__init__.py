"""What people see: the only modules that import rich."""
