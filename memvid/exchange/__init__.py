"""Export, import, backup, and tensors for other programs."""
