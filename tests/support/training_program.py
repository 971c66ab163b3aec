"""A stand-in for a training program: the host sees the same of it, and it starts without torch, in a tenth of the time.

    python training_program.py STEPS END

takes at most STEPS steps as a rank, and then exits with the code END, or sleeps if END is "hang". If END is "kill", it
kills itself before it has left the run; "close", "exec", "leave" and "daemon" close all descriptors, execute another
program, end without exit handlers, and go on in the background. STORE is a folder that stands in for the store of a
process group on several machines. PROBE_TIME is what the probe says that it takes in a step, in seconds.
"""

import base64
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

STEP_SECONDS = 0.002
RECORDED = 20  # steps that the recording takes
DATA_WAIT = 0.0005
MODEL = {"parameters": 7, "trainable_parameters": 7, "sample_shape": "3", "tokens_per_sample": None}
PLACES = {"loader": "train.py:31", "model": "train.py:35"}
PHASES = {"data_wait": DATA_WAIT, "forward": 0.001, "backward": 0.0005}


def trace() -> dict[str, object]:
    """Returns a trace of three steps of 2 ms, which wait for their batches for half of the time."""
    found = []
    for step in range(3):
        start = 1000 + 2000 * step
        for name, category, offset, duration in (
            (f"ProfilerStep#{step}", "user_annotation", 0, 2000),
            ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation", 0, 1000),
            ("aten::mm", "cpu_op", 1000, 900),
        ):
            place = {"pid": 1, "tid": 1, "ts": start + offset, "dur": duration}
            found.append({"ph": "X", "cat": category, "name": name, **place, "args": {}})
    return {"schemaVersion": 1, "deviceProperties": [], "traceEvents": found}


def host_of_the_probe() -> ModuleType:
    """Loads the module as the probe does, in a package with a name of its own."""
    folder = next(entry for entry in os.environ["PYTHONPATH"].split(os.pathsep) if entry.endswith("probe"))
    file = str(Path(folder, "__init__.py"))
    specification = importlib.util.spec_from_file_location("stand_in", file, submodule_search_locations=[folder])
    assert specification
    assert specification.loader
    package = sys.modules["stand_in"] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(package)
    return importlib.import_module("stand_in.host")


def follow(host: Any, repeat: int, wanted: int, steps: int) -> None:
    """Sends the memory of steps that keep 2000 bytes each, beside 4000 bytes of parameters."""
    if host.rank == 0:
        host.put("environmentcaptured", environment={"python": {"version": "3.9.0"}, "torch": {"version": "2.1.0"}})
    treatments = json.loads(os.environ["_GPUBENCH_TREATMENTS"])
    settings = {"precision": "fp32"} | treatments
    host.put("modelbuilt", repeat=repeat, **MODEL, seconds=None, device="cpu", settings=settings, places=PLACES)
    kept = 1000 if treatments.get("precision") == "bf16" else 2000
    allocations = [{"size": 4000 + host.rank, "begin": 0, "category": "parameters", "phase": "start"}]
    marks = [{"at": 0, "phase": "start"}]
    for step in range(min(steps, wanted)):
        marks += [{"at": step + 1, "phase": "forward", "step": step}]
        allocations += [{"size": kept, "begin": step + 1, "phase": "forward", "step": step}]
        host.put("heartbeat", doing="a step", step=step + 1)
    history = {"allocations": allocations, "marks": marks, "length": len(allocations), "notes": ["a note"]}
    data = json.dumps({"device": -1, "name": "cpu", "rank": host.rank, "history": history}).encode()
    for part, last in ((data[:100], False), (data[100:], True)):
        host.put("memoryrecorded", repeat=repeat, data=base64.b64encode(part).decode(), last=last)
    host.put("done")
    host.flush()


class Store:
    """The store of one start of the program, which rank 0 removes when the other rank has read it."""

    def __init__(self) -> None:
        self.file, self.was_read = (Path(os.environ["STORE"], name) for name in ("value", "read"))

    def set(self, _: str, value: str) -> None:
        part = self.file.with_suffix(".part")
        part.write_text(value)
        part.rename(self.file)

    def check(self, _: list[str]) -> bool:
        return self.file.exists()

    def get(self, _: str) -> bytes:
        value = self.file.read_bytes()
        self.was_read.touch()
        return value

    def remove(self) -> None:
        while not self.was_read.exists():
            time.sleep(0.01)
        self.was_read.unlink()
        self.file.unlink()


def plan(host: Any, training: dict[str, Any], repeat: int) -> int | None:
    """Tells the host how many steps the program takes. Returns None if it ends by itself."""
    if training["steps"] == "all":
        return None
    warmup = 10 if training["warmup_steps"] is None else training["warmup_steps"]
    wanted = (training["steps"] or 50) + warmup
    host.put("planned", repeat=repeat, steps=wanted, warmup=warmup)
    return wanted


def disappear(how: str) -> None:
    """Loses the connection to the host in one of several ways; returns if `how` is none of them."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how not in ("close", "exec", "leave", "daemon"):
        return
    if how == "exec":
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(1.5)"])
    if how == "daemon" and os.fork():
        os._exit(0)
    if how in ("close", "daemon"):
        os.closerange(3, 4096)
        time.sleep(1.5)  # it goes on with its own work
        print("closed everything, and worked on", flush=True)
    os._exit(0)


def main() -> None:
    steps, end = int(sys.argv[1]), sys.argv[2]
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    host = host_of_the_probe().Host(os.environ["_GPUBENCH_PROBE"], rank, world_size, Store)
    settings, (repeat,) = host.job["settings"], host.job["repeats"]
    if os.environ.get("_GPUBENCH_FOLLOW"):
        follow(host, repeat, settings["memory"]["steps"], steps)
        sys.exit(0 if end == "0" else int(end))
    wanted = plan(host, settings["training"], repeat) or steps
    if rank == 0:
        host.put("environmentcaptured", environment={"python": {"version": "3.9.0"}, "torch": {"version": "2.1.0"}})
    treatments = json.loads(os.environ["_GPUBENCH_TREATMENTS"])
    step_seconds = STEP_SECONDS - (DATA_WAIT if treatments.get("data.workers") else 0)
    phases = PHASES | ({"data_wait": 0.0} if treatments.get("data.workers") else {})
    settings = {"data.workers": 0, "performance.compile": True} | treatments
    host.put("modelbuilt", repeat=repeat, **MODEL, seconds=None, device="cpu", settings=settings, places=PLACES)
    began = time.monotonic_ns()
    for step in range(min(steps, wanted)):
        one = {"repeat": repeat, "rank": rank, "epoch": 0, "step": step, "time": host.unix(began) + step * step_seconds}
        numbers = {"total": step_seconds, "phases": phases, "host": step_seconds, "samples": 4, "loss": 1 / (step + 1)}
        host.put("stepsmeasured", steps=[one | numbers])
    host.flush()
    if rank == 0 and "STORE" in os.environ:
        Store().remove()
    print("took", min(steps, wanted), "steps")
    print("\x1b[2Jthe last line it printed", flush=True)
    if steps < wanted and end == "hang":
        time.sleep(600)
    disappear(end)
    if repeat == host.job["profiled"] and steps >= RECORDED:
        data = base64.b64encode(json.dumps(trace()).encode()).decode()
        host.put("tracerecorded", repeat=repeat, name="rank0.1.pt.trace.json", data=data, last=True)
    if "performance.sdpa" in treatments:
        host.put("treatmentsmissed", repeat=repeat, missed={"performance.sdpa": "there is no attention"})
    memory: dict[str, Any] = {"peak_allocated": None, "peak_reserved": None, "peak_rss": 1}
    if "PROBE_TIME" in os.environ:
        memory |= {"probe_time": float(os.environ["PROBE_TIME"])}
    host.put("repeatdone", repeat=repeat, wall=step_seconds * min(steps, wanted), **memory)
    host.put("done")
    host.flush()
    if end == "hang":
        time.sleep(600)
    sys.exit(0 if steps >= wanted else int(end))


if __name__ == "__main__":
    main()
