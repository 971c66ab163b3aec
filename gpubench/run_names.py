"""Names in a folder of results that the settings go by too, apart from `runs` and the libraries that it takes."""

RUN = "run.json"
"""Makes a folder a run's: a config.yaml beside it is what was run."""

TRIALS = "-verify"
"""Ends the name of an experiment of runs that try the fixes of another."""
