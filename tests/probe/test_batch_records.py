"""What is told of the batches of a DataLoader together."""

from typing import Any

from gpubench.probe.batch_records import BatchRecords


def batch(first: int, *, traced: bool, slow: int | None = None) -> dict[str, Any]:
    samples = [(str(key), 60_000_000 if key == slow else 1_000_000) for key in range(first, first + 4)]
    wall = sum(took for _, took in samples)
    found: dict[str, Any] = {"made": 4, "wall": wall, "stages": {"dataset": [wall, wall, 1]}, "samples": samples}
    return {**found, "traced": True, "reads": {"dataset": [1000, 0, 1]}} if traced else found


def test_slow_samples_are_found_in_all_batches() -> None:
    records = [batch(4 * number, traced=number % 2 == 0, slow=8) for number in range(10)]
    found = BatchRecords(records, {}, 4)
    assert found.slowest[0] == ("8", 60_000_000)
    times = found.times({})
    assert times
    assert (times["number"], times["quantiles"][100]) == (40, 0.06)
    assert found.samples == 20, "stages are those of the batches in which reading was not timed"
