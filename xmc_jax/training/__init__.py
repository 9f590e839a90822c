"""Training: the loop, its state, stages, refreshes, batches, checkpoints. It knows no family."""
