"""Footprints of programs that are over, from the files they left."""

from collections.abc import Sequence
from pathlib import Path

from gpubench.memory import of_trace, snapshot
from gpubench.memory.analysis import footprint
from gpubench.memory.footprint import Footprint, Source
from gpubench.memory.moves import DeviceHistory


def of_snapshot(path: Path) -> list[Footprint]:
    """Of each device in a snapshot of the CUDA allocator. Raises DataError."""
    return _footprints(snapshot.read(path), "snapshot")


def of_trace_file(path: Path) -> list[Footprint]:
    """Of each device that a trace has [memory] events of. Raises DataError."""
    return _footprints(of_trace.read(path), "trace")


def _footprints(devices: Sequence[DeviceHistory], source: Source) -> list[Footprint]:
    return [
        footprint(
            one.history,
            source=source,
            device=one.name or ("cpu" if one.device < 0 else f"GPU {one.device}"),
            capacity=one.capacity,
            rank=one.rank or 0,
        )
        for one in devices
    ]
