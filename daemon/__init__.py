"""Models, sessions and the engine. Knows nothing of wire formats or argv."""
