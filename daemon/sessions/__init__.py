"""A session: its tokens, its text, the order of its requests, and how its work is traced."""
