"""Which samples a pipeline reads, cut into global micro-batches. Pure."""
