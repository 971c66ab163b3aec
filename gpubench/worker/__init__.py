"""The worker processes that measure. Only they and the probe import torch."""
