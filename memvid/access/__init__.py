"""What an open store can be asked for, by what one comes for. `Store` is all of it."""
