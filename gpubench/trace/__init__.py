"""Analyses a trace of any PyTorch program, without torch and in exact nanoseconds."""
