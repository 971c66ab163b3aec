"""A profile as a page: its drawings, its cards, and that nothing of a trace escapes its place."""

import re
from pathlib import Path
from typing import Any

import msgspec
import profiles_made as made
import pytest
from browser import PHONE, needs_browser, width_on_a_phone
from gpubench.report.profile_page import section, trace_page
from gpubench.report.templating import environment
from test_page import HOSTILE, Page, record_of, run_of

from gpubench.findings import Findings, Unanswered
from gpubench.report import lanes
from gpubench.report.page import run_page
from gpubench.report.profile import Against
from gpubench.runs.directory import FINDINGS, PROFILE
from gpubench.runs.stages import PARTS
from gpubench.trace.phases import NAMES
from gpubench.trace.profile import CAUSES, Box, KernelChange, Lane, Profile, Timeline

ATTACK = f"{HOSTILE}\ud800\x1b[2J"


def page(ranks: int = 1) -> str:
    against = Against(made.profile(), made.findings(findings=[]), made.changes())
    return trace_page(made.profile(ranks), made.findings(), against)


def hostile() -> str:
    """Every text of a profile and its findings is an attack."""
    known, replace = made.device_rank(), msgspec.structs.replace
    rank = made.device_rank(
        label=ATTACK, device_name=ATTACK, notes=[ATTACK], missing={ATTACK: ATTACK}, critical_path={ATTACK: made.MS},
        modules=[replace(known.modules[1], path=ATTACK, kind=ATTACK)],
        operators=[replace(known.operators[0], name=ATTACK, shapes=ATTACK, dtype=ATTACK)],
        kernels=[replace(known.kernels[0], name=ATTACK, operator=ATTACK)],
        copies=[replace(known.copies[0], example=ATTACK, where=ATTACK, phase=ATTACK)],
        phases=[replace(known.phases[0], name=ATTACK)],
        timeline=Timeline(0, made.MS, [Lane(ATTACK, [Box(0, made.MS, ATTACK, ATTACK)])], 0),
    )  # fmt: skip
    finding = replace(
        made.findings().findings[0], title=ATTACK, evidence=[ATTACK], cause=ATTACK, advice=ATTACK, threshold=ATTACK,
        fix={ATTACK: ATTACK},
    )  # fmt: skip
    found = Findings(ATTACK, [finding], [Unanswered(ATTACK, ATTACK, ATTACK)], keep={ATTACK: ATTACK})
    profile = Profile([rank, rank], [])
    return trace_page(profile, found, Against(profile, found, [KernelChange(ATTACK, 1, 2, 1.0, 1.0)]))


def test_hostile_names_are_shown_and_not_obeyed() -> None:
    source = hostile()
    found = Page(source)
    assert {"script", "img", "iframe", "object"}.isdisjoint(found.tags)
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert found.words.count(HOSTILE) > 15
    assert "\x1b" not in source


def test_half_a_character_in_a_name_does_not_keep_the_page_from_being_written() -> None:
    assert rb"\ud800" in hostile().encode()


def test_a_style_that_no_sheet_knows_is_grey_and_no_class_of_its_own() -> None:
    assert lanes.hue(ATTACK) == "hue-other"
    assert 'class="box hue-other"' in hostile()


def test_the_headline_is_the_title_and_a_period_is_not_doubled() -> None:
    said = trace_page(made.profile(), made.findings(headline="GPU idle 43 %."))
    assert "<title>GPU idle 43\u00a0%</title>" in said
    assert "43\u00a0%.." not in said


def test_the_parts_of_the_time_fill_the_bar() -> None:
    drawing = lanes.partition([made.device_rank()]) or ""
    widths = [float(width) for width in re.findall(r'width="([\d.]+)%" height="22"', drawing)]
    assert sum(widths) == pytest.approx(100, abs=0.1)
    assert "idle, data loader 33.3 %" in drawing


def test_every_rank_has_its_bar_and_its_row() -> None:
    source = page(ranks=3)
    assert len(re.findall(r'class="lane-name"[^>]*>rank \d<', source)) == 3
    assert "Rank 2 reached 58 of 60 collectives last" in source


def test_every_lane_has_a_row_and_every_box_a_hover_text() -> None:
    timeline = made.device_rank().timeline
    assert timeline
    drawing = lanes.timeline(timeline) or ""
    assert re.findall(r'class="lane-name"[^>]*>([^<]+)<', drawing) == ["host", "stream 7", "stream 20", "idle"]
    assert drawing.count("<rect") == sum(len(lane.boxes) for lane in timeline.lanes)
    assert "<title>backward, 40 ms, from 94 ms</title>" in drawing


def test_boxes_beyond_the_step_stay_within_the_drawing() -> None:
    boxes = [Box(-5, 3, "early", "compute"), Box(8, 400, "late", "compute"), Box(4, 4, "none", "compute")]
    drawing = lanes.timeline(Timeline(0, 10, [Lane("stream 7", boxes)], 0)) or ""
    places = [(float(x), float(width)) for x, width in re.findall(r'x="([\d.]+)%" y="\d+" width="([\d.]+)%"', drawing)]
    assert len(places) == 3
    assert all(x + width <= 100 for x, width in places)


@pytest.mark.parametrize("found", [Timeline(0, 0, [], 0), Timeline(0, 10, [Lane("stream 7", [])], 5)])
def test_a_timeline_without_boxes_is_not_drawn(found: Timeline) -> None:
    assert lanes.timeline(found) is None
    assert "<h3>Timeline</h3>" not in trace_page(made.profile(timeline=found), made.findings())


def test_the_legend_tells_each_style_once_at_the_lane_that_it_belongs_to() -> None:
    timeline = made.device_rank().timeline
    assert timeline
    told = lanes.legend([*timeline.lanes, Lane("other", [Box(0, 1, "odd", "odd")])])
    assert [(lane, [name for _, name in styles]) for lane, styles in told] == [
        ("host", ["data wait", "host to device", "forward", "backward", "optimizer"]),
        ("streams", ["compute", "copy"]),
        ("idle", ["data loader", "python and launch"]),
        ("other", ["odd"]),
    ]


def test_no_two_styles_of_a_timeline_share_a_colour() -> None:
    styles = list(dict.fromkeys([*NAMES, *PARTS, "compute", "communication", "copy", "set", *CAUSES]))
    assert len({lanes.hue(style) for style in styles}) == len(styles)
    sheet = environment().get_template("style.css").render()
    for theme in sheet.split("prefers-color-scheme: dark"):
        colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", theme))
        told = [colours[style.replace("_", "-")] for style in styles if style.replace("_", "-") in colours]
        assert len(set(told)) == len(told) == len(styles)
    assert all(f".hue-{style} {{ --swatch: var(--{style.replace('_', '-')}); }}" in sheet for style in styles)


def test_a_timeline_of_a_trace_without_steps_is_of_all_of_it() -> None:
    whole = trace_page(made.profile(steps=[], step_numbers=[]), made.findings())
    assert "<span>The whole trace</span>" in whole
    assert "time since the trace began" in whole
    assert "<span>Step 3</span>" in page()
    assert "Too short to be drawn: 412 more." in page()


def test_a_finding_is_a_card_of_its_severity_with_its_threshold() -> None:
    source = page()
    assert re.findall(r'class="finding (\w+)"', source) == ["high", "medium", "low"]
    assert "<code>--data.workers=4</code>" in source
    assert "Threshold: From 5\u00a0% of the step on" in source
    assert "confirmed, \u221220.6\u00a0% [\u221221.4, \u221219.8]" in source


def test_a_setting_to_paste_keeps_its_plain_minus() -> None:
    assert section(made.profile(), made.findings(keep={"training.weight": -3}))["keep"] == "--training.weight=-3"


def test_two_traces_share_a_page_with_what_changed_first() -> None:
    source = page()
    assert source.index("What changed") < source.index("<h2>After</h2>") < source.index('class="finding high"')
    assert "<b>New</b>: The GPU waits for the data loader (high)" in source
    assert "Kernels that changed most, a step" in source


def test_a_long_kernel_name_is_shortened_and_whole_on_hover() -> None:
    source = page()
    assert source.count(f'title="{made.GEMM.replace("<", "&lt;").replace(">", "&gt;")}"') == 2
    assert max(len(cell) for cell in re.findall(r'scope="row"[^>]*>([^<]*)</th>', source)) < 110


def test_a_host_only_profile_has_a_page_too() -> None:
    source = trace_page(Profile([made.host_rank()], []), Findings("CPU: 45 % in operators", [], []))
    assert "No rule found anything above its threshold" in source
    assert "on the host alone" in source
    Page(source)


def test_a_section_begins_with_its_headline_in_the_page_of_a_run() -> None:
    template = environment().from_string('{% import "profile.html" as profiles %}{{ profiles.section(profile) }}')
    said = template.render(profile=section(made.profile(), made.findings(), trace="profiler_traces/a.json.gz"))
    assert (
        said.index('<h2 id="profile">Profile</h2>') < said.index('<p class="learned">GPU idle') < said.index("Findings")
    )
    assert '<span class="path">profiler_traces/a.json.gz</span>' in said


def test_what_is_no_step_of_the_program_is_not_called_one() -> None:
    found = section(made.profile(2), made.findings(overhead=0.1), unit="epoch")
    assert found["per"] == "of an epoch"
    assert found["timeline"]["figure"].title == "Epoch 3"
    assert "6 epochs of 177\u00a0ms" in found["about"]
    assert found["ranks"].columns[1] == "epoch"


def test_an_overhead_that_distorts_the_shares_stands_among_the_doubts() -> None:
    small, large = (section(made.profile(), made.findings(overhead=overhead)) for overhead in (0.1, 4.5))
    assert small["caveat"].endswith("its times tell shares, not speed")
    assert large["caveat"] == ""
    assert "5.5\u00a0x as long as a clean one: shares below are distorted" in large["doubts"][0]
    assert large["doubts"][1:] == small["doubts"]


def test_that_verification_was_interrupted_is_said() -> None:
    assert "Verification was interrupted: what" in trace_page(made.profile(), made.findings(interrupted=True))
    assert "interrupted" not in page()


def test_traces_of_other_work_share_a_page_without_a_verdict() -> None:
    against = Against(made.profile(2), made.findings(findings=[]), made.changes())
    source = trace_page(made.profile(), made.findings(), against)
    assert "Not compared: the numbers of ranks differ: 2 before, 1 after." in source
    assert "<b>Only after</b>: The GPU waits for the data loader (high)" in source
    for withheld in ("<b>New</b>", "Kernels that changed most", "Of before"):
        assert withheld not in source


def recorded(folder: Path, command: str, settings: dict[str, Any] | None = None) -> str:
    """The page of a run with a profile."""
    (folder / PROFILE).write_bytes(msgspec.json.encode(made.profile()))
    (folder / FINDINGS).write_bytes(msgspec.json.encode(made.findings(unanswered=[])))
    record = msgspec.structs.replace(record_of("exp-a"), command=command)
    return run_page(run_of("exp-a", path=folder, record=record, settings=settings or {}), None, None)


def test_the_page_of_a_profiled_run_begins_with_what_its_profile_says(tmp_path: Path) -> None:
    source = recorded(tmp_path, "profile", {"profiling.unit": "epoch"})
    order = [
        "<h1>GPU idle 43.5\u00a0%", "Measured without the profiler", "6 epochs of", "<h3>Findings",
        "<h3>Where the time", "<h3>Timeline", "<h3>Operators", "<h2>Warnings", "<h2>Metrics",
        "<h2>Steps", "<h2>Settings",
    ]  # fmt: skip
    places = [source.index(said) for said in order]
    assert places == sorted(places)
    assert source.count("<h3>Findings") == 1
    assert "--profiling.record_shapes=true" in source


@pytest.mark.parametrize(("command", "unit"), [("train-bench", "step"), ("pipe-infer", "evaluation")])
def test_a_run_that_was_recorded_beside_being_measured_links_to_its_profile(
    tmp_path: Path, command: str, unit: str
) -> None:
    source = recorded(tmp_path, command)
    link = source.index('GPU idle 43.5\u00a0%: 76.6\u00a0% of it waits for the data loader (<a href="#profile">')
    assert link < source.index("<h2>Metrics") < source.index('<h2 id="profile">') < source.index("<h3>Findings")
    assert f"6 {unit}s of" in source


def test_the_page_needs_nothing_but_itself() -> None:
    source = page()
    assert set(re.findall(r'(?:href|src)="(?!#|data:,)([^"]*)"', source)) == {"https://ui.perfetto.dev"}
    assert not re.search(r"url\(|@import|nan|inf%", source)


@needs_browser
def test_a_phone_shows_the_page_without_scrolling_sideways(tmp_path: Path) -> None:
    assert width_on_a_phone(page(ranks=2), tmp_path) <= PHONE
