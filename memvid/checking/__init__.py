"""Verify: reads what is there and says what is wrong with it."""
