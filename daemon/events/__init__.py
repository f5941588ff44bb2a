"""The daemon's events: their records, and the bus that passes them on."""
