"""Trees of branches: the futures of one session in memory, their registry, their steps, and whose they are."""
