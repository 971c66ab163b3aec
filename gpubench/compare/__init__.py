"""Compares runs: which one is faster, by how much, and what explains the difference."""
