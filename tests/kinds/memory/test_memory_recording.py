"""What is kept of a memory run: its metrics, and where it stands."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from footprints_made import MIB, of_phases, phase, predicted

from gpubench import events
from gpubench.kinds.memory.defaults import complete_memory
from gpubench.kinds.memory.recorder import MemoryRecorder
from gpubench.kinds.memory.settings import MemorySettings
from gpubench.settings.loading import completed, load
from gpubench.telemetry import TelemetrySample


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[MemoryRecorder]:
    given = {"model": "gpt2-tiny", "device": "cpu", "results": str(tmp_path), "memory.steps": 4}
    opened = MemoryRecorder(completed(load(MemorySettings, None, given), complete_memory), ["gpubench", "memory"])
    yield opened
    opened.close("completed", opened.summary())


def followed(repeat: int, rank: int, size: int) -> events.MemoryFollowed:
    found = of_phases(predicted(), [phase("steady", "backward", {"activations": size * MIB})], "steady", "backward")
    return events.MemoryFollowed(rank=rank, repeat=repeat, footprint=msgspec.json.encode(found))


def test_a_peak_is_the_fullest_ranks_and_the_mean_of_repeats_with_an_interval(recorder: MemoryRecorder) -> None:
    for repeat, size in enumerate((100, 102, 104)):
        recorder.take(followed(repeat, 0, size))
        recorder.take(followed(repeat, 1, 50))
    peak = recorder.summary()["peak_memory_total"]
    assert peak.repeats == [100 * MIB, 102 * MIB, 104 * MIB]
    assert peak.estimate == 102 * MIB
    assert peak.interval is not None
    assert peak.interval[0] < 100 * MIB < 104 * MIB < peak.interval[1]


def test_a_repeat_begins_from_nothing_but_the_machines_state(recorder: MemoryRecorder) -> None:
    sample = TelemetrySample(time=1.0, cost=0.0)
    recorder.sample(sample)
    recorder.progress.step, recorder.progress.doing = 2, "forward"
    recorder.begin_repeat(1, 3)
    now = recorder.progress
    assert (now.place, now.step, now.steps, now.doing, now.telemetry) == ("repeat 2 of 3", None, 4, "starting", sample)
    recorder.begin_recorded()
    assert (recorder.progress.place, recorder.progress.telemetry) == ("profiling", sample)
