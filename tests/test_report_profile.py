"""What the terminal, --json and TensorBoard show of a profile."""

import io
import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import profiles_made as made
import pytest
from rich.cells import cell_len
from rich.console import Console

from gpubench.compare.explanation import finding_changes
from gpubench.compare.result import Causes
from gpubench.errors import Interrupted
from gpubench.findings import Cost, Findings, Saving, Trial, Unanswered
from gpubench.host.schedule import Outcome
from gpubench.report import comparison, finding_phrases, profiled
from gpubench.report.profile import Against, differences, operator_row, show, show_against, to_document
from gpubench.runs import directory
from gpubench.runs.summary import Summary
from gpubench.settings.schema import ProfileSettings
from gpubench.trace.profile import Breakdown, Launches, Profile, Rank, shares

HOSTILE = "[bold]<script>\x1b[2J\nline[/bold]"


def rendered(
    profile: Profile,
    findings: Findings | None = None,
    width: int = 120,
    trace: str | None = None,
    *,
    unfolded: bool = False,
) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    show(profile, findings or made.findings(), console, trace, unfolded=unfolded)
    return said_by(console)


def said_by(console: Console) -> str:
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def compared(before: Profile, after: Profile, findings_after: Findings, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    show_against(before, after, made.changes(), made.findings(), findings_after, console)
    return said_by(console)


def row(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.startswith(name))


def test_the_first_line_is_the_headline() -> None:
    assert rendered(made.profile()).splitlines()[0] == made.findings().headline


def test_what_was_recorded_and_what_its_times_are_worth_is_said_before_any_figure() -> None:
    text = rendered(made.profile(), made.findings(overhead=0.12), width=200)
    _, about, caveat, *_ = text.splitlines()
    assert about == "x.pt.trace.json.gz: 6 steps of 177 ms on Tesla V100-DGXS-32GB"
    assert caveat == (
        "times are of the profiled run, mean over its 6 steps; the profiled step took 12.0 % longer than a clean one: "
        "its times tell shares, not speed"
    )


@pytest.mark.parametrize(
    ("overhead", "said"),
    [
        (None, ": they tell shares, not speed"),
        (-0.01, "; it took no longer than a clean one"),
        (0.34, "took 34.0 % longer than a clean one: shares below are distorted"),
        (4.5, "took 5.5 x as long as a clean one: shares below are distorted"),
    ],
)
def test_the_overhead_is_told_as_far_as_it_is_known(overhead: float | None, said: str) -> None:
    assert said in finding_phrases.caveat(made.device_rank(), overhead)


def test_an_overhead_that_distorts_the_shares_is_no_small_print() -> None:
    styled = {}
    for overhead in (0.1, 4.5):
        console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system="standard", no_color=False)
        show(made.profile(), made.findings(overhead=overhead), console)
        styled[overhead] = said_by(console).splitlines()[2]
    assert styled[0.1].startswith("\x1b[2mtimes are of")
    assert styled[4.5].startswith("\x1b[1;33mtimes are of")


@pytest.mark.parametrize("unit", ["epoch", "evaluation"])
def test_what_is_no_step_of_the_program_is_not_called_one(unit: str) -> None:
    console = Console(file=io.StringIO(), width=200)
    show(made.profile(2), made.findings(overhead=0.1), console, unit=unit)
    text = said_by(console)
    for said in (
        f"6 {unit}s of 177 ms on",
        f"mean over its 6 {unit}s; the profiled {unit} took",
        f"launches of an {unit}: ",
        f"saves up to 33.3 % of the {unit}",
    ):
        assert said in text
    assert row(text, f"of an {unit}")
    assert row(text, "rank ")[1] == unit


def test_a_run_says_itself_what_its_profiler_counts() -> None:
    assert finding_phrases.unit_of("profile", {"profiling.unit": "epoch"}) == "epoch"
    assert finding_phrases.unit_of("train-bench", {}) == "step"
    assert finding_phrases.unit_of("pipe-infer", {"profiling.unit": "step"}) == "evaluation"


def test_the_parts_of_a_step_come_to_the_whole_of_it() -> None:
    for rank in (made.device_rank(), made.host_rank()):
        assert sum(part.time for part in finding_phrases.time_parts(rank)) == rank.wall


def test_a_part_of_the_idle_time_is_called_by_its_cause() -> None:
    assert row(rendered(made.profile()), "idle, data loader")[-4:] == ["33.3", "%", "59.0", "ms"]


def test_a_cause_that_took_no_time_is_not_listed() -> None:
    assert "idle, allocator" not in rendered(made.profile())


def test_a_host_only_trace_is_told_by_what_its_main_thread_did() -> None:
    text = rendered(Profile([made.host_rank()], []))
    assert "4 steps of 50 ms on the host alone" in text
    assert row(text, "operators")[-4:] == ["45.0", "%", "22.5", "ms"]
    assert "device" not in row(text, "phase")


def test_times_are_of_one_step_where_there_are_steps_and_of_the_trace_where_there_are_none() -> None:
    assert row(rendered(made.profile()), "forward")[1:3] == ["30", "ms"]
    unmarked = Profile([made.device_rank(steps=[], step_numbers=[])], [])
    text = rendered(unmarked)
    assert row(text, "forward")[1:3] == ["180", "ms"]
    assert "x.pt.trace.json.gz: 1.06 s on Tesla V100-DGXS-32GB, no steps marked" in text
    assert "of the trace" in text
    assert "saves up to 33.3 % of the trace" in text


def test_several_ranks_stand_side_by_side_with_the_one_that_the_others_wait_for() -> None:
    text = rendered(made.profile(4))
    assert "4 ranks, of which rank 0 is shown below: 6 steps of 177 ms" in text
    assert row(text, "rank 3")[-4:] == ["data", "loader", "76.6", "%"]
    assert "rank 3 reached 58 of 60 collectives last, and was 1.40 ms behind the first on average" in text


def test_a_note_that_all_ranks_share_is_said_once() -> None:
    profile = made.profile(3)
    assert finding_phrases.doubts(profile) == ["3 kernels were launched before the trace began"]
    odd = msgspec.structs.replace(profile.ranks[1], notes=["12 events were dropped"])
    mixed = Profile([profile.ranks[0], odd, profile.ranks[2]], [])
    assert finding_phrases.doubts(mixed) == [
        "rank 0, rank 2: 3 kernels were launched before the trace began",
        "rank 1: 12 events were dropped",
    ]


def test_modules_come_by_their_own_time_and_the_rest_is_counted() -> None:
    lines = rendered(made.profile()).splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("module"))
    assert lines[start + 1].startswith("layer1.*.conv2 (6)")
    unfolded = rendered(made.profile(), unfolded=True).splitlines()
    assert unfolded[start + 1].startswith("layer1.0.conv2")
    assert unfolded[start + 16] == "and 4 others, 29.5 ms in all"


def test_a_number_in_brackets_is_explained_where_there_is_one() -> None:
    explained = "A number in brackets counts equal layers"
    assert explained in rendered(made.profile())
    assert explained not in rendered(made.profile(), unfolded=True)
    assert explained not in rendered(made.profile(modules=made.device_rank().modules[:2]))


@pytest.mark.parametrize("table", ["module", "operator", "kernel"])
def test_the_longest_row_has_the_longest_bar_and_others_their_part_of_it(table: str) -> None:
    lines = rendered(made.profile(), width=120).splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith(table))
    bars = [line.count("\u2588") for line in lines[start + 1 : start + 5]]
    assert bars[0] == 12
    assert bars == sorted(bars, reverse=True)


def test_a_narrow_terminal_has_names_and_figures_and_no_bars() -> None:
    lines = rendered(made.profile(), width=79).splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("kernel"))
    assert "\u2588" not in lines[start + 1]


def test_the_model_itself_has_a_name_among_its_modules() -> None:
    own = msgspec.structs.replace(made.device_rank().modules[0], own=10**9)
    assert "(the whole model)" in rendered(made.profile(modules=[own]))


def test_the_hosts_time_gives_no_rates_where_the_work_ran_on_a_device_that_is_not_seen() -> None:
    seen = made.host_rank()
    operator = next(one for one in seen.operators if one.flops)
    assert operator_row(seen, operator)["FLOP/s"]
    for unseen in ({"work_missing": True}, {"unread": ["mtia"]}):
        row_of = operator_row(msgspec.structs.replace(seen, **unseen), operator)
        assert (row_of["FLOP/s"], row_of["bytes/s"]) == ("", "")


def test_an_operator_is_told_with_its_rates_and_its_bound_where_there_is_room() -> None:
    text = rendered(made.profile(), width=200)
    head = row(text, "operator")
    convolution = next(line.split() for line in text.splitlines() if line.startswith("aten::") and " 9.83 ms " in line)
    assert head[-7:] == ["bound", "of", "ceiling", "FLOP/s", "bytes/s", "of", "type"]
    assert convolution[-8:] == ["compute", "62.0", "%", "7.12", "T", "15.4", "G", "float"]


@pytest.mark.parametrize(
    ("signature", "name"),
    [
        ("void at::native::(anonymous namespace)::fill<(int)4>(int, void (*)(char))",
         "at::native::(anonymous namespace)::fill<(int)4>"),
        ("volta_sgemm_64x64_nt", "volta_sgemm_64x64_nt"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
        ("())", "())"),
        ("(int)", "(int)"),
    ],
)  # fmt: skip
def test_a_kernel_is_called_by_its_name_without_its_parameters(signature: str, name: str) -> None:
    assert finding_phrases.kernel_name(signature) == name


def test_a_wait_is_told_with_its_line() -> None:
    assert "train.py:57" in row(rendered(made.profile()), "aten::item")


def test_launches_and_the_critical_path_take_a_sentence_each() -> None:
    lines = rendered(made.profile(), width=300).splitlines()
    (said,) = [line for line in lines if line.startswith("launches of a step")]
    for part in (
        "1200 in 9 ms of the host",
        "12 us after its call",
        "p95 340 us",
        "31.9 % were late",
        "shorter than 10.0 us",
    ):
        assert part in said
    assert "critical path: compute 50.8 %, data loader 33.9 %, python 15.3 %" in lines


def test_launches_of_which_none_is_in_the_trace_are_no_division_by_zero() -> None:
    nothing = Launches(0, 0, 0, 0, 0, 0.0, 0, 0, 0, 12, 90_000)
    said = finding_phrases.launches(made.device_rank(), nothing)
    assert said.startswith("launches of a step: 0 in 0 s")
    assert said.endswith("12 pieces of work without a launch in the trace")


def test_a_compiled_trace_is_told_with_its_breaks_and_recompiles() -> None:
    said = "compiled: 3 regions, 2 graph breaks, 1 compilation in the window: 2 s"
    assert said in rendered(Profile([made.host_rank()], []))


def test_a_finding_is_told_from_evidence_to_what_its_fix_was_measured_to_save() -> None:
    lines = [line.rstrip() for line in rendered(made.profile()).splitlines()]
    start = lines.index("1. The GPU waits for the data loader  high")
    labels = [line[:12].strip() for line in lines[start + 1 : start + 8]]
    assert labels == ["evidence", "", "cause", "fix", "set", "expected", "measured"]
    assert lines[start + 5].endswith("--data.workers=4")
    assert lines[start + 6].endswith("saves up to 33.3 % of the step")
    assert lines[start + 7].endswith("confirmed, -20.6 % [-21.4, -19.8] of the step's time")


@pytest.mark.parametrize(
    ("trial", "said"),
    [
        (Trial("no effect", Saving(0.002, -0.008, 0.011), None, None), "no effect, -0.2 % [-1.1, +0.8] of the step"),
        (Trial("worse", Saving(-0.2, -0.25, -0.15), None, None), "worse, +20.0 % [+15.0, +25.0] of the step's time"),
        (Trial("failed", None, None, None, "out of memory"), "failed: out of memory"),
        (Trial("confirmed", Saving(0.1), None, None), "confirmed, -10 % of the step's time"),
        (Trial("inconclusive", Saving(-0.83, -35295.0, 1.0), None, None),
         "inconclusive: these repeats cannot tell; raise --repeats"),
        (Trial("inconclusive", Saving(0.02, -0.1, 0.14), None, None), "inconclusive, -2 % [-14, +10] of the step's"),
        (Trial("worse", Saving(-5.0, -8.0, -2.0), None, None), "worse, +500 % [+200, +800] of the step's time"),
    ],
)  # fmt: skip
def test_a_saving_is_said_as_the_change_of_the_steps_time(trial: Trial, said: str) -> None:
    assert finding_phrases.measured(trial).startswith(said)


@pytest.mark.parametrize(
    ("cost", "said"),
    [
        (Cost("slower", -0.2, (-0.214, -0.186)), "throughput -20.0 % [-21.4, -18.6]"),
        (Cost("faster", 0.1), "throughput +10 %"),
        (Cost("equivalent", 0.001, (-0.002, 0.004)), "throughput unchanged"),
        (Cost("inconclusive", -0.01, (-0.1, 0.08)), "throughput: no difference established"),
        (None, ""),
    ],
)
def test_what_memory_is_saved_is_said_with_what_it_costs(cost: Cost | None, said: str) -> None:
    trial = Trial("confirmed", Saving(0.25), None, None, cost=cost)
    assert finding_phrases.measured(trial, "peak") == f"confirmed, -25 % of the peak: {said}".removesuffix(": ")


def test_the_combination_and_the_settings_to_keep_are_ready_to_be_pasted() -> None:
    lines = rendered(made.profile(), width=60).splitlines()
    assert "keep: --data.workers=4 --training.optimizer_impl=fused" in lines
    together = "together, --data.workers=4 --training.optimizer_impl=fused: confirmed, -24.1 %"
    assert together in unwrapped(" ".join(lines))


def test_that_verification_was_interrupted_is_said() -> None:
    said = "verification was interrupted: what was not tried by then is only expected"
    assert said in rendered(made.profile(), made.findings(interrupted=True))
    assert said not in rendered(made.profile())


def test_settings_are_written_as_the_command_line_takes_them() -> None:
    fix = {"a.b": True, "c": None, "d.e": [1, 2], "f": "two words"}
    assert finding_phrases.options(fix) == "--a.b=true --c=null '--d.e=[1, 2]' '--f=two words'"


def test_rules_that_lack_the_same_input_are_listed_once_with_what_brings_it() -> None:
    text = unwrapped(rendered(made.profile()))
    asked = "torch.profiler.profile(record_shapes=True)"
    assert f"not judged, data missing (input shapes ({asked})): fp32 matmul, tensor core shapes" in text


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ("with_stack", "torch.profiler.profile(with_stack=True)"),
        ("profiling.with_stack", "--profiling.with_stack=true"),
        ("profiling.all_ranks", "--profiling.all_ranks=true"),
        ("profiling.active", "--profiling.active"),
        ("a trace of every rank", "a trace of every rank"),
    ],
)
def test_what_a_rule_needs_is_said_as_one_gives_it(needs: str, said: str) -> None:
    unanswered = [Unanswered("synchronisation", "file and line", needs)]
    assert finding_phrases.unanswered(made.findings(unanswered=unanswered)) == [
        (f"file and line ({said})", "synchronisation")
    ]


def test_what_is_not_in_the_trace_is_told_with_what_it_would_have_told_and_how_to_get_it() -> None:
    profile = made.profile(missing={"stacks": "with_stack", "steps": "schedule"})
    assert finding_phrases.missing(profile) == [
        "no stacks in the trace, so no file and line of waits and copies: record with "
        "torch.profiler.profile(with_stack=True)",
        "no steps in the trace, so no time of a single step: record with "
        "torch.profiler.profile(schedule=...) and step()",
    ]
    assert finding_phrases.missing(profile, own=True)[0].endswith("record with --profiling.with_stack=true")


def test_that_nothing_was_found_is_said() -> None:
    nothing = Findings("GPU busy 98 %", [], [])
    assert "no finding: no rule found anything above its threshold" in rendered(made.profile(), nothing)


def test_the_last_line_says_where_the_trace_can_be_seen() -> None:
    trace = "results/profiler_traces/x.pt.trace.json.gz"
    text = rendered(made.profile(), trace=trace)
    assert text.splitlines()[-1] == f"open {trace} at https://ui.perfetto.dev"


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_nothing_is_wider_than_the_terminal_but_what_is_to_be_copied_out_of_it(width: int) -> None:
    against = compared(made.profile(2), made.profile(2), made.findings(), width)
    host = rendered(Profile([made.host_rank()], []), width=width)
    for text in (rendered(made.profile(4), width=width), host, against):
        lines = [line.rstrip() for line in text.splitlines() if not line.startswith(("keep: ", "open "))]
        assert len(lines) > 50
        assert max(map(cell_len, lines)) <= width


def test_a_narrow_table_of_operators_keeps_the_shapes_that_tell_them_apart() -> None:
    for rank in (made.device_rank(), made.host_rank()):
        lines = rendered(Profile([rank], []), width=60).splitlines()
        operators = [line for line in lines if line.startswith("aten::cudnn_convolution  ")]
        assert len(operators) == len({line.split("  ", 2)[2] for line in operators}) == 15
        assert all("[64, " in line for line in operators)


def test_names_from_a_trace_are_shown_and_not_obeyed() -> None:
    rank = made.device_rank(
        label=HOSTILE,
        device_name=HOSTILE,
        notes=[HOSTILE],
        modules=[msgspec.structs.replace(made.device_rank().modules[1], path=HOSTILE, own=10**12)],
        kernels=[msgspec.structs.replace(made.device_rank().kernels[0], name=HOSTILE)],
    )
    finding = msgspec.structs.replace(made.findings().findings[0], title=HOSTILE, evidence=[HOSTILE], cause=HOSTILE)
    text = rendered(Profile([rank], []), made.findings(headline=HOSTILE, findings=[finding]), width=200)
    assert "\x1b" not in text
    assert text.count(r"[bold]<script>\x1b[2J\nline[/bold]") >= 8


def test_a_name_in_wide_letters_does_not_push_a_table_over_the_edge() -> None:
    module = msgspec.structs.replace(made.device_rank().modules[1], path="層" * 80, own=10**12)
    text = rendered(made.profile(modules=[module]), width=80)
    assert all(cell_len(line.rstrip()) <= 80 for line in text.splitlines() if "層" in line)


def test_an_empty_profile_is_still_a_report() -> None:
    nothing = made.device_rank(
        wall=0, device=Breakdown(0, 0, 0, 0, 0, 0, 0, 0), idle={}, steps=[], step_numbers=[], phases=[], modules=[],
        operators=[], kernels=[], launches=None, copies=[], synchronisations=[], collectives=[], critical_path={},
        timeline=None,
    )  # fmt: skip
    assert "no steps marked" in rendered(Profile([nothing], []), Findings("nothing to see", [], []))
    assert shares(Profile([nothing], [])) == {}


def test_two_traces_are_set_side_by_side_by_part_finding_and_kernel() -> None:
    after = made.profile(wall=141 * 6 * made.MS, idle={"data_loader": 6 * made.MS})
    left = made.findings(findings=made.findings().findings[1:])
    text = compared(made.profile(), after, left)
    assert text.splitlines()[0] == "a profiled step took 177 ms before and 141 ms after: -20.3 %"
    assert row(text, "idle, data loader")[3:] == ["59.0", "ms", "1", "ms", "-58", "ms", "-98.3", "%"]
    assert row(text, "vectorized_elementwise_kernel")[1:7] == ["4", "ms", "0", "s", "-4", "ms"]
    assert "gone: The GPU waits for the data loader (high)" in text
    assert "still there: The optimizer updates one tensor at a time (medium)" in text
    assert "and 4 others" in text


def test_a_finding_that_was_not_there_before_is_new() -> None:
    console = Console(file=io.StringIO(), width=120)
    show_against(made.profile(), made.profile(), [], Findings("fine", [], []), made.findings(), console)
    assert "new: The GPU waits for the data loader (high)" in said_by(console)


def other_program() -> Rank:
    known = made.device_rank()
    return made.device_rank(
        kernels=[msgspec.structs.replace(one, name=f"other_{one.name}") for one in known.kernels],
        operators=[msgspec.structs.replace(one, name="other::op") for one in known.operators],
    )


UNLIKE = {
    "the devices differ: Tesla V100-DGXS-32GB before, NVIDIA L4 after": [made.device_rank(device_name="NVIDIA L4")],
    "the devices differ: Tesla V100-DGXS-32GB before, the host alone after": [made.host_rank()],
    "the numbers of ranks differ: 1 before, 2 after": made.profile(2).ranks,
    "the numbers of ranks differ: 1 before, 8 after": [made.device_rank(world_size=8)],
    "only 0 % of the time is in kernels or operators that both have": [other_program()],
}


@pytest.mark.parametrize(("reason", "ranks"), UNLIKE.items())
def test_what_is_not_the_same_work_is_said_and_not_set_against_each_other(reason: str, ranks: list[Rank]) -> None:
    text = compared(made.profile(), Profile(ranks, []), made.findings(findings=made.findings().findings[1:]), 200)
    assert f"not compared: {reason}" in text
    assert "only before: The GPU waits for the data loader (high)" in text
    assert "in both: The optimizer updates one tensor at a time (medium)" in text
    for withheld in ("gone: ", "still there: ", "changed most", "of before", ": +0 %"):
        assert withheld not in text


def test_a_program_that_picks_other_kernels_for_the_same_operators_is_the_same() -> None:
    kernels = other_program().kernels
    assert differences(made.profile(), made.profile(kernels=kernels)) == []


def test_a_program_that_no_longer_does_most_of_what_it_did_is_the_same() -> None:
    large, small = made.device_rank().kernels[:2]
    before = made.profile(operators=[], kernels=[large, small])
    assert differences(before, made.profile(operators=[], kernels=[small])) == []


def test_what_is_not_known_is_no_difference() -> None:
    unknown = made.profile(device_name=None, kernels=[], operators=[])
    assert differences(made.profile(), unknown) == differences(unknown, made.profile()) == []


def test_traces_without_steps_are_not_called_faster_or_slower() -> None:
    unmarked = Profile([made.device_rank(steps=[], step_numbers=[])], [])
    first = compared(unmarked, made.profile(), made.findings()).splitlines()[0]
    assert first.startswith("the windows are 1.06 s and 177 ms")
    assert "%" not in first


def test_of_runs_that_did_other_work_no_finding_is_called_gone() -> None:
    left = made.findings(findings=made.findings().findings[1:])
    found = finding_changes(made.findings(), left)
    causes = Causes(None, None, found, None, [], 0, None)
    assert [outcome for outcome, _ in comparison.finding_changes(causes)] == ["gone", "still there", "still there"]
    other = msgspec.structs.replace(causes, obstacle="the sides did not do the same work")
    assert [outcome for outcome, _ in comparison.finding_changes(other)] == ["only before", "in both", "in both"]


@pytest.mark.parametrize(
    ("error", "said"), [(Interrupted("interrupted", "what was measured is kept"), "interrupted"), (None, "completed")]
)
def test_a_run_that_was_not_diagnosed_says_why_there_is_no_profile(error: Interrupted | None, said: str) -> None:
    writer = SimpleNamespace(path="results/profile/a")
    recorder = SimpleNamespace(settings=ProfileSettings(), diagnosis=None, writer=writer, command="profile")
    outcome = Outcome(cast("Any", recorder), "completed", Summary([], [], [], None, None, None, {}, []), error)
    console = Console(file=io.StringIO(), width=120)
    profiled.show([outcome], console)
    assert f"no profile: {said}\n" in said_by(console)


def test_the_document_is_plain_json_with_whole_nanoseconds() -> None:
    against = Against(made.profile(), made.findings(), made.changes())
    document = to_document(made.profile(), made.findings(), against)
    again = json.loads(directory.to_json(document))
    assert msgspec.convert(again["profile"], Profile) == made.profile()
    assert msgspec.convert(again["findings"], Findings) == made.findings()
    assert again["against"]["kernels"][0]["before"] == 30 * made.MS
    assert again["against"]["unlike"] == []


def test_the_scalars_are_fractions_of_the_wall_time() -> None:
    found = shares(made.profile(2))
    assert found["profile/device/compute"] == pytest.approx(92 / 177)
    assert found["profile/idle/data_loader"] == pytest.approx(59 / 177)
    assert found["profile/step_time"] == pytest.approx(0.177)
    host = shares(Profile([made.host_rank()], []))
    assert sum(value for tag, value in host.items() if tag.startswith("profile/host/")) == pytest.approx(1)


def test_idle_time_behind_launched_work_is_named_for_what_it_may_be() -> None:
    first = made.profile().ranks[0]
    assert first.device is not None
    queued = msgspec.structs.replace(first, idle={"queued": first.device.idle})
    names = [part.name for part in finding_phrases.time_parts(queued)]
    assert "idle, queued, or work that was not recorded" in names
