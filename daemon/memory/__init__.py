"""The memory budget: what models and sessions take, who waits, who leaves; loading and unloading of models."""
