"""Model state to blocks and back: capture, restore, identity. Knows nothing of sockets or processes."""
