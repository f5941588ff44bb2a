"""The sessions in memory and asleep: turns, wakes, sleeps, listings and plans."""
