"""The process of the command line: starts the workers of a run, listens to them, shows and keeps what they say."""
