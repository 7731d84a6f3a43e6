"""Training: the step, optimizers, data, checkpoints, and the loop that joins them."""
