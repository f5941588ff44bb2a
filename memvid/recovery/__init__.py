"""Opening, the journal, and repair."""
