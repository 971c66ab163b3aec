"""The contents of a device's memory: recorded or predicted allocations in order, and their sums.

>>> from gpubench.memory.allocation_log import Allocation, AllocationLog, PhaseStart
>>> from gpubench.memory.analysis import footprint
>>> allocations = [Allocation(4096, begin=0, end=2), Allocation(1024, begin=1)]
>>> log = AllocationLog(allocations, [PhaseStart(0, "forward", step=0)], length=3)
>>> footprint(log, source="measured", device="cuda:0", capacity=None).peak.level.requested
5120
"""
