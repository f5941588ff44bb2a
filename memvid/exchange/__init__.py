"""Export, import and backup."""
