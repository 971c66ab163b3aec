"""Compares runs: which one is faster, by how much, and what explains the difference.

>>> from pathlib import Path
>>> from gpubench.compare.compare import compare
>>> from gpubench.compare.evidence import aligned
>>> from gpubench.compare.inputs import find
>>> sides, left_out = find(["before", "after"], Path("results"))  # names, as `gpubench compare` takes them
>>> [comparison] = compare(aligned(sides)).comparisons
>>> verdict = next(one for one in comparison.verdicts if one.metric == "step_time")
>>> verdict.verdict, round(verdict.ratio, 2)
('faster', 0.8)
"""
