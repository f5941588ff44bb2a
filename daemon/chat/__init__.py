"""Conversations: what a message reads and writes, folding of a full context."""
