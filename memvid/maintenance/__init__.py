"""Keeping a store small: compaction, pruning, garbage collection, forgetting, and disk usage."""
