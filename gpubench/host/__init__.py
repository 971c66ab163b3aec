"""The process of the command line: starts the workers of a run, receives their events, shows progress and keeps
results."""
