"""The peak of three training steps on the CPU, three times, in bytes: predicted on tensors without memory, as tracked
while they really ran, and by the allocator's own count of that run, which torch.profiler records.

The allocator also counts what an operator takes for itself while it runs, which a tracker of tensors cannot see. The
settings of `gpubench memory` are the one argument, as JSON by their dot-keys.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

from gpubench.channel import Activity
from gpubench.kinds.memory.defaults import complete_memory
from gpubench.kinds.memory.predicted_device import Target
from gpubench.kinds.memory.settings import CompletedMemorySettings, MemorySettings
from gpubench.kinds.memory.worker.predict import predict
from gpubench.kinds.memory.worker.tracker import AllocationTracker, measure
from gpubench.memory.allocation_log import AllocationLog
from gpubench.memory.analysis import footprint
from gpubench.ranks import Ranks
from gpubench.settings.loading import load

CPU = torch.device("cpu")
STEPS = 3


def predicted(settings: CompletedMemorySettings) -> AllocationLog:
    return predict(settings, Target("cpu", 2**40, None, cuda=False), Activity(), STEPS).log


def tracked(settings: CompletedMemorySettings) -> tuple[AllocationLog, int]:
    """The log of a real run, and the most bytes that the allocator had given out in it."""
    tracker = AllocationTracker(CPU)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        measure(settings, Ranks(0, 0, 1, 1), CPU, Activity(), tracker, STEPS)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return tracker.allocation_log(), max(one["args"]["Total Allocated"] for one in events if one["name"] == "[memory]")


def peak(log: AllocationLog) -> int:
    return footprint(log, source="measured", device="cpu", capacity=None).peak.level.requested


if __name__ == "__main__":
    given = {"device": "cpu", "performance.cpu_threads": "1", **json.loads(sys.argv[1])}
    settings, _ = complete_memory(load(MemorySettings, None, given).settings)
    log, counted = tracked(settings)
    print(json.dumps({"predicted": peak(predicted(settings)), "tracked": peak(log), "counted": counted}))
