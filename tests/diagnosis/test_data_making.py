"""What is wrong with how a program makes its batches."""

from typing import Any

import msgspec
import pytest

from gpubench.data_cost import DataCost, Estimate, Proposed, ReadyCeiling, SampleStage, WithWorkers, stages_of
from gpubench.diagnosis import data_needs
from gpubench.diagnosis.rules import of_data
from gpubench.findings import Finding
from gpubench.loader_record import (
    BatchFacts,
    LoaderRecord,
    ReadBytes,
    SameNumbers,
    SampleTimes,
    SlowSample,
    StageTime,
    WorkerMemory,
)
from gpubench.sampled import Sampled, SampledCode, SampledFunction

MIB = 2**20
RECORD = LoaderRecord(
    dataset="Photos",
    style="map",
    length=1000,
    batch_size=8,
    workers=2,
    start_method="fork",
    prefetch=2,
    persistent=False,
    pin_memory=False,
    threads=1,
    cores=4,
    batches=100,
    samples=800,
    wall=8.0,
    cpu=8.0,
    main_cpu=0.1,
    first_batch=0.1,
    passes=1,
    stages=[StageTime("dataset", "", 4.0, 4.0, 800), StageTime("collate", "", 1.0, 1.0, 100)],
    stage_samples=800,
)


def scaled(workers: int, throughput: float, **more: Any) -> WithWorkers:
    return WithWorkers(workers, Estimate(throughput, (0.99 * throughput, 1.01 * throughput)), **more)


def cost(record: LoaderRecord = RECORD, **more: Any) -> DataCost:
    stages = stages_of([record], None)
    whole = sum(one.seconds for one in stages)
    known: dict[str, Any] = {"scaling": [scaled(0, 60), scaled(1, 50), scaled(2, 100, cores=2.0)]}
    return DataCost(record, stages, whole, sum(one.cpu for one in stages), record.times, **(known | more))


def changed(**more: Any) -> LoaderRecord:
    return msgspec.structs.replace(RECORD, **more)


def findings(found: DataCost) -> dict[str, Finding]:
    return {one.id: one for one in of_data(found, None).findings}


CEILING = ReadyCeiling(Estimate(100), Estimate(200), 2.0, (1.9, 2.1), "faster", ("a", "b"))


def test_more_workers_are_proposed_with_what_they_were_measured_to_save() -> None:
    more = [*cost().scaling, scaled(4, 190)]
    proposed = Proposed(4, 1.6, (1.5, 1.7), "faster", ("b", "c"))
    found = findings(cost(scaling=more, ceiling=CEILING, proposed=proposed))["too-few-workers"]
    assert found.fix == {"data.workers": 4}
    assert found.measured
    assert found.measured.outcome == "confirmed"
    assert found.measured.saving
    assert found.measured.saving.estimate == pytest.approx(1 - 1 / 1.6)
    assert found.expected
    assert found.expected.estimate == pytest.approx(1 - 100 / 190)


def test_no_worker_is_proposed_to_a_program_that_does_not_wait() -> None:
    ready = ReadyCeiling(Estimate(100), Estimate(101), 1.01, (1.0, 1.02), "equivalent", ("a", "b"))
    assert "too-few-workers" not in findings(cost(scaling=[*cost().scaling, scaled(4, 190)], ceiling=ready))


def test_workers_that_do_not_help_are_too_many() -> None:
    found = findings(cost(scaling=[scaled(0, 60), scaled(1, 99), scaled(2, 100)]))["too-many-workers"]
    assert found.fix == {"data.workers": 1}


MEMORY = WorkerMemory(pss=100 * MIB, shm=0, private=90 * MIB, shared=10 * MIB, private_first=40 * MIB,
                      shared_first=60 * MIB, samples=800)  # fmt: skip


@pytest.mark.parametrize(
    ("record", "name"),
    [
        (changed(same_numbers=[SameNumbers("numpy.random", "workers", 2)]), "same-random-numbers"),
        (changed(same_numbers=[SameNumbers("numpy.random", "batches", 2)]), "same-seed-in-batches"),
        (changed(memory=[MEMORY], objects=1_000_000, object_bytes=90 * MIB), "copy-on-write"),
        (changed(restarts=[1.0] * 3, passes=4), "restarted-workers"),
        (changed(start_method="spawn", first_batch=3.0), "slow-worker-start"),
        (changed(batch=BatchFacts(size=1000, wide=800)), "float64-batches"),
        (changed(batch=BatchFacts(size=1000, from_bytes=900)), "bytes-as-floats"),
        (changed(batch=BatchFacts(size=2**29)), "large-prefetch"),
        (changed(pin_memory=True, gpus=0), "pinned-without-gpu"),
        (
            changed(
                stages=[StageTime("read", "", 4.0, 1.0, 800), StageTime("dataset", "", 1.0, 1.0, 800)],
                read=ReadBytes(samples=800, asked=800 * 1000, disk=800 * 1000),
            ),
            "slow-reads",
        ),
        (RECORD, "slow-dataset"),
        (changed(stages=[StageTime("decode", "PIL", 4.0, 4.0, 800)]), "slow-decode"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_was_planted_is_found_and_not_claimed_of_a_clean_loader(record: LoaderRecord, name: str) -> None:
    assert name in findings(cost(record))
    if name != "slow-dataset":
        assert name not in findings(cost(RECORD))


def test_memory_that_grows_without_sharing_less_is_no_copy_on_write() -> None:
    cache = msgspec.structs.replace(MEMORY, shared=60 * MIB)
    assert "copy-on-write" not in findings(cost(changed(memory=[cache], objects=1_000_000, object_bytes=90 * MIB)))


def test_a_dataset_of_few_objects_is_not_what_workers_copy() -> None:
    assert "copy-on-write" not in findings(cost(changed(memory=[MEMORY], objects=10_000, object_bytes=MIB)))


def test_one_slow_sample_is_spoken_of_as_one() -> None:
    assert findings(cost(changed(times=slow([0.19, 0.21]))))["slow-samples"].title.startswith("1 sample takes ")


def slow(again: list[float]) -> SampleTimes:
    return SampleTimes(100, [0.002] * 100 + [0.2], [SlowSample("7", 0.2, again, "photos/7.jpg")], [0.002] * 2)


def test_a_slow_sample_is_told_from_a_slow_moment() -> None:
    found = findings(cost(changed(times=slow([0.19, 0.21]))))["slow-samples"]
    assert "photos/7.jpg" in found.evidence[0]
    assert "slow-samples" not in findings(cost(changed(times=slow([0.002, 0.19]))))


def test_threads_are_found_where_a_sample_costs_more_without_workers() -> None:
    record = changed(workers=0, start_method="", prefetch=None, threads=4)
    scaling = [scaled(0, 60, cpu=0.05, cores=3.0), scaled(1, 200, cpu=0.005)]
    assert "threads-for-samples" in findings(cost(record, scaling=scaling))
    assert "threads-for-samples" not in findings(
        cost(record, scaling=[scaled(0, 60, cpu=0.006), scaled(1, 200, cpu=0.005)])
    )


def test_the_faster_decoder_that_is_installed_is_named() -> None:
    record = changed(stages=[StageTime("decode", "PIL", 4.0, 4.0, 800)], decoders=["PIL", "torchvision"])
    assert "torchvision" in findings(cost(record))["slow-decode"].advice


def test_the_smallest_number_of_workers_that_feeds_training_is_named() -> None:
    scaling = [scaled(0, 60), scaled(2, 199), scaled(4, 300)]
    assert "2 workers make enough" in data_needs.sentence(cost(scaling=scaling, ceiling=CEILING))
    few = [scaled(0, 60, cpu=0.05), scaled(2, 80, cpu=0.05)]
    assert "no number of workers does" in data_needs.sentence(cost(scaling=few, ceiling=CEILING))


def test_reading_is_split_from_the_stages_that_it_is_in() -> None:
    recorded = changed(stages=[StageTime("dataset", "", 8.0, 4.0, 800, reading=6.0, reading_cpu=2.0)])
    timed = changed(stages=[StageTime("dataset", "", 4.0, 2.0, 800)])
    stages: dict[str, SampleStage] = {one.kind: one for one in stages_of([timed], recorded)}
    assert stages["read"].seconds == pytest.approx(3.0 / 800)
    assert stages["dataset"].seconds == pytest.approx(1.0 / 800)
    assert sum(one.share for one in stages.values()) == pytest.approx(1)


def test_the_finding_wants_as_many_workers_as_feed_training_and_no_more() -> None:
    scaling = [scaled(0, 60), scaled(2, 120), scaled(4, 199), scaled(8, 400)]
    known = cost(changed(workers=0, start_method="", prefetch=None), scaling=scaling, ceiling=CEILING)
    assert "4 workers make enough" in data_needs.sentence(known)
    assert findings(known)["too-few-workers"].fix == {"data.workers": 4}
    unknown = cost(changed(workers=0, start_method="", prefetch=None), scaling=scaling)
    assert findings(unknown)["too-few-workers"].fix == {"data.workers": 8}


@pytest.mark.parametrize(
    ("training", "others", "said"), [(60, 0, ""), (20, 0, "start anew"), (20, 1, "another DataLoader")]
)
def test_training_that_waits_for_more_than_this_loader_is_told(training: float, others: int, said: str) -> None:
    ready = ReadyCeiling(Estimate(training), Estimate(200), 200 / training, (2.0, 10.0), "faster", ("a", "b"))
    found = data_needs.elsewhere(cost(changed(others=others), ceiling=ready))
    assert said in found
    assert bool(said) == bool(found)


def test_the_line_is_named_on_which_samples_are_made_that_call_nothing_of_the_program() -> None:
    line = SampledFunction("", "data.py", "Photos.__getitem__", 9, 90, 11, 80, "return decode(self.files[index])")
    sampled = SampledCode(Sampled(0, 0, 0, []), Sampled(2, 100, 0, [line]))
    found = {one.id: one for one in of_data(cost(), sampled).findings}["slow-dataset"]
    assert found.evidence[1] == (
        "89 % of the samples of Photos.__getitem__ at data.py:9 are in line 11: return decode(self.files[index])"
    )
