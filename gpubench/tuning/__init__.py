"""The search for the fastest settings: what to try, which combinations to run, and what the results prove.

A `Search` knows nothing of settings or runs: it asks for combinations of levels, and is told their throughput.

>>> from math import log
>>> from gpubench.tuning.knowledge import Result
>>> from gpubench.tuning.search import Factor, Search
>>> search = Search([Factor("compile"), Factor("workers")])
>>> while block := search.next():  # level 0 of each factor is the setting as it is
...     search.record([Result(log(130 if compiled else 100)) for compiled, workers in block.runs])
>>> conclusion = search.conclude()
>>> conclusion.best, conclusion.proved, round(conclusion.gain.ratio, 2)
((1, 0), True, 1.3)
"""
