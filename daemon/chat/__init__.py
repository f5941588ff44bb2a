"""Conversations: messages, transcripts, and the folding of a full context."""
