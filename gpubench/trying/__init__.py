"""Runs that hold a diagnosis to its word: its fixes, and the batches that should fit, in fresh processes."""
