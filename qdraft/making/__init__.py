"""Making drafts: importance matrix, recipes, quantization, proof."""
