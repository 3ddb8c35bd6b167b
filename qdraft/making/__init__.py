"""Making drafts: importance matrix, recipes, quantization, measurement."""
