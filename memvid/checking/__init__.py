"""Reads files and rows and tells what is wrong with them; changes nothing but what a delete left half done."""
