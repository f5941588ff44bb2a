"""Commands for people and scripts. Knows nothing of mlx."""
