"""The methods of an open store, by subject."""
