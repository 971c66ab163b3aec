"""The search for the fastest settings: which combinations to run, and what follows from their results."""
