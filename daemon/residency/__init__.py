"""Which sessions are in memory, which sleep, and how they are listed and planned for."""
