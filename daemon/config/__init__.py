"""The configuration file: its records, and the reload of a changed one."""
