"""Run directories: their files, and the summary of a run.

>>> from pathlib import Path
>>> from gpubench.runs.catalogue import Catalogue
>>> from gpubench.runs.reader import Run
>>> for entry in Catalogue(Path("results")).entries():  # the newest run first
...     print(entry.record.experiment, entry.record.status, f"{1000 * entry.metrics['step_time'].estimate:.2f} ms")
after completed 8.16 ms
before completed 10.20 ms
>>> run = Run.open(entry.path)
>>> run.status, len(run.steps), run.problems
('completed', 60, [])
"""
