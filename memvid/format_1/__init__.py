"""Reads what a store of format 1 has, to carry it over: bundles, marks and notes. Writes nothing of that format."""
