"""A package for each kind of run; `gpubench.registry` has a row for each."""
