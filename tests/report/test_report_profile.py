"""The report of a profile: its sentences, blocks, tables and drawings, and its JSON."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import profiles_made as made
import pytest
from reports import (
    HOSTILE,
    commands,
    everywhere,
    find,
    findings,
    flat,
    harmless,
    lines_of,
    on_terminal,
    paragraphs,
    row,
    rows,
    texts,
    titles,
)
from test_page import record_of, run_of

from gpubench.findings import Cost, Findings, Saving, Trial, Unanswered
from gpubench.registry import RUN_KINDS
from gpubench.report import charts, timelines
from gpubench.report import findings as cards
from gpubench.report import page as pages
from gpubench.report import profile as report
from gpubench.report import run as run_report
from gpubench.report.document import Breakdown, Document, Figure, Heading, Paragraph, Table
from gpubench.report.profile import Against, document, to_document
from gpubench.report.profile_tables import Arrangement, operator_row
from gpubench.runs import directory
from gpubench.runs.reader import Run
from gpubench.runs.stages import PARTS
from gpubench.trace.families import kernel_name
from gpubench.trace.phases import NAMES
from gpubench.trace.profile import (
    CAUSES,
    Box,
    KernelChange,
    Lane,
    Launches,
    Profile,
    StepTimeline,
    shares,
    short_shapes,
)
from gpubench.trace.profile import (
    WallBreakdown as Times,
)

ATTACK = f"{HOSTILE}\ud800\x1b[2J\nline[/bold]"
REPLACE = msgspec.structs.replace
EMPTY = Findings("CPU: 45 % in operators", [], [])
HOST = Profile([made.host_rank()], [])
FASTER = made.profile(wall=141 * 6 * made.MS, idle={"data_loader": 6 * made.MS})
FIXED = made.findings(findings=made.findings().findings[1:])


def of(profile: Profile | None = None, found: Findings | None = None, **options: Any) -> Document:
    return document(profile or made.profile(), found or made.findings(), **options)


def compared(after: Profile, before: Profile | None = None, found: Findings = FIXED) -> Document:
    against = Against(before or made.profile(), made.findings(), made.changes())
    return document(after, found, against=against)


def hostile() -> Document:
    """Every text of a profile and its findings is an attack."""
    known = made.device_rank()
    rank = made.device_rank(
        label=ATTACK, device_name=ATTACK, notes=[ATTACK], missing={ATTACK: ATTACK}, critical_path={ATTACK: made.MS},
        modules=[REPLACE(known.modules[1], path=ATTACK, kind=ATTACK)],
        operators=[REPLACE(known.operators[0], name=ATTACK, shapes=ATTACK, dtype=ATTACK)],
        kernels=[REPLACE(known.kernels[0], name=ATTACK, operator=ATTACK)],
        copies=[REPLACE(known.copies[0], example=ATTACK, where=ATTACK, phase=ATTACK)],
        phases=[REPLACE(known.phases[0], name=ATTACK)],
        timeline=StepTimeline(0, made.MS, [Lane(ATTACK, [Box(0, made.MS, ATTACK, ATTACK)])], 0),
    )  # fmt: skip
    finding = REPLACE(
        made.findings().findings[0], title=ATTACK, evidence=[ATTACK], cause=ATTACK, advice=ATTACK, threshold=ATTACK,
        fix={ATTACK: ATTACK},
    )  # fmt: skip
    found = Findings(ATTACK, [finding], [Unanswered(ATTACK, ATTACK, ATTACK)], keep={ATTACK: ATTACK})
    profile = Profile([rank, rank], [])
    return document(profile, found, against=Against(profile, found, [KernelChange(ATTACK, 1, 2, 1.0, 1.0)]))


REPORTS = {
    "profile-gpu": of(
        made.profile(2), made.findings(interrupted=True), trace="results/profiler_traces/x.pt.trace.json"
    ),
    "profile-cpu": of(HOST, EMPTY),
    "profile-against": compared(FASTER),
}


@pytest.mark.parametrize("name", REPORTS)
def test_the_report_of_a_profile_is_the_golden_one(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"{name}.txt", everywhere(REPORTS[name]))


def test_the_headline_is_that_of_the_findings_without_a_full_stop() -> None:
    assert of(found=made.findings(headline="GPU idle 43 %.")).headline == "GPU idle 43 %"


def test_what_was_recorded_and_what_its_times_are_worth_is_said_first() -> None:
    about, caveat, *_ = paragraphs(of(found=made.findings(overhead=0.12)))
    assert about == "x.pt.trace.json.gz: 6 steps of 177 ms on Tesla V100-DGXS-32GB"
    assert "mean over its 6 steps" in caveat
    assert "1.12 times as long" in caveat


@pytest.mark.parametrize(
    ("overhead", "said", "tone"),
    [
        (None, "proportions, not speed", "quiet"),
        (-0.01, "took no longer", "quiet"),
        (0.1, "1.10 times as long", "quiet"),
        (0.34, "shares below are distorted", "warning"),
        (4.5, "5.5 times as long as one without the profiler: shares below are distorted", "warning"),
    ],
)
def test_the_overhead_is_told_as_far_as_it_is_known_and_one_that_distorts_is_a_warning(
    overhead: float | None, said: str, tone: str
) -> None:
    caveat = paragraphs(of(found=made.findings(overhead=overhead)), tone)[1 if tone == "quiet" else 0]
    assert said in caveat


@pytest.mark.parametrize("unit", ["epoch", "evaluation"])
def test_what_is_no_step_of_the_program_is_not_called_one(unit: str) -> None:
    found = of(made.profile(2), made.findings(overhead=0.1), unit=unit)
    about, caveat, *_ = paragraphs(found)
    assert f"6 {unit}s of 177 ms" in about
    assert f"profiled {unit}" in caveat
    assert f"of the {unit}" in lines_of(findings(found)[0])["expected"]
    assert find(found, Breakdown, "").of == f"part of an {unit}"
    assert find(found, Table, "Ranks").columns[1] == unit
    assert find(found, Figure, f"{unit.capitalize()} 3")
    assert any(line.startswith(f"launches of an {unit}: ") for line in paragraphs(found))


def test_a_run_says_itself_what_its_profiler_counts() -> None:
    assert report.unit_of(RUN_KINDS["profile"], {"profiling.unit": "epoch"}) == "epoch"
    assert report.unit_of(RUN_KINDS["train-bench"], {}) == "step"
    assert report.unit_of(RUN_KINDS["pipe-infer"], {"profiling.unit": "step"}) == "evaluation"


def test_the_parts_of_a_step_come_to_the_whole_of_it() -> None:
    for rank in (made.device_rank(), made.host_rank()):
        assert sum(part.time for part in report.time_parts(rank)) == rank.wall


def test_idle_time_is_called_by_its_cause_and_a_cause_of_no_time_is_not_listed() -> None:
    parts = {part.name: part for part in find(of(), Breakdown, "").parts}
    assert (parts["idle, data wait"].percent, parts["idle, data wait"].size) == ("33.3 %", "59.0 ms")
    assert "idle, allocator" not in parts
    first = made.profile().ranks[0]
    assert first.device is not None
    queued = REPLACE(first, idle={"queued": first.device.idle})
    assert "idle, queued, or work that was not recorded" in [part.name for part in report.time_parts(queued)]


def test_a_host_only_trace_is_told_by_what_its_main_thread_did() -> None:
    found = of(HOST, EMPTY)
    assert "the CPU alone" in paragraphs(found)[0]
    (operators,) = [part for part in find(found, Breakdown, "").parts if part.name == "operators"]
    assert (operators.percent, operators.size) == ("45.0 %", "22.5 ms")
    assert "device" not in find(found, Table, "Phases").columns


def test_times_are_of_one_step_where_there_are_steps_and_of_the_trace_where_there_are_none() -> None:
    assert row(of(), "Phases", "forward")["host"] == "30 ms"
    found = of(made.profile(steps=[], step_numbers=[]))
    assert row(found, "Phases", "forward")["host"] == "180 ms"
    assert paragraphs(found)[0] == "x.pt.trace.json.gz: 1.06 s on Tesla V100-DGXS-32GB, no steps marked"
    assert find(found, Breakdown, "").of == "part of the trace"
    assert "of the trace" in lines_of(findings(found)[0])["expected"]
    whole = find(found, Figure, "The whole trace")
    assert "time since the trace began" in whole.drawing
    assert "412" in find(of(), Figure, "Step 3").note


def test_several_ranks_stand_side_by_side_with_the_one_that_the_others_wait_for() -> None:
    found = of(made.profile(4))
    assert paragraphs(found)[0].startswith("4 ranks, of which rank 0 is shown below: 6 steps of 177 ms")
    assert row(found, "Ranks", "rank 3")["mostly idle for"] == "data wait 76.6 %"
    (straggler,) = [line for line in paragraphs(found) if "collectives last" in line]
    assert straggler.startswith("rank 3 reached 58 of 60")
    assert "1.40 ms" in straggler
    drawing = flat(found)[titles_place(found, "Where the time went")].drawing  # type: ignore[attr-defined]
    assert re.findall(r'class="lane-name"[^>]*>([^<]*)<', drawing) == ["rank 0", "rank 1", "rank 2", "rank 3"]


def titles_place(found: Document, heading: str) -> int:
    """The place of the block below a heading."""
    blocks = flat(found)
    return 1 + next(place for place, one in enumerate(blocks) if isinstance(one, Heading) and one.text == heading)


def test_a_note_that_all_ranks_share_is_said_once() -> None:
    profile = made.profile(3)
    assert report.notes(profile) == ["3 kernels were launched before the trace began"]
    odd = REPLACE(profile.ranks[1], notes=["12 events were dropped"])
    assert report.notes(Profile([profile.ranks[0], odd, profile.ranks[2]], [])) == [
        "rank 0, rank 2: 3 kernels were launched before the trace began",
        "rank 1: 12 events were dropped",
    ]
    assert "note: 3 kernels were launched before the trace began" in paragraphs(of(profile), "warning")


def test_modules_come_by_their_own_time_and_the_rest_is_counted() -> None:
    shown, unfolded = (find(of(arranged=Arrangement(unfolded)), Table, "module") for unfolded in (False, True))
    assert rows(shown)[0]["module"] == "layer1.*.conv2 (6)"
    assert rows(unfolded)[0]["module"] == "layer1.0.conv2"
    assert unfolded.rest == "4 others, 29.5 ms in all"
    assert "brackets" in shown.note
    assert not unfolded.note, "no number in brackets is to be explained"
    assert not find(of(made.profile(modules=made.device_rank().modules[:2])), Table, "module").note
    own = REPLACE(made.device_rank().modules[0], own=10**9)
    assert row(of(made.profile(modules=[own])), "module", "(the whole model)")


@pytest.mark.parametrize("table", ["module", "operator", "kernel"])
def test_the_longest_row_has_the_longest_bar_and_others_their_part_of_it(table: str) -> None:
    bars = list(find(of(), Table, table).bars)
    assert bars[0] == 1
    assert bars == sorted(bars, reverse=True)


def test_the_hosts_time_gives_no_rates_where_the_work_ran_on_a_device_that_is_not_seen() -> None:
    seen = made.host_rank()
    operator = next(one for one in seen.operators if one.flops)
    assert operator_row(seen, operator)["FLOP/s"]
    for unseen in ({"work_missing": True}, {"unread": ["mtia"]}):
        row_of = operator_row(REPLACE(seen, **unseen), operator)
        assert (row_of["FLOP/s"], row_of["bytes/s"]) == ("", "")


def test_an_operator_is_told_with_its_rates_and_its_bound() -> None:
    found = rows(find(of(), Table, "operator"))[1]
    told = ("9.83 ms", "compute", "62.0 %", "7.12 T", "15.4 G", "float")
    assert tuple(found[name] for name in ("device", "bound", "of ceiling", "FLOP/s", "bytes/s", "of type")) == told
    assert "bound" not in find(of(HOST, EMPTY), Table, "operator").columns
    assert any(line.startswith("bound of the operators: insufficient data") for line in paragraphs(of(HOST, EMPTY)))


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
    assert kernel_name(signature) == name


def test_a_wait_is_told_with_its_line() -> None:
    assert row(of(), "wait asked by", "aten::item")["where"] == "train.py:57"


def test_launches_the_critical_path_and_compilation_take_a_sentence_each() -> None:
    (said,) = [line for line in paragraphs(of()) if line.startswith("launches of a step")]
    for part in ("1,200 in 9 ms", "12 us after", "p95 340 us", "31.9 % were late", "shorter than 10.0 us"):
        assert part in said
    assert "critical path: compute 50.8 %, data loader 33.9 %, python 15.3 %" in paragraphs(of())
    (compiled,) = [line for line in paragraphs(of(HOST, EMPTY)) if line.startswith("compiled")]
    for part in ("3 regions", "2 graph breaks", "1 compilation", "2 s"):
        assert part in compiled


def test_launches_of_which_none_is_in_the_trace_are_no_division_by_zero() -> None:
    nothing = Launches(0, 0, 0, 0, 0, 0.0, 0, 0, 0, 12, 90_000)
    said = report.launches(made.device_rank(), nothing)
    assert said.startswith("launches of a step: 0 in 0 s")
    assert "12 pieces of work without a launch" in said


def test_a_finding_is_told_from_evidence_to_what_its_fix_was_measured_to_save() -> None:
    first, *_ = found = findings(of())
    assert [(one.severity, one.threshold.split(" on")[0]) for one in found] == [
        ("high", "from 5 % of the step"), ("medium", "from 3 %"), ("low", "from 1 %"),
    ]  # fmt: skip
    assert len(first.evidence) == 2
    lines = lines_of(first)
    assert list(lines) == ["cause", "fix", "set", "expected", "measured"]
    assert lines["set"] == "--data.workers=4"
    assert "33.3 %" in lines["expected"]
    assert lines["measured"].startswith("confirmed, -20.6 % [-21.4, -19.8]")
    assert [line.style for line in first.lines if line.label == "measured"] == ["better"]


@pytest.mark.parametrize(
    ("trial", "said"),
    [
        (Trial("no effect", Saving(0.002, -0.008, 0.011), None, None), "no effect, -0.2 % [-1.1, +0.8]"),
        (Trial("worse", Saving(-0.2, -0.25, -0.15), None, None), "worse, +20.0 % [+15.0, +25.0]"),
        (Trial("failed", None, None, None, "out of memory"), "failed: out of memory"),
        (Trial("confirmed", Saving(0.1), None, None), "confirmed, -10 %"),
        (Trial("inconclusive", None, None, None, "the repeats differ"), "inconclusive: the repeats differ"),
        (Trial("inconclusive", Saving(0.02, -0.1, 0.14), None, None), "inconclusive, -2 % [-14, +10]"),
        (Trial("worse", Saving(-5.0, -8.0, -2.0), None, None), "worse, +500 % [+200, +800]"),
    ],
)
def test_a_saving_is_said_as_the_change_of_the_steps_time(trial: Trial, said: str) -> None:
    assert cards.measured(trial).startswith(said)


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
    assert cards.measured(trial, "peak") == f"confirmed, -25 % of the peak: {said}".removesuffix(": ")


def test_the_combination_and_the_settings_to_keep_are_ready_to_be_pasted() -> None:
    both = "--data.workers=4 --training.optimizer_impl=fused"
    found = commands(of())
    assert found["keep"] == both
    assert any(line.startswith(f"together, {both}: ") for line in paragraphs(of()))
    assert f"keep: {both}" in on_terminal(of(), 40).splitlines()
    assert commands(of(found=made.findings(keep={"training.weight": -3})))["keep"] == "--training.weight=-3"


def test_that_verification_was_interrupted_is_said() -> None:
    said = [line for line in paragraphs(of(found=made.findings(interrupted=True)), "warning") if "interrupted" in line]
    assert len(said) == 1
    assert not [text for text in texts(of()) if "interrupted" in text]


def test_settings_are_written_as_the_command_line_takes_them() -> None:
    fix = {"a.b": True, "c": None, "d.e": [1, 2], "f": "two words"}
    assert cards.options(fix) == "--a.b=true --c=null '--d.e=[1, 2]' '--f=two words'"


def test_rules_that_lack_the_same_input_are_listed_once_with_what_brings_it() -> None:
    (said,) = [line for line in paragraphs(of(), "quiet") if line.startswith("not judged")]
    asked = "torch.profiler.profile(record_shapes=True)"
    assert f"input shapes: fp32 matmul, tensor core shapes; needs {asked}" in said


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
    assert cards.unanswered(made.findings(unanswered=unanswered)) == [
        f"not judged without file and line: synchronisation; needs {said}"
    ]


def test_what_is_not_in_the_trace_is_told_with_how_to_get_it() -> None:
    profile = made.profile(missing={"stacks": "with_stack", "steps": "schedule"})
    stacks, steps = paragraphs(of(profile), "missing")
    assert (stacks.startswith("no stacks"), stacks.endswith("torch.profiler.profile(with_stack=True)")) == (True, True)
    assert (steps.startswith("no steps"), "torch.profiler.profile(schedule=...)" in steps) == (True, True)
    assert paragraphs(of(profile, own=True), "missing")[0].endswith("--profiling.with_stack=true")


def test_the_last_line_says_where_the_trace_can_be_seen() -> None:
    trace = "results/profiler_traces/x.pt.trace.json.gz"
    found = of(trace=trace)
    assert commands(found)["open"] == trace
    assert on_terminal(found, 60).splitlines()[-1] == f"open: {trace} at https://ui.perfetto.dev"
    assert '<a href="https://ui.perfetto.dev">' in pages.render(found)


def test_a_narrow_table_of_operators_keeps_the_shapes_that_tell_them_apart() -> None:
    for profile in (made.profile(), HOST):
        lines = on_terminal(of(profile), 60, details=True).splitlines()
        operators = [line for line in lines if line.startswith("aten::cudnn_convolution  ")]
        assert len(operators) == len({line.split("  ", 2)[2] for line in operators}) == 15
        assert all("[64, " in line for line in operators)


def test_a_terminal_of_80_columns_says_how_far_operators_are_from_the_devices_limits() -> None:
    lines = on_terminal(of(), 80, details=True).splitlines()
    (head,) = [line for line in lines if line.strip().startswith("operator ")]
    assert "of ceiling" in head
    assert any("62.0 %" in line for line in lines if line.startswith("aten::cudnn_convolution"))


def test_hostile_names_are_shown_and_not_obeyed() -> None:
    harmless(hostile(), at_least=8)
    assert rb"\ud800" in pages.render(hostile()).encode(), "half a character does not keep the page from being written"


def test_a_style_that_no_sheet_knows_is_grey_and_no_class_of_its_own() -> None:
    assert charts.hue(ATTACK) == "hue-other"
    assert 'class="box hue-other"' in pages.render(hostile())


def test_an_empty_profile_is_still_a_report() -> None:
    nothing = made.device_rank(
        wall=0, device=Times(0, 0, 0, 0, 0, 0, 0, 0), idle={}, steps=[], step_numbers=[], phases=[], modules=[],
        operators=[], kernels=[], launches=None, copies=[], synchronisations=[], collectives=[], critical_path={},
        timeline=None,
    )  # fmt: skip
    found = of(Profile([nothing], []), Findings("nothing to see", [], []))
    assert "no steps marked" in paragraphs(found)[0]
    assert everywhere(found)
    assert shares(Profile([nothing], [])) == {}


def test_the_parts_of_the_time_fill_the_bar() -> None:
    found = flat(of())[titles_place(of(), "Where the time went")]
    assert isinstance(found, Figure)
    widths = [float(width) for width in re.findall(r'width="([\d.]+)%" height="22"', found.drawing)]
    assert sum(widths) == pytest.approx(100, abs=0.1)
    assert "idle, data wait 33.3 %" in found.drawing


def test_every_lane_has_a_row_and_every_box_a_hover_text() -> None:
    timeline = made.device_rank().timeline
    assert timeline
    drawing = timelines.timeline(timeline) or ""
    assert re.findall(r'class="lane-name"[^>]*>([^<]+)<', drawing) == ["host", "stream 7", "stream 20", "idle"]
    assert drawing.count("<rect") == sum(len(lane.boxes) for lane in timeline.lanes)
    assert "<title>backward, 40 ms, from 94 ms</title>" in drawing


def test_boxes_beyond_the_step_stay_within_the_drawing() -> None:
    boxes = [Box(-5, 3, "early", "compute"), Box(8, 400, "late", "compute"), Box(4, 4, "none", "compute")]
    drawing = timelines.timeline(StepTimeline(0, 10, [Lane("stream 7", boxes)], 0)) or ""
    places = [(float(x), float(width)) for x, width in re.findall(r'x="([\d.]+)%" y="\d+" width="([\d.]+)%"', drawing)]
    assert len(places) == 3
    assert all(x + width <= 100 for x, width in places)


@pytest.mark.parametrize("found", [StepTimeline(0, 0, [], 0), StepTimeline(0, 10, [Lane("stream 7", [])], 5)])
def test_a_timeline_without_boxes_is_not_drawn(found: StepTimeline) -> None:
    assert timelines.timeline(found) is None
    assert "Timeline" not in titles(of(made.profile(timeline=found)))


def test_the_legend_tells_each_style_once_at_the_lane_that_it_belongs_to() -> None:
    timeline = made.device_rank().timeline
    assert timeline
    told = timelines.legend([*timeline.lanes, Lane("other", [Box(0, 1, "odd", "odd")])])
    assert [(lane, [name for _, name in styles]) for lane, styles in told] == [
        ("host", ["data wait", "host to device", "forward", "backward", "optimizer"]),
        ("streams", ["compute", "copy"]),
        ("idle", ["data wait", "python and launch"]),
        ("other", ["odd"]),
    ]


def test_no_two_styles_of_a_timeline_share_a_colour() -> None:
    known = dict.fromkeys([*NAMES, *PARTS, "compute", "communication", "copy", "set", *CAUSES])
    assert charts.hue("data_loader") == charts.hue("data_wait"), "the same wait has one colour"
    assert charts.hue("communication") == charts.hue("exposed_communication")
    styles = [style for style in known if style not in ("data_loader", "communication")]
    assert len({charts.hue(style) for style in styles}) == len(styles)
    sheet = (Path(pages.__file__).parent / "templates" / "style.css").read_text(encoding="utf-8")
    for theme in sheet.split("prefers-color-scheme: dark"):
        colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", theme))
        told = [colours[style.replace("_", "-")] for style in styles if style.replace("_", "-") in colours]
        assert len(set(told)) == len(told) == len(styles)
    assert all(f".hue-{style} {{ --swatch: var(--{style.replace('_', '-')}); }}" in sheet for style in styles)


def recorded(folder: Path, command: str, settings: dict[str, Any] | None = None) -> Document:
    """The page of a run with a profile."""
    (folder / directory.PROFILE).write_bytes(msgspec.json.encode(made.profile()))
    (folder / directory.FINDINGS).write_bytes(msgspec.json.encode(made.findings(unanswered=[])))
    record = REPLACE(record_of("exp-a"), command=command)
    run = run_of("exp-a", path=folder, record=record, settings=settings or {}, files=Run(folder, record))
    return run_report.page(run)


def test_the_page_of_a_profiled_run_begins_with_what_its_profile_says(tmp_path: Path) -> None:
    found = recorded(tmp_path, "profile", {"profiling.unit": "epoch"})
    assert found.headline == made.findings().headline.rstrip(".")
    order = ["Findings", "Where the time went", "Timeline", "Operators", "Steps", "Metrics", "Settings"]
    shown = [title for title in titles(found) if title in order]
    assert shown == order
    assert any("6 epochs of" in line for line in paragraphs(found, "quiet"))
    assert any("--profiling.record_shapes=true" in line for line in paragraphs(found, "missing"))


@pytest.mark.parametrize(("command", "unit"), [("train-bench", "step"), ("pipe-infer", "evaluation")])
def test_a_run_that_was_recorded_beside_being_measured_links_to_its_profile(
    tmp_path: Path, command: str, unit: str
) -> None:
    found = recorded(tmp_path, command)
    (told,) = [block for block in flat(found) if isinstance(block, Paragraph) and block.anchor == "profile"]
    assert told.lines == made.findings().headline
    assert flat(found).index(told) < titles_place(found, "Metrics")
    assert titles(found).index("Profile") < titles(found).index("Findings") < titles(found).index("Metrics")
    assert any(f"6 {unit}s of" in line for line in paragraphs(found, "quiet"))
    source = pages.render(found)
    assert source.index('<a href="#profile">') < source.index('id="profile"')


@pytest.mark.parametrize(
    ("error", "said"), [({"message": "interrupted"}, "no profile: interrupted"), (None, "no profile: completed")]
)
def test_a_run_that_was_not_diagnosed_says_why_there_is_no_profile(error: dict[str, Any] | None, said: str) -> None:
    record = REPLACE(record_of("exp-a"), command="profile", error=error)
    assert said in paragraphs(run_report.blocks(run_of("exp-a", record=record)))


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


def test_of_a_job_of_many_ranks_the_report_says_how_many_are_traced() -> None:
    assert report.about(made.profile(ranks=2, world_size=128)).startswith("2 of 128 ranks, of which rank 0 ")
    assert report.about(made.profile(ranks=2, world_size=2)).startswith("2 ranks, of which rank 0 ")
    assert report.about(made.profile(ranks=2)).startswith("2 ranks, of which rank 0 ")
    assert ", rank 3 of 8: " in report.about(Profile([made.device_rank(rank=3, world_size=8)], []))


def test_of_hundreds_of_shapes_the_first_are_shown() -> None:
    many = short_shapes(f"[{', '.join(['[768, 768]'] * 130)}] []")
    assert re.fullmatch(r"\[(\[768, 768\](, )?)+ and 12\d more", many)
    assert len(many) < 100
    for few in ("", "[64, 3, 224, 224] [64, 3, 7, 7]", "x" * 500):
        assert short_shapes(few) == few
