"""How much time and memory does it take to analyse a large trace?

    .venv/bin/python benchmarks/trace_speed.py [--rounds 3] [--peers traceinsight] [--quick]

The trace is generated: training steps in torch.profiler's format, of 1.7 million events (340 MB), with the mix of
events of a DDP run on a V100. Every contender is a fresh process that gets its path; the file is in the file system's
cache. Bar, for the best of the rounds on two cores: 10 s and 1.2 GB.

    gpubench       reads the trace and does the analysis of `gpubench profile`
    json.loads     only decodes it: the least that anything built on it takes
    traceinsight   HolisticTraceAnalysis: loads the trace; breakdown, kernels, idle causes
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import bars
import environments
from environments import Environment
from processes import MB, Spent, observe, reason
from tables import table

EVENTS = 1_730_000
SECONDS, MEGABYTES = 10.0, 1200.0
PEER = "traceinsight"
REQUIREMENTS = ("traceinsight==0.6.1", "pandas<3")

OPERATORS = ("aten::addmm", "aten::layer_norm", "aten::gelu", "aten::add", "aten::mul", "aten::_softmax", "aten::bmm")
KERNEL = "void at::native::vectorized_elementwise_kernel<4, at::native::{}Functor<float>, at::detail::Array<char*, 3> >"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
OPERATORS_OF_STEP = 5_000
EVENTS_OF_OPERATOR = 8

GPUBENCH = """
import sys
from pathlib import Path
from gpubench.trace.analyse import analyse
from gpubench.trace.load import read
rank, = analyse([read(Path(sys.argv[1]))]).ranks
assert sum(rank.idle.values()) == rank.device.idle > 0 and rank.kernels and rank.steps
"""
JSON = "import json, pathlib, sys; json.loads(pathlib.Path(sys.argv[1]).read_bytes())"
TRACEINSIGHT = """
import os, sys
os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="", include_last_profiler_step=True)
analysis.get_temporal_breakdown(visualize=False)
analysis.get_gpu_kernel_breakdown(visualize=False)
analysis.get_idle_time_breakdown(ranks=[0], visualize=False)
"""


@dataclass
class Contender:
    name: str
    program: str
    python: Path = Path(sys.executable)
    rounds: list[Spent] = field(default_factory=list)
    trouble: str | None = None

    def install(self, place: Path) -> None:
        try:
            self.python = Environment(REQUIREMENTS, torch=False).create(place / self.name)
        except (subprocess.SubprocessError, OSError) as error:
            self.trouble = f"does not install: {reason(error)}"

    def race(self, trace: Path, rounds: int) -> None:
        """Run the program. Raises subprocess.CalledProcessError if gpubench fails; others that fail are left out."""
        try:
            self.rounds = [observe([str(self.python), "-c", self.program, str(trace)])[1] for _ in range(rounds)]
        except subprocess.CalledProcessError as error:
            if self.name != PEER:
                raise
            self.trouble = f"does not run: {reason(error)}"

    @property
    def seconds(self) -> float:
        """The time of the fastest round in seconds."""
        return min(one.seconds for one in self.rounds)

    @property
    def megabytes(self) -> float:
        """The largest memory of the rounds."""
        return max(one.megabytes for one in self.rounds)

    def row(self) -> list[str]:
        if self.trouble:
            return [self.name, "-", self.trouble, "-"]
        every = " ".join(f"{one.seconds:.1f}" for one in self.rounds)
        return [self.name, f"{self.seconds:.1f} s", every, f"{self.megabytes:.0f} MB"]


def write_trace(path: Path, events: int) -> None:
    """Yield steps with a loader, operators with a launch each, an occasional all-reduce, and a wait at the end."""
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2},\n')
        file.write('"deviceProperties": [{"id": 0, "name": "V100", "numSms": 80}],\n"traceEvents": [\n')
        for number in range(max(2, round(events / OPERATORS_OF_STEP / EVENTS_OF_OPERATOR))):
            file.writelines(f"  {event},\n" for event in step(number))
        file.write(
            '  {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python"}}\n]}\n'
        )


def step(number: int) -> Iterator[str]:
    """Yield a step's events: the loader, operators of 15 us on the host and 12 us on the device, and a wait."""
    wall = 8_000 + OPERATORS_OF_STEP * 15 + 2_000
    began = 5e9 + number * wall
    yield host(f"ProfilerStep#{number}", "user_annotation", began, wall)
    yield host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation", began, 7_000)
    free = began
    for place in range(OPERATORS_OF_STEP):
        at = began + 8_000 + place * 15
        start = max(free, at + 9)
        free = start + 12
        yield from operator(place, at, start, number * OPERATORS_OF_STEP + place + 1)
    yield call("cudaStreamSynchronize", began + 8_000 + OPERATORS_OF_STEP * 15, 1_500, 0)


def operator(place: int, at: float, start: float, correlation: int) -> Iterator[str]:
    name = OPERATORS[place % len(OPERATORS)]
    kernel, stream = (NCCL, 20) if place % 50 == 49 else (KERNEL.format(name.removeprefix("aten::")), 7)
    yield host(name, "cpu_op", at, 13.25, place)
    yield host("aten::empty", "cpu_op", at + 0.5, 1.125, place)
    yield memory(at + 1, place)
    yield host(f"{name}_", "cpu_op", at + 2, 10.75, place)
    yield call("cudaLaunchKernel", at + 3, 5.5, correlation)
    yield arrow("s", 4711, 4711, at + 3, correlation)
    yield work(kernel, stream, start, 11.375, correlation)
    yield arrow("f", 0, stream, start, correlation)


def host(name: str, category: str, at: float, duration: float, index: int = 0) -> str:
    arguments = f'"External id": {index}, "Ev Idx": {index}'
    return slice_(name, category, 4711, at, duration, arguments)


def call(name: str, at: float, duration: float, correlation: int) -> str:
    return slice_(name, "cuda_runtime", 4711, at, duration, f'"cbid": 211, "correlation": {correlation}')


def work(name: str, stream: int, at: float, duration: float, correlation: int) -> str:
    arguments = (
        f'"External id": {correlation}, "queued": 0, "device": 0, "context": 1, "stream": {stream}, '
        f'"correlation": {correlation}, "registers per thread": 32, "shared memory": 0, "blocks per SM": 0.3, '
        '"warps per SM": 1.2, "grid": [24, 1, 1], "block": [128, 1, 1], "est. achieved occupancy %": 2'
    )
    return slice_(name, "kernel", stream, at, duration, arguments)


def slice_(name: str, category: str, thread: int, at: float, duration: float, arguments: str) -> str:
    where = f'"pid": {0 if category == "kernel" else 4711}, "tid": {thread}'
    when = f'"ts": {at:.3f}, "dur": {duration:.3f}'
    return f'{{"ph": "X", "cat": "{category}", "name": "{name}", {where}, {when}, "args": {{{arguments}}}}}'


def arrow(end: str, process: int, thread: int, at: float, number: int) -> str:
    where = f'"pid": {process}, "tid": {thread}, "ts": {at:.3f}'
    return f'{{"ph": "{end}", "id": {number}, {where}, "cat": "ac2g", "name": "ac2g"}}'


def memory(at: float, index: int) -> str:
    arguments = (
        f'"Ev Idx": {index}, "Device Type": 1, "Device Id": 0, "Addr": 139926520725504, "Bytes": 5242880, '
        '"Total Allocated": 5435638784, "Total Reserved": 12782141440'
    )
    where = f'"pid": 4711, "tid": 4711, "ts": {at:.3f}'
    return f'{{"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", {where}, "args": {{{arguments}}}}}'


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of processes for each program; default: %(default)s"
    )
    environments.add_options(parser, [PEER], "none")
    parser.add_argument("--quick", action="store_true", help="smoke test: a fiftieth of the size, 1 round")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def main() -> int:
    options = parse()
    ours = Contender("gpubench", GPUBENCH)
    contenders = [ours, Contender("json.loads", JSON), *(Contender(name, TRACEINSIGHT) for name in options.peers)]
    for peer in contenders[2:]:
        peer.install(options.environments)
    with tempfile.TemporaryDirectory(prefix="gpubench-trace-") as folder:
        trace = Path(folder) / "large.pt.trace.json"
        write_trace(trace, EVENTS // 50 if options.quick else EVENTS)
        megabytes = trace.stat().st_size / MB
        try:
            for contender in contenders:
                if not contender.trouble:
                    print(contender.name, file=sys.stderr)
                    contender.race(trace, 1 if options.quick else options.rounds)
        except subprocess.CalledProcessError as error:
            print(f"error: {reason(error)}", file=sys.stderr)
            return 1
    print(f"a trace of {megabytes:.0f} MB\n")
    print(table([("program", "fastest round", "all rounds, s", "peak memory"), *(one.row() for one in contenders)]))
    if options.peers:
        print(f"\n{environments.versions(options.environments / PEER, REQUIREMENTS)}")
    return bars.conclude(
        [
            bars.at_most("time", ours.seconds, SECONDS, "{:.1f} s"),
            bars.at_most("memory", ours.megabytes, MEGABYTES, "{:.0f} MB"),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
