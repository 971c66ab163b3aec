import math
from statistics import stdev

import msgspec
import pytest
from msgspec import structs

from gpubench.events import FlopsCounted, ModelBuilt, PeakMeasured, RepeatDone, Step, WorkCounted
from gpubench.report.run import beside_the_gpu, what_samples_are
from gpubench.runs import headlines, warnings
from gpubench.runs.steps import Repeat, StepSamples, measure
from gpubench.runs.summary import Summary, metric_of, summarise
from gpubench.telemetry import GpuSample, TelemetrySample

WARMUP = 2


def step(
    number: int, total: float, rank: int = 0, repeat: int = 0, exposed: float = 0.0, *, skipped: bool = False
) -> Step:
    phases = {"forward": total - exposed - 0.001, "other": 0.001}
    if exposed:
        phases["exposed_communication"] = exposed
    time = 1000.0 * repeat + number * total
    return Step(repeat, rank, 0, number, time, total, phases, total, samples=4, loss=1.0, skipped=skipped)


def repeat_of(steps: list[Step], number: int = 0, wall: float | None = None) -> Repeat:
    built = ModelBuilt(
        rank=0,
        repeat=number,
        parameters=1,
        trainable_parameters=1,
        sample_shape="",
        tokens_per_sample=None,
        seconds=0.5,
    )
    repeat = Repeat(number, WARMUP, built=built)
    for one in steps:
        repeat.steps[one.rank].append(one)
    for rank, own in repeat.steps.items():
        elapsed = own.table().wall if wall is None else wall
        repeat.done[rank] = RepeatDone(
            rank=rank, repeat=number, wall=elapsed, peak_allocated=None, peak_reserved=None, peak_rss=10**6
        )
    return repeat


def summary_of(*repeats: Repeat, device: str | None = None, precision: str = "bf16", **known: object) -> Summary:
    return summarise(repeats, device, precision, **known)  # type: ignore[arg-type]


def test_a_first_step_that_is_timed_from_within_has_no_time() -> None:
    repeat = repeat_of([step(number, 0.2) for number in range(6)])
    repeat.done[0] = structs.replace(repeat.done[0], partial_first=True)
    found = summary_of(repeat)
    assert found["step_time"].estimate == pytest.approx(0.2)
    assert not {"first_step_time", "warmup_time"} & {metric.name for metric in found.metrics}


@pytest.mark.parametrize(
    ("timed_by", "starved", "share"),
    [("", None, 0.01), ("the events of cuda:0", 1.0, 0.01), ("the events of cuda:0", 0.25, 0.0025),
     ("the events of cuda:0", 0.0, 0.0), ("the CPU's clock in 6 of 6 updates", None, None)],
)  # fmt: skip
def test_what_the_probe_takes_is_a_share_of_a_step_where_no_gpu_hides_it(
    timed_by: str, starved: float | None, share: float | None
) -> None:
    steps = [step(number, 0.2) for number in range(WARMUP + 8)]
    if starved is not None:
        steps = [structs.replace(one, starved=(one.step - WARMUP) % 8 < 8 * starved) for one in steps]
    repeat = repeat_of(steps)
    repeat.done[0] = structs.replace(repeat.done[0], probe_time=0.002, timed_by=timed_by)
    found = summary_of(repeat)
    assert found["probe_time"].estimate == pytest.approx(0.002)
    known = found.get("probe_share")
    assert (known and known.estimate) == (share if share is None else pytest.approx(share))
    assert not {metric.better for metric in found.metrics if metric.name.startswith("probe_")} - {None}
    assert ("unknown" in beside_the_gpu({metric.name: metric for metric in found.metrics})) == (share is None)


def test_the_probe_takes_what_it_takes_on_the_rank_with_the_most() -> None:
    repeat = repeat_of([step(number, 0.2, rank) for rank in range(2) for number in range(6)])
    assert summary_of(repeat).get("probe_time") is None
    for rank, seconds in enumerate((0.003, 0.001)):
        repeat.done[rank] = structs.replace(repeat.done[rank], probe_time=seconds)
    assert summary_of(repeat)["probe_time"].estimate == pytest.approx(0.003)


def test_throughput_is_samples_over_wall_and_not_the_mean_of_rates() -> None:
    totals = [5.0, 5.0, 0.1, 0.3, 0.1, 0.3]
    found = summary_of(repeat_of([step(i, total) for i, total in enumerate(totals)]))
    assert found["throughput"].estimate == pytest.approx(4 * 4 / 0.8)
    assert found["mean_of_rates"].estimate == pytest.approx((4 / 0.1 + 4 / 0.3) / 2)
    assert found["step_time"].estimate == pytest.approx(0.2)
    assert found["first_step_time"].estimate == 5.0
    assert found["warmup_time"].estimate == 10.0


@pytest.mark.parametrize(
    ("losses", "since"),
    [
        ("1111nnnn", 4),
        ("11n1nnnn", 4),
        ("1111111n", 7),
        ("11111nn1", None),
        ("nnnnnnnn", 0),
        ("11111111", None),
        ("1111????", None),
        ("1?1?n?n?", 4),
        ("11n?1???", None),
        ("????????", None),
        ("???????n", 7),
    ],
)
def test_losses_that_are_not_finite_until_the_end_give_a_warning(losses: str, since: int | None) -> None:
    steps = [step(number, 0.1) for number in range(len(losses))]
    known = [
        structs.replace(one, loss=1.0 if loss == "1" else None, not_finite=loss == "n")
        for one, loss in zip(steps, losses, strict=True)
    ]
    found = [warning for warning in summary_of(repeat_of(known)).warnings if "not finite" in warning]
    assert [f"from step {since} on" in warning for warning in found] == ([] if since is None else [True])


def test_the_losses_of_skipped_steps_at_the_end_give_no_warning() -> None:
    known = [
        msgspec.structs.replace(step(i, 0.1, skipped=i > 8), loss=None if i > 8 else 1.0, not_finite=i > 8)
        for i in range(12)
    ]
    assert not [warning for warning in summary_of(repeat_of(known)).warnings if "not finite" in warning]


def test_the_work_of_a_repeat_is_that_of_the_rank_that_did_least() -> None:
    repeats = [repeat_of([step(i, 0.1, rank=rank) for rank in range(2) for i in range(8)]) for _ in range(2)]
    for rank, done in repeats[1].done.items():
        counted = WorkCounted(backward_passes=8 + rank, updated_first=10, updated_least=10 - rank)
        repeats[1].done[rank] = structs.replace(done, work=counted)
    assert summary_of(*repeats).work == [None, WorkCounted(8, 10, 9)]


def test_the_interval_is_over_repeats() -> None:
    repeats = [repeat_of([step(i, total, repeat=n) for i in range(20)], n) for n, total in enumerate((0.1, 0.11, 0.12))]
    metric = summary_of(*repeats)["step_time"]
    assert metric.repeats == pytest.approx([0.1, 0.11, 0.12])
    assert metric.n == 3 * 18
    assert metric.interval is not None
    low, high = metric.interval
    assert (low * high) ** 0.5 == pytest.approx(metric.estimate) == pytest.approx(0.11)
    spread = stdev(math.log(total) for total in (0.1, 0.11, 0.12))
    assert math.log(high / low) == pytest.approx(2 * 4.302652729911275 * spread / 3**0.5)  # 2 degrees of freedom


def test_the_step_of_the_run_is_its_slowest_ranks() -> None:
    steps = [step(i, total, rank=rank) for i in range(10) for rank, total in ((0, 0.1), (1, 0.12))]
    found = summary_of(repeat_of(steps))
    assert found["step_time"].estimate == pytest.approx(0.12)
    assert found["throughput"].estimate == pytest.approx(8 / 0.12)
    assert found["phase_forward"].estimate == pytest.approx(0.119)


def test_the_straggler_is_the_one_that_the_others_wait_for() -> None:
    steps = [step(i, 0.1, rank=rank, exposed=exposed) for i in range(10) for rank, exposed in ((0, 0.04), (1, 0.01))]
    found = summary_of(repeat_of(steps))
    assert [rank.slowest for rank in found.ranks] == [0.0, 1.0]
    assert found["straggler_skew"].estimate == pytest.approx((0.09 - 0.06) / 0.1)


def test_a_skipped_step_is_time_and_no_work() -> None:
    found = summary_of(repeat_of([step(i, 0.1, skipped=i == 5) for i in range(12)]))
    assert found["throughput"].estimate == pytest.approx(9 * 4 / 1.0)
    assert found["skipped_steps"].estimate == 1
    assert any("skipped" in warning for warning in found.warnings)


@pytest.mark.parametrize(("every", "warned"), [(20, True), (4, False), (100, False)])
def test_an_evaluation_in_a_few_steps_is_said_to_be_rough(every: int, warned: bool) -> None:
    steps = [step(i, 0.1) for i in range(WARMUP + 40)]
    for number in range(WARMUP + every, len(steps), every):
        steps[number] = msgspec.structs.replace(steps[number], phases=steps[number].phases | {"evaluation": 0.05})
    assert any("evaluation is in 1 of 40" in said for said in summary_of(repeat_of(steps)).warnings) == warned


def test_a_slow_start_beyond_the_warmup_moves_the_window() -> None:
    totals = [1.0] * 8 + [0.1 + 1e-4 * (i % 3) for i in range(60)]
    found = summary_of(repeat_of([step(i, total) for i, total in enumerate(totals)]))
    assert found.steady[0].first == 8
    assert found["step_time"].estimate == pytest.approx(0.1001, rel=1e-3)


def test_a_repeat_that_never_left_its_warmup_does_not_count() -> None:
    assert measure([repeat_of([step(0, 0.1), step(1, 0.1)])]) == []
    assert measure([Repeat(0)]) == measure([]) == []
    found = summary_of(repeat_of([step(0, 0.1), step(1, 0.1)]))
    assert found.metrics == []


def test_steps_that_do_not_fill_the_wall_are_told() -> None:
    steps = [step(i, 0.1) for i in range(10)]
    assert summary_of(repeat_of(steps))["closure_error"].estimate < 1e-9
    found = summary_of(repeat_of(steps, wall=1.02))
    assert found["closure_error"].estimate == pytest.approx(0.02 / 1.02)
    assert any("wall time" in warning for warning in found.warnings)


def test_mfu_needs_a_known_device_and_says_so() -> None:
    flops = FlopsCounted(rank=0, model_flops_per_sample=1e12, hardware_flops_per_sample=1.5e12, method="")
    repeat = repeat_of([step(i, 0.1) for i in range(10)])
    known = summary_of(repeat, device="NVIDIA H200", flops=flops)
    assert known.peak is not None
    assert known["mfu"].estimate == pytest.approx(40 * 1e12 / known.peak.flops_per_s)
    assert known["hfu"].estimate == pytest.approx(1.5 * known["mfu"].estimate)
    unknown = summary_of(repeat, device="NVIDIA H900", flops=flops)
    assert unknown.get("mfu") is None
    assert any("'NVIDIA H900'" in warning for warning in unknown.warnings)


def test_the_measured_peak_is_a_second_denominator() -> None:
    flops = FlopsCounted(rank=0, model_flops_per_sample=1e9, hardware_flops_per_sample=1e9, method="")
    peak = PeakMeasured(rank=0, flops_per_s=1e11, dtype="float32", size=1024)
    found = summary_of(repeat_of([step(i, 0.1) for i in range(10)]), flops=flops, measured_peak=peak)
    assert found["mfu_of_measured_peak"].estimate == pytest.approx(0.4)
    assert found.get("hfu") is None


def test_energy_is_counted_over_exactly_the_steady_window() -> None:
    telemetry = [
        TelemetrySample(time=t / 10, cost=0.0, gpus=[GpuSample(index=0, energy_j=300.0 * t / 10)])
        for t in range(-5, 50)
    ]
    found = summary_of(repeat_of([step(i, 0.1) for i in range(12)]), telemetry=telemetry, gpus=[0])
    assert found["energy_per_sample"].estimate == pytest.approx(300.0 * 0.1 / 4)


def test_throttling_in_the_window_is_a_warning() -> None:
    slowed = GpuSample(index=0, throttle_reasons=["SwPowerCap"])
    telemetry = [TelemetrySample(time=t / 10, cost=0.0, gpus=[slowed]) for t in range(20)]
    found = summary_of(repeat_of([step(i, 0.1) for i in range(12)]), telemetry=telemetry, gpus=[0])
    assert found.throttled == {"SwPowerCap": 1.0}
    assert any("SwPowerCap" in warning for warning in found.warnings)


def test_the_samples_of_a_step_over_its_time_are_the_throughput() -> None:
    uneven = StepSamples(mean=53.3, usual=64)
    assert not uneven.even
    assert StepSamples(mean=63.8, usual=64).even
    throughput, step_time = (
        metric_of(name, values, 10, None, None)
        for name, values in (("throughput", [106.6, 106.6]), ("step_time", [0.5, 0.5]))
    )
    assert warnings.contradictory(throughput, step_time, uneven) is None
    said = warnings.contradictory(throughput, step_time, StepSamples(mean=64, usual=64))
    assert said
    assert said.startswith("64 samples in a mean step of 500 ms are not the throughput")


def test_uneven_batches_are_said_in_every_headline() -> None:
    settings, workload = {"program.command": "python t.py"}, {"samples_per_step": 32}

    def headline(samples: StepSamples) -> str:
        return headlines.program(settings, workload, 2, samples)

    assert headline(StepSamples(mean=64, usual=64)) == "python t.py, 32 samples a step x 2 ranks"
    assert headline(StepSamples(mean=50.5, usual=64)) == "python t.py, 25.25 samples a step on average x 2 ranks"
    assert headline(StepSamples(mean=64, usual=64)) == headlines.program(settings, workload, 2)
    said = what_samples_are(StepSamples(mean=50.5, usual=64, counted_from="indices drawn by the DataLoader"))
    assert said == (
        "samples are indices drawn by the DataLoader; batches are uneven: 64 samples in most steps, 50.5 on average"
    )


def test_the_samples_of_a_summary_are_those_of_all_ranks_in_its_steady_steps() -> None:
    steps = [step(number, 0.1, rank, skipped=number == 5) for rank in (0, 1) for number in range(12)]
    found = summarise([repeat_of(steps)], None, "").samples
    assert found
    assert found.usual == 8
    assert 7 < found.mean < 8
