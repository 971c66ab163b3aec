"""The worker processes that measure. The command line starts them and imports nothing that loads torch."""
