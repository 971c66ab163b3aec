"""Runs against runs, without torch."""
