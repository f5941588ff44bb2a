"""The index of a store: one SQLite file, made from the bundles and disposable.

No fact stands in it alone for good: it can be made anew from the files."""
