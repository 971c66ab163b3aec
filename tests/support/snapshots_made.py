"""Memory snapshots written by hand, as torch.cuda.memory._dump_snapshot writes them."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

TORCH = "/opt/venv/lib/python3.11/site-packages/torch"
SCRIPT = {"name": "<module>", "filename": "/home/me/train.py", "line": 9}


def frame(name: str, filename: str, line: int = 1) -> Record:
    return {"name": name, "filename": filename, "line": line}


def native(name: str) -> Record:
    return frame(name, "??", 0)


CALL = frame("_call_impl", f"{TORCH}/nn/modules/module.py", 1790)
FORWARD = [frame("forward", "/home/me/gpt/model.py", 54), CALL, SCRIPT]
BACKWARD: list[Record] = []
"""Of a thread of autograd's own."""
STEP = [frame("_init_group", f"{TORCH}/optim/adamw.py"), frame("step", f"{TORCH}/optim/adamw.py"), SCRIPT]


def event(action: str, address: int, size: int, frames: Sequence[Record] = (), time: int = 0, **more: Any) -> Record:
    return {
        "action": action, "addr": address, "size": size, "stream": 0, "time_us": time, "frames": list(frames), **more,
    }  # fmt: skip


def alloc(address: int, size: int, frames: Sequence[Record] = (), time: int = 0) -> Record:
    return event("alloc", address, size, frames, time)


def free(address: int, size: int, frames: Sequence[Record] = (), time: int = 0) -> list[Record]:
    return [event(action, address, size, frames, time) for action in ("free_requested", "free_completed")]


def block(size: int, requested: int, state: str = "active_allocated", frames: Sequence[Record] = ()) -> Record:
    return {"size": size, "requested_size": requested, "state": state, "frames": list(frames)}


def segment(address: int, size: int, *blocks: Record, device: int = 0) -> Record:
    """Filled up with a block that is free."""
    rest = size - sum(one["size"] for one in blocks)
    return {
        "device": device, "address": address, "total_size": size, "stream": 0, "segment_type": "small",
        "segment_pool_id": (0, 0), "blocks": [*blocks, block(rest, 0, "inactive")], "frames": [],
    }  # fmt: skip


def flat(*events: Record | list[Record]) -> list[Record]:
    found: list[Record] = []
    for one in events:
        found += one if isinstance(one, list) else [one]
    return found


def snapshot(
    events: Sequence[Record], segments: Sequence[Record] = (), annotations: Sequence[Record] = (), **more: Any
) -> Record:
    """Of two devices, of which the second did nothing."""
    return {
        "segments": list(segments), "device_traces": [list(events), []], "external_annotations": list(annotations),
        "allocator_settings": {"max_split_size": -1, "garbage_collection_threshold": 0.0}, **more,
    }  # fmt: skip


def write(path: Path, content: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path
