"""Models and adapters in memory: their files, chat template, canary, and how fast they are."""
