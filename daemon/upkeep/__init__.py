"""Work that nobody waits for: scrubbing, healing, analysis."""
