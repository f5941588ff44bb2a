"""Keeping a store small: compaction, pruning, garbage collection, forgetting, and how much it takes."""
