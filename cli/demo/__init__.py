"""`torpor demo`: an agent reads, sleeps, loses its process, wakes and goes on."""
