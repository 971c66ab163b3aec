"""Analyses a trace of any PyTorch program, without torch and in exact nanoseconds.

>>> from pathlib import Path
>>> from gpubench.trace.analyse import analyse
>>> from gpubench.trace.load import read
>>> profile = analyse([read(Path("trace.json"))])
>>> [kernel.name for kernel in profile.ranks[0].kernels]
['gemm']
"""
