"""All changes of an open store: the core that all operations share, sleeping, rewriting, deletion."""
