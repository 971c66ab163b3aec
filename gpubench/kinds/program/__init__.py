"""Runs of a program of the user: its time, its profile and its memory."""
