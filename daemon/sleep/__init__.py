"""From memory to the store and back: sleep, wake, ledgers, recomputation, forks, fewer bits."""
