"""Inputs, mutations, targets and trials of `fuzz.py`."""
