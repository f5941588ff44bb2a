"""The engine thread, which alone calls MLX: generation, batches, sampling, admission, cancellation."""
