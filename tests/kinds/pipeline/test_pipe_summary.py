from collections.abc import Mapping, Sequence

import msgspec
import pytest
from piped import BEGAN, PAUSE, Line, digest, finished, sequential, verified

from gpubench.events import BaselineMeasured, Divergence
from gpubench.kinds.pipeline.repeats import PipeRepeat
from gpubench.kinds.pipeline.results import ESTIMATES, summarise
from gpubench.metrics import DEFINITIONS
from gpubench.runs.stages import Pipeline
from gpubench.runs.summary import Summary
from gpubench.telemetry import GpuSample, TelemetrySample

LINE = Line((2, 3, 2), micro_batches=4, decode=0.05)


def repeats_of(line: Line, n: int = 2) -> list[PipeRepeat]:
    """With the sequential baseline and a verification that finds nothing."""
    repeats = [line.repeat(number) for number in range(n)]
    for repeat in repeats:
        repeat.baselines.append(sequential(line, repeat.number))
        repeat.verified = verified(line, repeat.number)
    return repeats


def summary_of(
    line: Line, repeats: Sequence[PipeRepeat] | None = None, settings: Mapping[str, object] | None = None
) -> Summary:
    return summarise(repeats_of(line) if repeats is None else repeats, line.samples, settings=settings or {})


def pipeline_of(summary: Summary) -> Pipeline:
    assert summary.pipeline
    return summary.pipeline


def estimate(summary: Summary, name: str) -> float:
    return summary[name].estimate


def test_an_ideal_pipeline_has_the_makespan_of_the_theory() -> None:
    line = Line((2, 3, 2), micro_batches=4)
    found = summary_of(line)
    assert estimate(found, "makespan") == pytest.approx(0.1 * (7 + 3 * 3), rel=1e-5)
    assert estimate(found, "throughput") == pytest.approx(4 / 1.6, rel=1e-5)
    assert estimate(found, "pipeline_efficiency") == pytest.approx(1, rel=1e-5)
    assert estimate(found, "bubble") == pytest.approx(estimate(found, "ideal_bubble"), abs=1e-5)
    assert estimate(found, "evaluation_time") == pytest.approx(0.1)
    assert estimate(found, "remainder_cost") == pytest.approx(3 / (7 / 3) - 1)


def test_the_ideal_is_made_of_all_the_work_there_was_and_never_longer_than_the_makespan() -> None:
    decoded = summary_of(Line((2, 3, 2), micro_batches=4, decode=0.5))
    assert estimate(decoded, "pipeline_efficiency") == pytest.approx(1, rel=1e-5), "decoding is work as well"
    uneven = Line((2, 2, 2), micro_batches=12, jitter=0.5)
    for found in repeats_of(uneven):
        assert estimate(summary_of(uneven, [found]), "pipeline_efficiency") <= 1
    slow_link = summary_of(Line((2, 2), micro_batches=4, transfer=0.1))
    assert estimate(slow_link, "pipeline_efficiency") < 0.95


def test_fill_and_drain_are_in_the_throughput_and_not_in_the_steady_one() -> None:
    found = summary_of(Line((2, 2), micro_batches=5))
    assert estimate(found, "throughput") == pytest.approx(5 / (0.1 * (4 + 4 * 2)), rel=1e-5)
    assert estimate(found, "steady_throughput") == pytest.approx(4 / (0.1 * 4 * 2), rel=1e-5)
    assert pipeline_of(found).steady == pytest.approx((0.4, 1.2), rel=1e-5)


def test_a_single_sample_has_no_steady_throughput() -> None:
    assert summary_of(Line((2, 2), micro_batches=1)).get("steady_throughput") is None


def test_a_micro_batch_is_as_many_samples() -> None:
    line = Line((2, 2), micro_batches=3, micro_batch=4)
    found = summary_of(line)
    assert estimate(found, "throughput") == pytest.approx(12 / (0.1 * (4 + 2 * 2)), rel=1e-5)
    assert estimate(found, "steady_throughput") == pytest.approx(8 / (0.1 * 4), rel=1e-5)
    assert estimate(found, "handover_bytes") == 512 + 4 * (1024 + 2048 + 5056)


def test_latency_is_from_the_first_rank_to_the_last() -> None:
    line = Line((1, 3), micro_batches=3)
    metric = summary_of(line)["sample_latency"]
    assert metric.distribution
    assert metric.distribution.min == pytest.approx(0.4, rel=1e-5)
    assert metric.distribution.max == pytest.approx(0.4 + 2 * 0.2, rel=1e-5)
    assert estimate(summary_of(line), "time_to_first_sample") == pytest.approx(0.4, rel=1e-5)


def test_a_handoff_takes_what_it_takes_without_the_wait_for_its_taker() -> None:
    line = Line((1, 4), micro_batches=6, transfer=0.02, in_flight=1)
    found = summary_of(line)
    assert estimate(found, "handover_time") == pytest.approx(0.02, rel=1e-4)
    times = pipeline_of(found).stages[0].times
    assert times
    assert times.send_wait > 1


def test_the_times_of_every_rank_sum_to_the_makespan() -> None:
    found = summary_of(Line((3, 5, 2), micro_batches=6, jitter=0.2, transfer=0.03, in_flight=1, decode=0.1))
    for stage in pipeline_of(found).stages:
        assert stage.times
        times = stage.times
        assert times.compute + times.recv_wait + times.send_wait + times.idle == pytest.approx(times.makespan)
        assert times.makespan == pytest.approx(estimate(found, "makespan"))


def test_the_baselines_stand_beside_the_pipeline() -> None:
    found = summary_of(LINE)
    each = 7 * 0.1 + 0.05
    assert estimate(found, "sequential_makespan") == pytest.approx(4 * each)
    assert estimate(found, "pipeline_speedup") == pytest.approx(4 * each / estimate(found, "makespan"))
    assert found.get("replicas_makespan") is None
    assert pipeline_of(found).verdict == (
        "replicas, each with the whole model, were not measured: --baseline replicas compares them"
    )


def test_without_a_baseline_nothing_is_compared() -> None:
    found = summary_of(LINE, [LINE.repeat(0), LINE.repeat(1)])
    assert [metric.name for metric in found.metrics if "replicas" in metric.name or "sequential" in metric.name] == []
    assert found.get("pipeline_speedup") is None


def replicas(rank: int, samples: list[int], wall: float) -> BaselineMeasured:
    return BaselineMeasured(rank=rank, repeat=0, kind="replicas", seconds=[], wall=wall, samples=samples)


def test_measured_replicas_take_as_long_as_the_slowest() -> None:
    (repeat,) = repeats_of(LINE, 1)
    repeat.baselines += [replicas(0, [0, 3], 9.0), replicas(1, [1], 5.0)]
    assert summary_of(LINE, [repeat]).get("replicas_makespan") is None  # sample 2 was made by nobody
    repeat.baselines.append(replicas(2, [2], 5.0))
    found = summary_of(LINE, [repeat])
    assert estimate(found, "replicas_makespan") == 9.0
    assert pipeline_of(found).verdict == (
        "3 replicas, each with the whole model, made the same samples in 9 s, and the pipeline took 1.65 s; one repeat "
        "does not tell whether that is a difference: raise --repeats"
    )
    for_precision = summary_of(LINE, [repeat], {"measurement.target_precision": 0.01})
    said = [str(pipeline_of(for_precision).verdict), *for_precision.warnings]
    assert not [text for text in said if "--repeats" in text], "the precision decides their number"
    assert sum("raise measurement.max_repeats" in text for text in said) == 2


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((1.3, 1.31, 1.32), "splitting the steps was worth it here: 3 replicas"),
        ((0.6, 0.61, 0.62), "plain data parallelism is faster: 3 replicas"),
        ((0.6, 1.3, 0.8), "neither is measurably faster: 3 replicas"),  # the mean is 10 % below 1
        ((1.0, 1.02, 0.99), "neither is measurably faster: 3 replicas"),
    ],
)
def test_replicas_are_judged_by_the_noise_that_was_measured(ratios: Sequence[float], verdict: str) -> None:
    repeats = repeats_of(LINE, len(ratios))
    for number, (repeat, ratio) in enumerate(zip(repeats, ratios, strict=True)):
        found = summary_of(LINE, [repeat])
        took = estimate(found, "makespan") * ratio
        repeat.baselines += [
            msgspec.structs.replace(replicas(rank, samples, took), repeat=number)
            for rank, samples in enumerate([[0, 3], [1], [2]])
        ]
    summary = summary_of(LINE, repeats)
    said = pipeline_of(summary).verdict or ""
    assert said.startswith(verdict)
    assert " (95 % interval of the ratio " in said
    assert estimate(summary, "replicas_speedup") == pytest.approx(sum(ratios) / len(ratios), rel=1e-3)


def test_one_rank_alone_has_nothing_to_be_judged_and_nothing_to_hand_off() -> None:
    found = summary_of(Line((5,), micro_batches=3))
    assert pipeline_of(found).verdict is None
    assert pipeline_of(found).handover is None
    assert found.get("handover_bytes") is None
    assert estimate(found, "bubble") == pytest.approx(0, abs=1e-5)


def test_a_sequential_run_of_other_samples_is_no_baseline() -> None:
    repeat = LINE.repeat()
    repeat.baselines.append(msgspec.structs.replace(sequential(LINE), samples=[0, 1]))
    assert summary_of(LINE, [repeat]).get("sequential_makespan") is None


def test_what_a_rank_needs_at_most_is_the_runs() -> None:
    found = summary_of(LINE)
    assert estimate(found, "peak_memory_rss") == 3 * 10**8
    assert found.get("peak_memory_allocated") is None
    assert [stage.peak_memory for stage in pipeline_of(found).stages] == [10**8, 2 * 10**8, 3 * 10**8]
    assert estimate(found, "model_build_time") == pytest.approx(0.7)
    assert estimate(found, "encode_time") == 0.25
    assert estimate(found, "decode_time") == pytest.approx(0.05)


def test_energy_is_of_the_makespan() -> None:
    line = Line((5,), micro_batches=4)
    (repeat,) = repeats_of(line, 1)
    telemetry = [
        TelemetrySample(time=BEGAN - 1 + second / 4, cost=0.0, gpus=[GpuSample(index=3, energy_j=100.0 * second / 4)])
        for second in range(20)
    ]
    found = summarise([repeat], line.samples, telemetry, [3])
    assert estimate(found, "energy_per_sample") == pytest.approx(2.0 * 100 / 4, rel=1e-3)


def test_the_interval_is_over_repeats_and_a_window_is_a_makespan() -> None:
    line = Line((2, 3, 2), micro_batches=4, jitter=0.1)
    found = summary_of(line, repeats_of(line, 3))
    assert found["makespan"].interval
    assert found["makespan"].n == 3 * 4 * 7
    assert [window.repeat for window in found.steady] == [0, 1, 2]
    for number, window in enumerate(found.steady):
        assert window.start == pytest.approx(BEGAN + PAUSE * number)
        assert window.end - window.start == pytest.approx(found["makespan"].repeats[number])
        assert (window.first, window.steps, window.settled) == (0, 28, True)


def test_every_metric_is_defined_and_has_a_repeat_for_every_window() -> None:
    assert set(ESTIMATES) <= set(DEFINITIONS)
    found = summary_of(LINE)
    assert {len(metric.repeats) for metric in found.metrics} == {len(found.steady)}


def test_a_summary_survives_the_trip_through_json() -> None:
    found = summary_of(LINE)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Summary) == found


def test_all_samples_are_verified_by_their_digests() -> None:
    found = summary_of(LINE)
    verification = pipeline_of(found).verification
    assert verification
    assert (verification.samples, verification.identical, verification.divergence) == (4, 4, None)
    assert [one.sha256 for one in pipeline_of(found).samples] == [digest(sample) for sample in range(4)]
    assert all(one.identical and one.reproduced for one in pipeline_of(found).samples)
    assert estimate(found, "verified_samples") == 1
    assert found.warnings == []


def test_a_sample_unlike_its_reference_is_named() -> None:
    repeats = repeats_of(LINE)
    parted = Divergence(2, 0.5, 3, 1, 0.01)
    assert repeats[1].verified
    shas = [digest(sample) for sample in (0, 1, 9, 3)]
    repeats[1].verified = msgspec.structs.replace(repeats[1].verified, sha256=shas, divergence=parted)
    found = summary_of(LINE, repeats)
    verification = pipeline_of(found).verification
    assert verification
    assert (verification.samples, verification.identical, verification.divergence) == (4, 3, parted)
    assert found["verified_samples"].repeats == [1.0, 0.75]
    assert found.warnings == ["repeat 2: sample 2 is not bit-identical to single-process diffusers"]


def test_a_sample_that_comes_out_otherwise_in_a_later_repeat_is_named() -> None:
    repeats = repeats_of(LINE)
    for sample in (1, 3):
        repeats[1].samples[sample] = msgspec.structs.replace(repeats[1].samples[sample], sha256=digest(99))
        repeats[1].verified = None
    found = summary_of(LINE, repeats)
    assert "repeat 2: samples 1, 3 are different from an earlier repeat with the same seed" in found.warnings
    assert [one.reproduced for one in pipeline_of(found).samples] == [True, False, True, False]
    assert found.get("verified_samples") is None  # not of every repeat


def test_counts_that_do_not_pair_up_name_the_edge() -> None:
    repeats = repeats_of(LINE)
    repeats[0].stages[2] = msgspec.structs.replace(repeats[0].stages[2], received=3)
    assert "repeat 1: rank 1 sent 4 hand-offs, and rank 2 received 3" in summary_of(LINE, repeats).warnings


def test_an_uneven_split_is_told_with_the_better_one() -> None:
    found = summary_of(Line((12, 12, 12, 14), micro_batches=2))
    assert found.warnings == [
        "rank 3 works 1.40 s on each micro-batch while others wait: --split 13,13,12,12 comes to 1.30 s if evaluations "
        "take as long as now"
    ]
    assert summary_of(Line((13, 13, 12, 12), micro_batches=2)).warnings == []


def test_one_repeat_is_not_enough_for_an_interval() -> None:
    assert summary_of(LINE, repeats_of(LINE, 1)).warnings == [
        "one repeat only, so the variation between processes is unknown: raise --repeats"
    ]


def test_a_run_that_failed_half_way_still_gives_what_it_has() -> None:
    repeat = LINE.repeat()
    del repeat.stages[1], repeat.stages[2], repeat.samples[2], repeat.samples[3]
    found = summary_of(LINE, [repeat])
    assert (found.metrics, found.steady) == ([], [])
    assert "repeat 1: samples 2, 3 are missing; --resume makes them" in found.warnings
    pipeline = pipeline_of(found)
    assert [one.sample for one in pipeline.samples] == [0, 1]
    assert [stage.times for stage in pipeline.stages] == [None] * 3
    assert pipeline.stages[0].evaluation_time == pytest.approx(0.1)
    assert pipeline.handover
    assert (pipeline.steady, pipeline.verification, pipeline.verdict) == (None, None, None)


def test_a_failed_repeat_leaves_the_numbers_of_the_others_alone() -> None:
    broken = LINE.repeat(2)
    broken.stages.clear()
    found = summary_of(LINE, [*repeats_of(LINE), broken])
    assert len(found.steady) == 2
    assert estimate(found, "makespan") == pytest.approx(estimate(summary_of(LINE), "makespan"))


def test_nothing_said_is_nothing_known() -> None:
    found = summary_of(LINE, [])
    assert (found.metrics, found.pipeline) == ([], None)
    empty = summary_of(LINE, [PipeRepeat(0)])
    assert (empty.metrics, empty.pipeline) == ([], None)
    assert not any("missing" in warning for warning in empty.warnings)


def test_samples_of_a_resumed_run_are_kept_but_were_not_made_now() -> None:
    line = Line((2, 2), micro_batches=2)
    repeat = line.repeat()
    repeat.samples[2] = msgspec.structs.replace(finished(2, BEGAN - 900, BEGAN - 800), resumed=True)
    found = summarise([repeat], 3)
    assert estimate(found, "throughput") == pytest.approx(2 / 0.6, rel=1e-5)
    assert estimate(found, "time_to_first_sample") == pytest.approx(0.4, rel=1e-5)
    assert len(pipeline_of(found).samples) == 3
    assert not any("missing" in warning for warning in found.warnings)


def test_a_single_sample_gains_nothing_from_more_ranks() -> None:
    said = summarise([Line((2, 2), micro_batches=1).repeat()], 1).pipeline
    assert said is not None
    assert str(said.verdict).startswith("splitting the steps gained nothing: a single micro-batch is on one rank")
