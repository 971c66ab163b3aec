"""Logs of other tools as these write them, of steps that take about `step` seconds."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np


def times(step: float = 0.1, count: int = 40, seed: int = 0) -> list[float]:
    """Times with a noise of one percent."""
    return [float(value) for value in step * (1 + 0.01 * np.random.default_rng(seed).standard_normal(count))]


def titan_line(step: int, tps: str, *, rank: str = "[rank0]:", of: str = "step") -> str:
    """A line of torchtitan's console, with its colours."""
    head = f"{rank}[titan] 2025-06-01 10:00:00,123 - root - INFO - "
    loss = f"\x1b[31m{of}: {step:2}  \x1b[32mloss:  6.95000  \x1b[38;2;180;60;0mgrad_norm:  1.2000  "
    return (
        f"{head}{loss}\x1b[38;2;54;234;195mmemory: 30.50GiB(38.5%)  \x1b[34mtps: {tps}  \x1b[36mtflops: 400.10\x1b[39m"
    )


def torchtitan(each: Sequence[float], every: int = 10) -> str:
    lines = ["[rank0]:[titan] 2025-06-01 10:00:00,001 - root - INFO - Training starts at step 1"]
    lines += [titan_line(every * number, f"{round(700 / time):,}") for number, time in enumerate(each, 1)]
    return "\n".join(lines) + "\n"


def nanogpt(each: Iterable[float], first: int = 0) -> str:
    lines = ["number of parameters: 10.65M", f"step {first}: train loss 10.9, val loss 10.8"]
    lines += [f"iter {n}: loss 2.8000, time {time * 1e3:.2f}ms, mfu 35.00%" for n, time in enumerate(each, first)]
    return "\n".join(lines) + "\n"


def modded_nanogpt(each: Sequence[float]) -> str:
    clock = np.cumsum([0.0, *each])
    lines = ["step:0/40 val_loss:10.8258 train_time:0ms step_avg:0.02ms"]
    lines += [f"step:{n}/40 train_time:{at * 1e3:.0f}ms step_avg:95.10ms" for n, at in enumerate(clock[1:], 1)]
    return "\n".join(lines) + "\n"


def trainer(each: Sequence[float], **state: Any) -> str:
    """The state of a Trainer that logs ten steps in a row, with the time since it began."""
    clock = np.cumsum([10 * time for time in each])
    rows = [
        {"loss": 2.9, "grad_norm": float("nan"), "step": 10 * n, "train_runtime": round(at, 4)}
        for n, at in enumerate(clock, 1)
    ]
    return trainer_of([*rows, totals(4 / each[0])], **state)


def totals(samples_per_second: float) -> dict[str, Any]:
    """The last row of a Trainer."""
    return {
        "step": 400,
        "train_loss": 2.4,
        "train_runtime": 100.0,
        "train_samples_per_second": round(samples_per_second, 3),
        "train_steps_per_second": 2.0,
    }


def trainer_of(rows: Sequence[dict[str, Any]], **state: Any) -> str:
    return json.dumps({"global_step": 400, "log_history": rows, **state}, indent=2)


def throughput_monitor(each: Sequence[float]) -> str:
    """What the CSVLogger of Lightning writes of its ThroughputMonitor: rows of training have no loss of validation."""
    rows = [f",{n},{2 - n / 100},{4 / time!r}," for n, time in enumerate(each)]
    header = "epoch,step,train_loss,train/device/samples_per_sec,val_loss"
    return "\n".join([header, *rows, f"0,{len(each)},,,1.5"]) + "\n"


def benchmarks(**each: Sequence[float]) -> str:
    """What pytest-benchmark saves of benchmarks with these rounds."""
    found = [
        {"name": name, "fullname": f"t.py::{name}", "stats": {"mean": float(np.mean(data)), "data": list(data)}}
        for name, data in each.items()
    ]
    return json.dumps({"machine_info": {}, "benchmarks": found, "version": "5.2.0"}, indent=4)


def hyperfine(each: Mapping[str, Sequence[float]], codes: Sequence[int | None] = ()) -> str:
    """What hyperfine exports of commands with these times."""
    found = [
        {
            "command": name,
            "mean": float(np.mean(data)),
            "times": list(data),
            "exit_codes": list(codes) or [0] * len(data),
        }
        for name, data in each.items()
    ]
    return json.dumps({"results": found}, indent=2)


FORMATS: dict[str, Callable[[Sequence[float]], str]] = {
    "torchtitan.log": torchtitan,
    "nanogpt.log": nanogpt,
    "modded.txt": modded_nanogpt,
    "trainer_state.json": trainer,
    "metrics.csv": throughput_monitor,
    "pytest.json": lambda each: benchmarks(test_step=each),
    "hyperfine.json": lambda each: hyperfine({"train": each}),
}
"""A log of each format, by a name that such a file may have."""
