"""The methods of an open store, by subject. `Store` has all of them."""
