"""Work that no request waits for: scrubbing, healing, analysis."""
