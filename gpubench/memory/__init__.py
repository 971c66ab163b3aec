"""The contents of a device's memory: recorded or predicted allocations in order, and their sums."""
