"""What a rank sends that no rank sends: an error that names the rank, or a run that can be read."""

import copy
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from footprints_made import MIB, of_phases, phase, predicted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from piped import Line
from running import gpubench

from gpubench import events, probe
from gpubench.errors import GpubenchError, InvalidEvent
from gpubench.host.recorder import Recorder
from gpubench.kinds.memory.defaults import complete_memory
from gpubench.kinds.memory.recorder import MemoryRecorder
from gpubench.kinds.memory.settings import MemorySettings
from gpubench.kinds.pipeline import defaults
from gpubench.kinds.pipeline.recorder import PipeRecorder
from gpubench.kinds.pipeline.settings import PipeSettings
from gpubench.kinds.program.defaults import complete_program
from gpubench.kinds.program.recorder import ProgramRecorder
from gpubench.kinds.training.recorder import TrainRecorder
from gpubench.report import after_run
from gpubench.report import run as report
from gpubench.report.terminal import Terminal
from gpubench.runs.directory import SAMPLES, STEPS, TIMELINE
from gpubench.runs.reader import Run
from gpubench.settings.defaults import complete
from gpubench.settings.loading import completed, load
from gpubench.settings.programs import ProgramSettings
from gpubench.settings.schema import TrainSettings

BEGAN = 1_795_260_000.0
TAKEN = 12


def training(rank: int = 0, steps: int = TAKEN) -> list[events.OfRank]:
    """All that a rank says, one event of each kind or more."""
    return [
        events.Heartbeat(rank=rank, doing="forward", step=1, within=5.0, waits_for=1),
        events.Log(rank=rank, time=BEGAN, level=30, logger="gpubench.program", message="careful", fields={"at": 1}),
        events.EnvironmentCaptured(
            rank=rank, environment={"gpus": [{"name": "GPU", "memory_bytes": 10}], "cpu": {"logical_cores": 2}}
        ),
        events.ModelBuilt(
            rank=rank,
            repeat=0,
            parameters=10,
            trainable_parameters=5,
            sample_shape="8 x 3",
            tokens_per_sample=8,
            seconds=0.5,
            device="cpu",
            settings={"data.workers": 1, "performance.cpu_threads": 2, "precision": "fp32"},
            places={"loader": "train.py:3"},
            optimizers={"AdamW": ["train.py:4"]},
        ),
        events.Planned(rank=rank, repeat=0, steps=steps),
        events.TreatmentsMissed(rank=rank, repeat=0, missed={"performance.sdpa": "no attention"}),
        events.GraphsCompiled(rank=rank, repeat=0, steps=[0, 1]),
        events.FlopsCounted(
            rank=rank,
            model_flops_per_sample=1e9,
            hardware_flops_per_sample=2e9,
            method="counted",
            by_operator={"aten.mm": 1000},
        ),
        events.PeakMeasured(rank=rank, flops_per_s=1e12, dtype="float32", size=1024),
        *(stepped(number, rank) for number in range(steps)),
        events.RepeatDone(
            rank=rank,
            repeat=0,
            wall=steps * 0.1,
            peak_allocated=100,
            peak_reserved=200,
            peak_rss=300,
            setup_peak_allocated=50,
            work=events.WorkCounted(backward_passes=steps, updated_first=5, updated_least=5, forwarded=8 * steps),
        ),
        events.ReferenceWorkloadTimed(rank=rank, repeat=0, seconds=0.1),
        events.Done(rank=rank),
    ]


def stepped(number: int, rank: int = 0, **changes: Any) -> events.StepsMeasured:
    usual: dict[str, Any] = {
        "repeat": 0,
        "rank": rank,
        "epoch": 0,
        "step": number,
        "time": BEGAN + number * 0.1,
        "total": 0.1,
        "phases": {"forward": 0.06, "other": 0.04},
        "host": 0.05,
        "samples": 8,
        "loss": 1.0,
        "starved": False,
    }
    return events.StepsMeasured(rank=rank, steps=[events.Step(**usual | changes)])


def pipelined() -> list[events.OfRank]:
    line = Line((4,), micro_batches=4)
    repeat = line.repeat()
    return [
        events.Heartbeat(rank=0, doing="forward", step=1),
        *repeat.built.values(),
        events.SpansMeasured(rank=0, spans=repeat.spans),
        *(
            events.SampleFinished(rank=0, sample=sample, latent=b"abc", image=None)
            for sample in repeat.samples.values()
        ),
        *repeat.stages.values(),
        events.Done(rank=0),
    ]


def followed() -> list[events.OfRank]:
    found = of_phases(predicted(), [phase("steady", "backward", {"activations": MIB})], "steady", "backward")
    return [
        events.Heartbeat(rank=0, doing="backward", step=1),
        events.MemoryFollowed(rank=0, repeat=0, footprint=msgspec.json.encode(found)),
        events.BatchSizesFound(rank=0, repeat=0, found=b"{}"),
        events.Done(rank=0),
    ]


KINDS: dict[str, tuple[Any, Any, Any, dict[str, Any], Callable[[], list[events.OfRank]]]] = {
    "train-bench": (TrainRecorder, TrainSettings, complete, {"model": "gpt2-tiny", "device": "cpu"}, training),
    "program": (ProgramRecorder, ProgramSettings, complete_program, {"program.command": "true"}, training),
    "pipe-infer": (PipeRecorder, PipeSettings, defaults.complete, {"work.samples": 4, "device": "cpu"}, pipelined),
    "memory": (MemoryRecorder, MemorySettings, complete_memory, {"model": "gpt2-tiny", "device": "cpu"}, followed),
}


def opened(kind: str, results: Path) -> Recorder[Any]:
    recorder, of, fill, values, _ = KINDS[kind]
    values = values | {"results": str(results), "training.warmup_steps": 2, "measurement.repeats": 1}
    if kind in ("pipe-infer", "memory"):
        del values["training.warmup_steps"]
    made: Recorder[Any] = recorder(completed(load(of, None, values), fill), [])
    made.begin_repeat(0, 1)
    return made


def ended(recorder: Recorder[Any], lines: list[bytes]) -> GpubenchError | None:
    """Gives the recorder what a rank sends, and ends its run. Returns the error that ended it early."""
    error: GpubenchError | None = None
    try:
        for line in lines:
            recorder.take(events.decode_of(0, line))
        recorder.end_repeat()
    except GpubenchError as caught:
        error = caught
    recorder.close("failed" if error else "completed", recorder.summary(), error)
    return error


def read(path: Path) -> str:
    """Returns the report of a run, all of whose files can be read."""
    after_run.write_up(path)
    run = Run.open(path)
    for name, part in ((STEPS, "steps"), (TIMELINE, "spans"), (SAMPLES, "samples")):
        assert not (path / name).exists() or getattr(run, part) is not None
    assert run.problems == []
    json.loads(report.to_json([path], None))
    return Terminal(quiet=False, verbosity=1).render(report.document([path], None))


ABSURD: list[Any] = [
    None, True, -1, -0.5, 0, 1, 7, 1e-320, 1e308, 10**18, 2**70, 10**4000, "", "x" * 10**6, 'a "b" \\ c', "\ud800",
    "a\nb", "[red]", [], [1], {}, {"a": {}}, {f"phase {number}": 0.1 for number in range(200_000)},
]  # fmt: skip


def deep(levels: int = 300) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = {"a": [found]}
    return found


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of all values in a document."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    document = copy.deepcopy(document)
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return document


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"what?", "malformed"),
        (b'{"event":"log","rank":0,"fields":{"a":' + b"[" * 100_000, "recursion"),
        (b'{"event":"heartbeat","rank":0,"doing":"\xff"}', "utf-8"),
        (b'{"event":"heartbeat","rank":0,"doing":"\\ud800","step":1}', "surrogate"),
        (b'{"event":"planned","rank":0,"repeat":0,"steps":' + b"9" * 5000 + b"}", "range"),
        (b'{"event":"planned","rank":0,"repeat":0,"steps":NaN}', "malformed"),
        (b'{"event":"repeatdone","rank":0,"repeat":0,"wall":1e999}', "range"),
        (b'{"event":"done","rank":1}', "rank 1"),
        (b'{"event":"elsewhere","rank":-1,"host":"there"}', "elsewhere"),
        (b'{"event":"seen","rank":-1,"pid":1,"what":"torch"}', "seen"),
        (events.encode(events.Log(rank=0, time=0, level=1, logger="", message="", fields={"a": deep()})), "nested"),
        (events.encode(stepped(0, rank=3)), "rank 3"),
        (events.encode(stepped(0, phases={f"phase {n}": 0.1 for n in range(200_000)})), "length"),
    ],
)
def test_a_line_that_no_rank_sends_is_refused_for_one_reason(line: bytes, reason: str) -> None:
    with pytest.raises(msgspec.DecodeError, match=f"(?i){reason}"):
        events.decode_of(0, line)


def test_a_line_without_an_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LONGEST_LINE", 100)
    lines = events.LineBuffer()
    assert list(lines.take(b"one\ntw")) == [b"one"]
    assert list(lines.take(b"o\n\n" + b"x" * 90)) == [b"two", b""]
    with pytest.raises(msgspec.DecodeError, match="longer than"):
        list(lines.take(b"x" * 90))


HELLO = events.Hello(rank=0, world_size=1, pid=1, host="x", machine="y", secret="s3")


@pytest.mark.parametrize(
    "line",
    [
        b'{"event":"hello","rank":0,"world_size":1,"pid":1,"host":"x","machine":"y","secret":"s3","secret":"no"}',
        b'{"secret":"s3","event":"hello","rank":' + b"[" * 3000,
        events.encode(HELLO)[:-2] + b',"more":"' + b"x" * events.LONGEST_GREETING + b'"}',
        events.encode(msgspec.structs.replace(HELLO, world_size=2**60)),
        events.encode(msgspec.structs.replace(HELLO, rank=-1)),
        events.encode(msgspec.structs.replace(HELLO, pid=0)),
        events.encode(msgspec.structs.replace(HELLO, ranks_here=(0, 2**30))),
        events.encode(msgspec.structs.replace(HELLO, secret="")),
        events.encode(events.Seen(rank=-1, pid=1, what="torch")),
        b'{"event":"done","rank":0,"secret":"s3"}',
        b"\xff" * 100,
        b"",
    ],
)
def test_a_greeting_is_refused_before_it_is_decoded_unless_it_has_the_secret(line: bytes) -> None:
    assert events.greeting(events.encode(HELLO), "s3") == HELLO
    assert events.greeting(line, "s3") is None


def test_nothing_is_decoded_for_a_client_without_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_decoded", lambda *_: pytest.fail("decoded"))
    assert events.greeting(events.encode(HELLO), "other") is None


ORDERS: dict[str, Callable[[list[events.OfRank]], list[events.OfRank]]] = {
    "twice": lambda said: [*said[:12], *said[11:]],
    "backwards": lambda said: said[::-1],
    "steps after the end": lambda said: [*said[:-1], stepped(TAKEN), said[-1]],
    "a gap": lambda said: [*said[:12], *said[13:]],
    "the end twice": lambda said: [*said[:-1], *said[-3:]],
}


@pytest.mark.parametrize("order", ORDERS)
def test_steps_in_a_wrong_order_end_the_run_with_an_error_that_names_the_rank(tmp_path: Path, order: str) -> None:
    recorder = opened("program", tmp_path)
    error = ended(recorder, [events.encode(event) for event in ORDERS[order](training())])
    assert isinstance(error, InvalidEvent)
    assert error.message.startswith("rank 0 sent an event that cannot be right: ")
    read(recorder.writer.path)


def test_phases_beyond_the_most_are_counted_and_their_time_is_kept(tmp_path: Path) -> None:
    said = training()
    for number in range(TAKEN):
        phases = {f"batch {number}.{part}": 0.01 for part in range(9)}
        said[9 + number] = stepped(number, phases={**phases, "other": 0.01})
    recorder = opened("program", tmp_path)
    assert ended(recorder, [events.encode(event) for event in said]) is None
    read(recorder.writer.path)
    run = Run.open(recorder.writer.path)
    assert run.summary
    assert any("64 phases and 45 more, whose time is in 'other'" in warning for warning in run.summary.warnings)
    steps = run.steps
    assert len(steps.phases) == events.MOST_PHASES
    assert np.sum([*steps.phases.values()], axis=0).tolist() == pytest.approx([0.1] * TAKEN)


def forged(kind: str, number: int, path_number: int, value: Any) -> bytes | None:
    """Returns a line with one value changed; None if it is refused as it is decoded."""
    document = json.loads(events.encode(KINDS[kind][4]()[number]))
    all_places = list(places(document))
    line = json.dumps(changed(document, all_places[path_number % len(all_places)], value)).encode()
    try:
        events.decode_of(0, line)
    except msgspec.DecodeError:
        return None
    return line


@settings(max_examples=settings().max_examples // 3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=some.data(), kind=some.sampled_from(sorted(KINDS)))
def test_an_event_with_any_value_changed_is_an_error_of_its_rank_or_a_run_that_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, data: some.DataObject, kind: str
) -> None:
    said = [events.encode(event) for event in KINDS[kind][4]()]
    number = data.draw(some.integers(0, len(said) - 1))
    value = data.draw(some.sampled_from([*ABSURD, deep()]))
    line = forged(kind, number, data.draw(some.integers(0, 50)), value)
    if line is None:
        return
    recorder = opened(kind, tmp_path_factory.mktemp("results"))
    error = ended(recorder, [*said[:number], line, *said[number + 1 :]])
    assert error is None or error.exit_code == 1
    read(recorder.writer.path)


SENDER = """
import os, socket, sys, time
connection = socket.socket(socket.AF_UNIX)
connection.connect(os.environ[sys.argv[1]])
connection.sendall(bytes.fromhex(sys.argv[2]))
connection.makefile("rb").readline()
connection.sendall(bytes.fromhex(sys.argv[3]))
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"event":"log","rank":0,"fields":{"a":' + b"[" * 5000 + b"\n", "recursion"),
        (events.encode(stepped(2**70)), "<= 2147483647"),
        (events.encode(stepped(0, repeat=7)), "repeat 8"),
    ],
)
def test_a_program_that_forges_events_ends_its_run_with_one_error(tmp_path: Path, line: bytes, reason: str) -> None:
    (tmp_path / "sender.py").write_text(SENDER)
    hello = events.encode(msgspec.structs.replace(HELLO, secret=""))
    words = [sys.executable, str(tmp_path / "sender.py"), probe.ADDRESS_VARIABLE, hello.hex(), line.hex()]
    run = gpubench("train-bench", "--repeats", "1", "--steps", "20", "-q", "--", *words, results=tmp_path / "results")
    assert run.code == 1
    first, *others = [one for one in run.stderr.splitlines() if not one.startswith("warning: ")]
    assert first.startswith("error: rank 0")
    assert "sent an event that cannot be right" in first
    assert reason in first
    assert [one.partition(":")[0] for one in others] == ["hint"]
    assert run.document("run.json")["error"]["kind"] == "InvalidEvent"
