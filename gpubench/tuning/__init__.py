"""Finds the fastest settings of a program, and proves them."""
