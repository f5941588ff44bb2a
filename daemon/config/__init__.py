"""The configuration file: its records, and how a change of it is taken over."""
