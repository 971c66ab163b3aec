"""Run directories: their files, and the summary of a run."""
