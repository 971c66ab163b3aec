"""What fills a device's memory: recorded or predicted allocations in order, and what they add up to.

Importing this package does not import torch.
"""
