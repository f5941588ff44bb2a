"""What leaves a store and comes into it: export, import, backup, tensors for other programs."""
