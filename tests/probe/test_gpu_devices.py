"""The probe in programs on GPUs: on any of them, on several, in CUDA graphs, and where a device answers with errors."""

import ast
import base64
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from places import SUPPORT
from running import PATIENCE, environment, gpubench, simulated
from test_exchanges import rates

from gpubench.probe import device, graphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.simulated,
    pytest.mark.skipif(not simulated(), reason="needs the simulated CUDA of tests/fake_cuda"),
]
SLOW = {"FAKECUDA_KERNEL_US": "1000", "FAKECUDA_DEVICES": "2"}
"""Kernels take long enough that the device is behind the host, so that times on both differ."""
SETTLED = 4
LONG = 10**12
"""Nanoseconds in which a host is never held up."""
RECORDING = {
    "enabled": True,
    "wait": 1,
    "active": 2,
    "repeat": 0,
    "compress": False,
    "warmup": 1,
    "modules": False,
    "record_shapes": False,
    "profile_memory": False,
    "with_stack": False,
    "all_ranks": False,
}
"""The settings of a short recording."""


class Ran:
    """What a loop of device_loops.py did."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.code: int = answer["code"]
        self.told: dict[str, Any] = answer["told"]
        self.printed: str = answer["printed"]
        self.all: list[dict[str, Any]] = answer["events"]
        self.events = {event["event"]: event for event in self.all}
        self.steps = [step for event in self.all if event["event"] == "stepsmeasured" for step in event["steps"]]

    @property
    def done(self) -> dict[str, Any]:
        found: dict[str, Any] = self.events["repeatdone"]
        return found

    @property
    def totals(self) -> list[float]:
        return [step["total"] for step in self.steps]

    @property
    def history(self) -> dict[str, Any]:
        """What was followed of the memory, with its notes in one text."""
        data = b"".join(base64.b64decode(one["data"]) for one in self.all if one["event"] == "memoryrecorded")
        found: dict[str, Any] = json.loads(data)["history"]
        return found | {"notes": "; ".join(found["notes"])}

    def calls(self) -> Counter[str]:
        """What was asked of the simulated CUDA, by the name of the call and the place."""
        return Counter(re.findall(r"^fakecuda: (cuda.*)$", self.printed, re.MULTILINE))


Run = Callable[..., Ran]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a loop by its name; the rest of a request is in device_loops.py."""
    script = str(SUPPORT / "device_loops.py")
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdin
        assert process.stdout

        def ask(loop: str, **request: Any) -> Ran:
            assert process.stdin
            assert process.stdout
            variables = SLOW | request.pop("environment", {})
            process.stdin.write(json.dumps({"loop": loop, "environment": variables, **request}) + "\n")
            process.stdin.flush()
            return Ran(json.loads(process.stdout.readline()))

        yield ask
        process.stdin.close()
        process.wait(PATIENCE)


def agree(ran: Ran) -> bool:
    """Whether settled steps took as long as by the program's own events: within a percent for most, or for their sum.

    A host that is interrupted between its event and the mark adds to one step what it takes from the next.
    """
    own, found = ran.told["laps"], ran.totals[-len(ran.told["laps"]) :]
    pairs = list(zip(found, own, strict=True))[SETTLED:]
    usual = median(abs(one / other - 1) for one, other in pairs)
    whole = abs(sum(one for one, _ in pairs) / sum(other for _, other in pairs) - 1)
    return bool(min(usual, whole) < 0.01)


@pytest.mark.parametrize(
    ("loop", "options", "timed"),
    [
        ("plain", {"device": 0}, 0),
        ("plain", {"device": 1}, 1),
        ("within", {"device": 1}, 1),
        ("switched", {"device": 0}, 0),
        ("switched", {"device": 1}, 1),
        ("graphed_callables", {"device": 1}, 1),
    ],
)
def test_a_step_takes_as_long_as_by_the_events_of_the_device_that_computes_it(
    run: Run, loop: str, options: dict[str, Any], timed: int
) -> None:
    ran = run(loop, options=options)
    assert ran.code == 0, ran.printed
    assert ran.done["timed_by"] == f"the events of cuda:{timed}"
    assert agree(ran)
    assert ran.done["peak_allocated"] > 2**20
    assert {"forward", "backward", "optimizer"} <= ran.steps[-1]["phases"].keys()
    assert ran.steps[-1]["phases"]["backward"] > 0.004, "kernels of a millisecond each"
    assert sum(ran.totals) == pytest.approx(ran.done["wall"], rel=0.01)


def test_a_model_on_two_devices_is_timed_by_the_one_of_the_loss_from_the_first_step_on(run: Run) -> None:
    ran = run("halves")
    assert ran.code == 0, ran.printed
    assert ran.done["timed_by"] == "the events of cuda:1, and the waits for the work on cuda:0"
    assert agree(ran)
    assert sum(ran.totals) == pytest.approx(ran.done["wall"], rel=0.01)
    assert not ran.done["unanswered"]


def test_a_model_on_two_devices_is_timed_by_the_one_of_the_loss_and_says_so(run: Run) -> None:
    ran = run("halves", options={"last_first": True})
    assert ran.code == 0, ran.printed
    said = "the events of cuda:1, and the CPU's clock in 1 of 24 updates, and the waits for the work on cuda:0"
    assert sorted(ran.done["timed_by"].split(", and ")) == sorted(said.split(", and "))
    assert agree(ran)
    assert not ran.done["unanswered"]


def test_models_that_train_in_turns_on_two_devices_are_timed_by_one_of_them(run: Run) -> None:
    ran = run("adversaries")
    assert ran.code == 0, ran.printed
    assert len(ran.steps) == 24
    assert "the events of cuda:1" in ran.done["timed_by"]
    assert "the CPU's clock" not in ran.done["timed_by"]
    assert sum(ran.totals[SETTLED:]) == pytest.approx(sum(ran.told["laps"][SETTLED - 1 :]), rel=0.1)


def test_a_program_that_moves_to_another_device_is_timed_there_after_some_steps(run: Run) -> None:
    ran = run("moved")
    assert ran.code == 0, ran.printed
    assert "the events of cuda:0, and the events of cuda:1" in ran.done["timed_by"]
    own = ran.told["laps"][-30:]
    assert median(abs(one / other - 1) for one, other in zip(ran.totals[-30:], own, strict=True)) < 0.01


@pytest.mark.parametrize("loop", ["by_hand", "beside"])
def test_no_mark_is_read_before_its_own_stream_has_passed_it(run: Run, loop: str) -> None:
    ran = run(loop)
    assert ran.code == 0, ran.printed
    assert not ran.done["unanswered"]
    assert all(seconds >= 0 for step in ran.steps for seconds in step["phases"].values())


def test_losses_are_those_of_the_program_to_the_bit_on_any_device(run: Run) -> None:
    ran, bare = run("plain", options={"device": 1}), run("plain", options={"device": 1}, probed=False)
    assert [step["loss"] for step in ran.steps] == ran.told["losses"] == bare.told["losses"]


@pytest.mark.parametrize("place", [0, 1])
def test_calls_of_inference_take_as_long_as_by_the_events_of_their_device(run: Run, place: int) -> None:
    ran = run("infer", options={"device": place}, inference=True)
    assert ran.code == 0, ran.printed
    assert agree(ran)


def test_a_call_over_two_devices_lasts_until_the_second_has_computed_it(run: Run) -> None:
    ran = run("infer_halves", inference=True)
    assert ran.code == 0, ran.printed
    assert min(step["phases"]["forward"] for step in ran.steps[SETTLED:]) > 0.0199, "10 ms on each, one after the other"


@pytest.mark.parametrize(
    ("loop", "options", "compared"),
    [
        ("plain", {"steps": 200}, True), ("plain", {"device": 1, "steps": 200}, True), ("within", {}, True),
        ("switched", {}, True), ("halves", {"last_first": True}, True), ("graphed", {}, True),
        ("graphed_callables", {}, True), ("graphed", {"updates": 3}, False), ("adversaries", {}, None),
        ("moved", {}, None), ("by_hand", {}, None), ("beside", {}, None),
    ],
    ids=str,
)  # fmt: skip
def test_the_clock_of_a_device_is_not_accused(
    run: Run, loop: str, options: dict[str, Any], compared: bool | None
) -> None:
    """It is not compared where steps have a share of a longer time."""
    ran = run(loop, options=options)
    assert ran.code == 0, ran.printed
    found = rates([event for event in ran.all if event["event"] == "stepsmeasured"])
    assert compared is None or bool(found) == compared
    if found:
        assert found.agree is not False
        assert found.low < 1.001
        assert found.high > 0.999


# --- CUDA graphs


@pytest.mark.parametrize(
    ("options", "samples"),
    [({}, 8), ({"device": 1}, 8), ({"loader": False}, 8), ({"mode": "thread_local"}, 8), ({"reads": True}, 8)],
    ids=str,
)
def test_a_replay_of_a_whole_step_is_a_step(run: Run, options: dict[str, Any], samples: int) -> None:
    ran = run("graphed", options=options)
    assert ran.code == 0, ran.printed
    assert len(ran.steps) == 3 + 24
    assert agree(ran) or "reads" in options, "where the device waits for the host, the laps lie after the wait"
    assert not ran.done["unanswered"]
    replayed = ran.steps[-10:]
    assert {step["samples"] for step in replayed} == {samples}
    assert all(step["phases"][graphs.GRAPH_REPLAY] > 0.009 for step in replayed)
    assert not any({"forward", "backward", "optimizer"} & step["phases"].keys() for step in replayed)
    assert {number for number, step in enumerate(ran.steps) if graphs.GRAPH_CAPTURE in step["phases"]} == {3}
    assert replayed[-1]["loss"] is not None, "nothing was replayed after it"
    assert ran.done["work"]["backward_passes"] == 3 + 24


def test_each_of_several_updates_in_a_graph_is_a_step_with_its_share_of_the_time(run: Run) -> None:
    ran = run("graphed", options={"updates": 3})
    assert ran.code == 0, ran.printed
    assert len(ran.steps) == 3 + 3 * 24
    own = ran.told["laps"][SETTLED:]
    found = [sum(ran.totals[at : at + 3]) for at in range(3 + 3 * (SETTLED + 1), len(ran.totals), 3)]
    assert median(abs(one / other - 1) for one, other in zip(found, own, strict=True)) < 0.01


def test_a_replayed_call_is_inference(run: Run) -> None:
    ran = run("infer_graphed", inference=True)
    assert ran.code == 0, ran.printed
    assert agree(ran)
    assert ran.steps[-1]["phases"]["forward"] > 0.002
    assert {step["samples"] for step in ran.steps} == {8}


def test_replayed_calls_can_be_recorded(run: Run) -> None:
    ran = run("infer_graphed", inference=True, profiling=RECORDING)
    assert "tracerecorded" in ran.events, ran.printed


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize(
    ("call", "forbidden"),
    [
        ("event.query()", "global thread_local"),
        ("event.synchronize()", "global thread_local"),
        ("other.synchronize()", "global thread_local"),
        ("other.query()", "global thread_local"),
        ("value.item()", "global thread_local relaxed"),
        ("torch.cuda.synchronize()", "global thread_local relaxed"),
        ("torch.cuda.current_stream().synchronize()", "global thread_local relaxed"),
        ("event.record(other)", ""),
        ("torch.empty(2**25, device='cuda')", ""),
    ],
)
def test_the_simulated_cuda_forbids_in_a_capture_what_cuda_does(run: Run, call: str, forbidden: str, mode: str) -> None:
    ran = run("forbidden", options={"call": call, "mode": mode}, probed=False)
    assert ran.code == 0, ran.printed
    if mode in forbidden.split():
        assert "operation not permitted when stream is capturing" in ran.told["error"]
        assert "operation failed due to a previous error during capture" in ran.told["end"]
    else:
        assert ran.told == {"error": "", "end": ""}


def test_the_simulated_cuda_forbids_another_thread_only_in_a_global_capture(run: Run) -> None:
    for mode, error in (("global", "not permitted"), ("thread_local", "")):
        ran = run("forbidden", options={"call": "event.query()", "mode": mode, "elsewhere": True}, probed=False)
        assert ran.code == 0, ran.printed
        assert error in ran.told["error"]
        assert bool(ran.told["end"]) == bool(error)


def test_an_event_is_recorded_on_its_own_device_only(run: Run) -> None:
    ran = run("misplaced", probed=False)
    assert ran.code == 0, ran.printed
    assert ran.told["codes"] == [0, 400], "cudaErrorInvalidResourceHandle"


# --- Errors


def asked() -> list[str]:
    """The functions of torch that the module of devices calls, as device_loops.fail names them."""
    tree = ast.parse(Path(device.__file__).read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if ast.unparse(node.value) == "torch.cuda":
                found.add(f"cuda.{node.attr}")
            elif ast.unparse(node.value) == "torch" and node.attr == "empty":
                found.add("torch.empty")
            elif node.attr in ("record", "query", "synchronize", "elapsed_time"):
                found.add(f"Event.{node.attr}")
            elif node.attr == "copy_":
                found.add("Tensor.copy_")
    return sorted(found)


OF_LOSSES = {"cuda.Stream", "cuda.stream", "torch.empty", "Tensor.copy_"}
OF_MEMORY = {
    "cuda.get_device_name", "cuda.mem_get_info", "cuda.memory_allocated", "cuda.memory_reserved",
    "cuda.reset_peak_memory_stats",
}  # fmt: skip
GUESSED = {"cuda.current_device"}
UNASKED = {
    "timed": OF_MEMORY | GUESSED,
    "recorded": OF_MEMORY | GUESSED,
    "inference": OF_MEMORY | OF_LOSSES,
    "followed": OF_LOSSES | GUESSED | {"cuda.device_count", "Event.elapsed_time", "Event.synchronize"},
}
"""What the loops of the test have no need of: most have an optimizer, which tells the device."""


@pytest.mark.parametrize("how", ["timed", "recorded", "inference", "followed"])
def test_no_error_of_a_device_reaches_the_program_and_the_run_says_why(run: Run, how: str) -> None:
    """Each call of torch fails in turn: the program ends as ever, its steps are kept, and the run names the query."""
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "timed": ("plain", {}),
        "recorded": ("plain", {"profiling": RECORDING}),
        "inference": ("infer", {"inference": True}),
        "followed": ("plain", {"follow": 3}),
    }
    loop, more = cases[how]
    whole = run(loop, options={"device": 1}, **more)
    assert whole.code == 0, whole.printed
    said = set()
    for name in asked():
        ran = run(loop, options={"device": 1}, failing=[name], environment={"FAKECUDA_KERNEL_US": "10"}, **more)
        assert ran.code == 0, (name, ran.printed)
        assert "Traceback" not in ran.printed, (name, ran.printed)
        assert ran.told.keys() == whole.told.keys(), name
        assert len(ran.steps) == len(whole.steps), name
        assert all(step["total"] > 0 for step in ran.steps)
        if f"{name} fails here" in (ran.history["notes"] if how == "followed" else str(ran.done["unanswered"])):
            said.add(name)
    assert set(asked()) - said <= UNASKED[how], "failed in silence"


def test_a_run_with_errors_is_marked_as_unreliable(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLUGGABLE)
    options = ("--steps", "12", "--repeats", "1", "-q")
    done = gpubench("train-bench", *options, "--", sys.executable, str(script), results=tmp_path / "results")
    assert done.code == 0, done.stderr
    warned = done.document("summary.json")["warnings"]
    (said,) = (line for line in warned if line.startswith("unreliable"))
    assert "the peak of the memory" in said
    assert "getDeviceStats" in said
    assert len(done.lines("steps.jsonl")) == 12 + 10


PLUGGABLE = """
import os, subprocess, sys, tempfile
import torch

source = '''
#include <stdlib.h>
typedef struct stream *cudaStream_t;
int cudaMalloc(void **, size_t);
int cudaFree(void *);
void *take(ssize_t size, int device, cudaStream_t stream) { void *p = 0; cudaMalloc(&p, size); return p; }
void give(void *p, ssize_t size, int device, cudaStream_t stream) { cudaFree(p); }
'''
folder = tempfile.mkdtemp()
open(folder + "/pool.c", "w").write("#include <sys/types.h>\\n" + source)
subprocess.run(["cc", "-shared", "-fPIC", "-o", folder + "/pool.so", folder + "/pool.c"], check=True)
allocator = torch.cuda.memory.CUDAPluggableAllocator(folder + "/pool.so", "take", "give")
torch.cuda.memory.change_current_allocator(allocator)
model = torch.nn.Linear(16, 1).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(22):
    optimizer.zero_grad()
    model(torch.ones(8, 16).cuda()).mean().backward()
    optimizer.step()
"""


def test_gpubench_waits_for_no_device_in_the_sight_of_torch(run: Run) -> None:
    warned = run("strict", options={"mode": "warn"})
    assert warned.code == 0, warned.printed
    assert "called a synchronizing CUDA operation" not in warned.printed
    refused = run("strict", options={"mode": "error"})
    assert refused.code == 0, refused.printed
    assert not refused.done["unanswered"]
    assert all(step["loss"] is not None for step in refused.steps)


@pytest.mark.parametrize(("at_once", "borders"), [(LONG, 6), (0, 7)])
def test_the_calls_a_step_with_the_probe_and_without_it(run: Run, at_once: int, borders: int) -> None:
    """What the probe adds to a long run, less what its two ends may add; the host is held up never, or always."""
    steps, ends = 48, 12
    options = {"device": 1, "steps": steps}
    table = {}
    for probed in (False, True):
        ran = run("plain", options=options, probed=probed, at_once=at_once, environment={"FAKECUDA_TRACE": "1"})
        assert ran.code == 0
        table[probed] = ran.calls()
    added = {name: table[True][name] - table[False][name] for name in table[True] | table[False]}
    added = {name: number for name, number in added.items() if number}
    by_call: Counter[str] = Counter()
    for name, number in added.items():
        by_call[name.split(" cuda:")[0]] += number
    at_most = {
        "cudaEventRecord": borders + 1,  # the borders, and the end of the copies of losses
        "cudaEventElapsedTime": 6,
        "cudaEventQuery": 2 * 6 + 4,  # two inside of each elapsed time, and what asks whether it is time
        "cudaMemcpyAsync DeviceToHost": 1,
        "cudaEventSynchronize": 1,
    }
    assert set(by_call) <= set(at_most)
    for call, number in by_call.items():
        assert number <= at_most[call] * steps + ends, call
    assert not any("cuda:0" in name for name in added), "a device that the program does not use"
