"""The memory budget: memory of models and sessions, waiting requests, eviction; loading and unloading of models."""
