"""Follows every tensor of a training step, with memory behind it or without."""
