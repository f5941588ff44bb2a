"""Blocks that one session has and another can start from, and why they were or were not used."""
