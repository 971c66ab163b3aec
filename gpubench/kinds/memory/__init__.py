"""Runs of `gpubench memory` with a model of gpubench: what fills the memory, and which batch size fits."""
