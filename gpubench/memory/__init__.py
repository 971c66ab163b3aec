"""The contents of a device's memory: recorded or predicted allocations in order, and their sums.

Importing this package does not import torch.
"""
