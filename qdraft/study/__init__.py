"""Studies: what is measured on models, machines and texts."""
