"""The matrix of cache kinds: every architecture of the installed mlx-lm, slept and woken in a new process."""
