"""Reads files and rows and reports faults. Changes nothing, but finishes what a delete left half done."""
