"""How much does the probe of `gpubench train-bench -- PROGRAM` slow the program down, and is its step time correct?

    .venv/bin/python benchmarks/probe_overhead.py [--blocks 200] [--block 50] [--rounds 3]

    cost    CPU time that the probe adds to a step: blocks of steps with and without it alternate in one process (A B,
            B A), the difference is taken within a pair, and its median is reported. A block is a pass over the data,
            at the end of which its steps are measured and sent. The model is tiny.    Bar: at most 30 us.
    claim   the step time that gpubench reports divided by that of the program's own stopwatch over the same steps.
            Bar: 1 within 0.5 %.

"Without" means that the hooks return at once. In addition, the hooks of a step run one after the other in a loop of
their own: what they take less there is what the caches of the CPU lose to PyTorch's operators in between. A larger
model leaves less of the probe in the caches: what it costs in steps of a millisecond or two, with batches from a
DataLoader and from a list, is reported without a bar. And the program runs alone and with the probe in fresh
processes, in turns; the ratio of their step times by the program's stopwatch is reported without a bar, because
processes differ among themselves by more than the probe costs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any

import bars
from processes import without_settings
from ratios import Ratio

COST_BAR = 30e-6
CLAIM_BAR = 0.005
PATIENCE = 600.0  # seconds that one process may take
WARMUP = 50
TINY, LARGER = (4, 3, 1), (256, 256, 512, 1)
"""The rows of a batch, and the widths of the layers."""

PROGRAM = """
import json, sys, time
import torch

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
times = []
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(256, 256)).square().mean().backward()
    optimizer.step()
    times.append(time.monotonic())
json.dump(times, open(sys.argv[2], "w"))
"""


def added(blocks: int, steps: int, sizes: tuple[int, ...], *, loader: bool = True) -> tuple[float, float, float]:
    """Returns the CPU seconds that the probe adds to a step, as the median over pairs of blocks.

    Returns also those of the hooks in a loop of their own, and those of a step without the probe. `sizes` are those of
    a batch and of the layers; batches come from a DataLoader, or from a list.
    """
    import socket
    import threading

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from gpubench.probe.steady import SteadyProbe
    from gpubench.ranks import machine

    torch.set_num_threads(1)
    job = {
        "settings": {"training": {"steps": "all", "warmup_steps": 0}, "profiling": {}},
        "repeats": [0],
        "profiled": None,
        "clock": [time.time(), time.monotonic()],
        "machine": machine(),
    }

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.sendall(json.dumps(job).encode() + b"\n")
        while connection.recv(1 << 20):
            pass

    folder = tempfile.mkdtemp(prefix="gpubench-")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/host")
    listener.listen()
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    probe = SteadyProbe(f"{folder}/host", {})
    probe.install()
    rows, *widths = sizes
    layers = [torch.nn.Linear(*each) for each in pairwise(widths)]
    model = torch.nn.Sequential(*layers) if len(layers) > 1 else layers[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    samples = torch.randn(rows * steps, widths[0])
    data: Any = [(batch,) for batch in samples.split(rows)]
    if loader:
        data = DataLoader(TensorDataset(samples), rows)

    def block(*, over: bool) -> float:
        probe._over = over
        began = time.thread_time()
        for (batch,) in data:
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
        if not over:
            probe._send_steps()
        return (time.thread_time() - began) / steps

    block(over=False)
    differences, without = [], []
    for number in range(blocks):
        seconds = {over: block(over=over) for over in ((False, True) if number % 2 else (True, False))}
        differences.append(seconds[False] - seconds[True])
        without.append(seconds[True])
    alone = hooks_alone(probe, model, optimizer, data, steps) if loader else 0.0
    return median(differences), alone, median(without)


def in_fresh_process(*what: Any, **how: Any) -> tuple[float, float, float]:
    """Returns what `added` finds, in a process of its own, as the hooks stay in one for good."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(added, *what, **how).result()


def hooks_alone(probe: Any, model: Any, optimizer: Any, data: Any, steps: int) -> float:
    """Returns the CPU seconds of the hooks of a step, where nothing of PyTorch runs between them."""
    iterator = iter(data)
    (batch,) = next(iterator)
    output = model(batch)
    loss = output.mean()

    def block(*, over: bool) -> float:
        probe._over = over
        began = time.thread_time()
        for _ in range(steps):
            probe._next_index(lambda iterator: range(len(batch)), iterator)
            probe._next_batch(lambda iterator: [batch], iterator)
            probe._zero_gradients(lambda optimizer: None, optimizer)
            probe._call_module(lambda model, batch: output, model, batch)
            probe._backward(lambda loss: None, loss)
            probe._before_update(optimizer, (optimizer,), {})
            probe._after_update(optimizer, (optimizer,), {})
        return (time.thread_time() - began) / steps

    return median(block(over=False) - block(over=True) for _ in range(100))


def alone(folder: Path, steps: int) -> float:
    """Returns the program's own step time without the probe."""
    subprocess.run([sys.executable, "-c", PROGRAM, str(steps), str(folder / "alone")], check=True, timeout=PATIENCE)
    times = json.loads((folder / "alone").read_text())
    return float(times[-1] - times[WARMUP]) / (len(times) - 1 - WARMUP)


def probed(folder: Path, steps: int) -> tuple[float, float]:
    """Returns the step time by the program's stopwatch and by gpubench, over the steps of gpubench's window."""
    program = [sys.executable, "-c", PROGRAM, str(steps), str(folder / "probed")]
    options = [
        "--steps",
        "all",
        "--repeats",
        "1",
        f"--training.warmup_steps={WARMUP}",
        "--results",
        str(folder / "results"),
    ]
    command = [sys.executable, "-m", "gpubench", "train-bench", "-q", *options, "--", *program]
    subprocess.run(command, check=True, timeout=PATIENCE, env=without_settings(), stdout=subprocess.DEVNULL)
    times = json.loads((folder / "probed").read_text())
    path = max((folder / "results").glob("*/*/summary.json"))
    window = json.loads(path.read_text())["steady"][0]
    first, last = window["first"], window["first"] + window["steps"] - 1
    lines = (path.parent / "steps.jsonl").read_text().splitlines()
    claimed = fmean(json.loads(line)["total"] for line in lines[first : last + 1])
    return float(times[last] - times[first - 1]) / window["steps"], claimed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=200, help="pairs of blocks in one process")
    parser.add_argument("--block", type=int, default=50, help="steps in a block")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes with and without the probe")
    parser.add_argument("--steps", type=int, default=1000, help="steps of a fresh process")
    options = parser.parse_args()
    cost, hooks, _ = in_fresh_process(options.blocks, options.block, TINY)
    larger = {
        where: in_fresh_process(options.blocks // 4, options.block, LARGER, loader=where == "a DataLoader")
        for where in ("a DataLoader", "a list")
    }
    claims: list[tuple[float, float]] = []
    slower: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(prefix="gpubench-probe-") as name:
        for number in range(options.rounds):
            folder = Path(name, str(number))
            folder.mkdir()
            if number % 2:
                (own, claimed), free = probed(folder, options.steps), alone(folder, options.steps)
            else:
                free, (own, claimed) = alone(folder, options.steps), probed(folder, options.steps)
            claims.append((claimed, own))
            slower.append((own, free))
    print(f"the hooks of a step in a loop of their own: {hooks * 1e6:.1f} us")
    for where, (seconds, _, step) in larger.items():
        print(f"steps of {step * 1e3:.2f} ms with batches from {where}: {seconds * 1e6:.1f} us")
    alone_step = median(free for _, free in slower)
    print(f"fresh processes with steps of {alone_step * 1e3:.2f} ms: probed / alone {Ratio.of_pairs(slower)}")
    return bars.conclude(
        [
            bars.at_most("CPU time of the probe in a step", 1e6 * cost, 1e6 * COST_BAR, "{:.1f} us"),
            Ratio.of_pairs(claims).bar("step time / the program's stopwatch", CLAIM_BAR),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
