"""What all operations share, and those that make and remove versions."""
