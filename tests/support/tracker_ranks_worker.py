"""Run by test_tracker_sharding.py once for each of two ranks: trains two steps under the tracker, on gloo.

    tracker_ranks_worker.py RANK FOLDER

For each FOLDER/NAME.settings.json, the rank leaves its history at FOLDER/NAME-RANK.history.json.
"""

import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import FileStore

from gpubench.channel import Activity
from gpubench.kinds.memory.worker.tracker import AllocationTracker, measure
from gpubench.ranks import Ranks
from gpubench.settings.schema import CompletedTrainSettings
from gpubench.worker import distributed
from gpubench.worker.process import leave

RANKS = 2
STEPS = 2
SETTLED = 0.05  # seconds


class Patient(AllocationTracker):
    """Ends a phase once gloo's threads have let go of what the phase sent, which they do a moment later."""

    def enter(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(SETTLED)
        super().enter(*args, **kwargs)


def main(rank: int, folder: Path) -> None:
    ranks, cpu = Ranks(rank, rank, RANKS, RANKS), torch.device("cpu")
    store = FileStore(str(folder / "store"), RANKS)
    found = [
        (path.name.split(".")[0], CompletedTrainSettings.model_validate_json(path.read_text()))
        for path in sorted(folder.glob("*.settings.json"))
    ]
    distributed.setup_ddp(found[0][1].distributed, ranks, store, cpu)
    for name, settings in found:
        tracker = Patient(cpu)
        measure(settings, ranks, cpu, Activity(), tracker, STEPS)
        (folder / f"{name}-{rank}.history.json").write_bytes(msgspec.json.encode(tracker.allocation_log()))
    distributed.cleanup_ddp()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    leave(0)
