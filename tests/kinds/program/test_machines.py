"""Runs over two machines: who writes, and what becomes of them when the cable between them is cut."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import Machine, machines, program, ranks, torchrun, wait_until, why_not
from running import SMALL

from gpubench.host.order import SHARED

ALONE = ("--device", "cpu", "--performance.cpu_threads=1", "--repeats", "1", "-q")
TRAIN = ("train-bench", *SMALL, *ALONE)
PIPE = ("pipe-infer", "--unet", "dummy", *ALONE, "--baseline", "off")
LONG_TRAINING = ("--steps=1000000", "--measurement.stall_timeout=8")
SLOW_TO_LOAD = "--measurement.stall_timeout=20"  # diffusers, on a busy machine
LONG_PIPE = ("--steps=4", "--samples=5000", "--step-ms=20", "--no-verify", "--pipeline.deadline=8", SLOW_TO_LOAD)

UNAUTHENTICATED_CLIENTS = """
import socket, sys
held = []
for words in (b"", b'{"event":"hello",', b"GET / HTTP/1.1\\r\\n\\r\\n", bytes(range(256)) * 40,
              b'{"event":"hello","rank":1,"world_size":2,"pid":1,"host":"x","machine":"x","secret":"wrong"}\\n'):
    held.append(socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10))
    held[-1].sendall(words)
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def possible() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def pair(possible: None) -> Iterator[tuple[Machine, Machine]]:
    with machines() as made:
        yield made


def test_two_machines_train_as_one_and_one_of_them_writes_despite_unauthenticated_clients(
    pair: tuple[Machine, Machine], tmp_path: Path
) -> None:
    host, other = pair
    with ranks(pair, *TRAIN, "--steps", "5", results=tmp_path) as sides:
        assert wait_until(lambda: host.port)
        command = other.command(sys.executable, "-c", UNAUTHENTICATED_CLIENTS, host.address, str(host.port))
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as clients:
            assert clients.stdout
            assert clients.stdout.readline() == "connected\n"
            first, second = (side.finish() for side in sides)
            clients.kill()
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert second.runs == []
    record = first.document("run.json")
    assert (record["status"], record["world_size"], record["host"]) == ("completed", 2, host.name)
    assert {line["rank"] for line in first.lines("steps.jsonl")} == {0, 1}
    assert "completed: " in first.stdout
    assert second.stdout == ""


@pytest.mark.stress
def test_a_pipeline_over_two_machines_makes_every_sample_bit_identical(
    pair: tuple[Machine, Machine], tmp_path: Path
) -> None:
    with torchrun(pair, *PIPE, "--steps", "4", "--samples", "3", "--verify", results=tmp_path) as sides:
        first, second = (side.finish() for side in sides)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert second.runs == []
    assert first.document("run.json")["world_size"] == 2
    assert first.document("summary.json")["pipeline"]["verification"]["identical"] == 3
    assert {(line["rank"], line["direction"]) for line in first.lines("handoffs.jsonl")} == {(0, "send"), (1, "recv")}


@pytest.mark.stress
@pytest.mark.parametrize("cut", [0, 1], ids=["the host's", "the other"])
@pytest.mark.parametrize(
    ("command", "kept"),
    [((*TRAIN, *LONG_TRAINING), "steps.jsonl"), ((*PIPE, *LONG_PIPE), "samples.jsonl")],
    ids=["in training", "in a pipeline"],
)
def test_when_a_machine_is_cut_off_it_is_named_and_no_rank_stays_on_either_side(
    pair: tuple[Machine, Machine], tmp_path: Path, cut: int, command: tuple[str, ...], kept: str
) -> None:
    host, other = pair
    with torchrun(pair, *command, results=tmp_path) as sides:
        assert wait_until(lambda: has_lines(tmp_path / "0", kept) or sides[0].process.poll() is not None)
        assert has_lines(tmp_path / "0", kept), sides[0].finish().stderr
        pair[cut].pull_the_plug()
        ended = sides[0].finish(60)
        assert wait_until(lambda: not host.ranks and not other.ranks, 60)
        sides[1].process.kill()  # torchrun itself waits for the other machine, ten minutes and more
        left = sides[1].finish()
    assert ended.code == 1
    record = ended.document("run.json")
    assert record["status"] == "failed"
    assert re.match(
        rf"rank 1 \(pid \d+ on {other.name}\) has (been silent|made no progress) for \d+ s, ",
        record["error"]["message"],
    )
    assert f"error: {record['error']['message']}\nhint: " in ended.stderr
    assert len(ended.lines(kept)) >= 1
    assert "Traceback" not in ended.stderr.split("hint: ")[0]
    assert re.search(rf"error: rank 1: the host at {host.name}:\d+ is lost: .*\nhint: ", left.stderr)
    assert left.runs == []


PROGRAM = ("--repeats", "1", "--steps", "20", "-q")
ENDLESS = ("--repeats", "1", "--steps", "1000000", "-q")


@pytest.mark.stress
def test_a_program_on_two_machines_is_measured_in_every_repeat_and_the_machine_of_rank_zero_writes(
    pair: tuple[Machine, Machine], tmp_path: Path
) -> None:
    options = ("--repeats", "2", "--steps", "20", "-q", "--vs", "performance.cpu_threads=1")
    with program(pair, options=options, results=tmp_path, ranks=2) as sides:
        first, second = (side.finish() for side in sides)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert not second.results.exists()
    assert f"completed: rank 0 is on {pair[0].name}, which has the results\n" == second.stderr
    assert len(first.runs) == 2
    for run in first.runs:
        record = json.loads((run / "run.json").read_text())
        assert (record["world_size"], record["order_seed"]) == (4, SHARED)
        steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
        assert {(step["repeat"], step["rank"]) for step in steps} == {(n, rank) for n in (0, 1) for rank in range(4)}
        for rates in filter(None, json.loads((run / "summary.json").read_text())["clock_rates"]):
            assert rates["low"] <= 1.0 <= rates["high"], "each rank is compared with the clock of its own machine"


@pytest.mark.stress
@pytest.mark.parametrize("end", ["raise", "9"])
@pytest.mark.parametrize("rank", [0, 1])
def test_when_a_rank_of_a_program_fails_each_machine_has_one_error(
    pair: tuple[Machine, Machine], tmp_path: Path, rank: int, end: str
) -> None:
    with program(pair, str(rank), "15", end, options=PROGRAM, results=tmp_path) as sides:
        ended = [side.finish() for side in sides]
    for run in ended:
        assert run.code == 1
        assert run.stderr.count("error: ") == 1
        assert "Traceback" not in run.stderr
    assert f"error: on {pair[rank].name}, the program exited with code 1 in step " in ended[1 - rank].stderr
    assert ended[0].document("run.json")["status"] == "failed"
    assert not pair[0].pids
    assert not pair[1].pids


@pytest.mark.stress
@pytest.mark.parametrize("number", [0, 1], ids=["that of rank 0", "the other"])
def test_ctrl_c_on_one_machine_ends_the_program_on_both(
    pair: tuple[Machine, Machine], tmp_path: Path, number: int
) -> None:
    with program(pair, options=ENDLESS, results=tmp_path) as sides:
        assert wait_until(lambda: has_lines(tmp_path / "0", "steps.jsonl"))
        sides[number].interrupt()
        ended = [side.finish(60) for side in sides]
    assert (ended[number].code, ended[1 - number].code) == (130, 1)
    assert f"error: on {pair[number].name}, gpubench was interrupted\nhint: " in ended[1 - number].stderr
    assert ended[0].lines("steps.jsonl")
    assert not pair[0].pids
    assert not pair[1].pids


@pytest.mark.stress
def test_a_machine_that_is_cut_off_from_a_program_is_named_on_both(
    pair: tuple[Machine, Machine], tmp_path: Path
) -> None:
    with program(pair, options=(*ENDLESS, "--measurement.stall_timeout=45"), results=tmp_path) as sides:
        assert wait_until(lambda: has_lines(tmp_path / "0", "steps.jsonl"))
        pair[1].pull_the_plug()
        first, second = (side.finish(90) for side in sides)
    assert (first.code, second.code) == (1, 1)
    assert first.document("run.json")["status"] == "failed"
    assert pair[1].name in first.document("run.json")["error"]["message"]
    assert re.search(rf"error: .*{pair[0].name}.*\nhint: ", second.stderr)
    assert not pair[0].pids
    assert not pair[1].pids


def has_lines(results: Path, name: str) -> bool:
    return any(path.stat().st_size for path in results.glob(f"*/*/{name}"))
