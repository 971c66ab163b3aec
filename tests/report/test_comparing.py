"""What a comparison looks like: in the terminal at several widths, as Markdown, CSV and JSON, and in one sentence."""

import csv
import io
import json
import re
from typing import Any

import pytest
from compared import causes, comparison, comparisons, difference, side, verdict, waterfall, withheld
from msgspec import structs
from rich.console import Console

from gpubench import units
from gpubench.compare import result
from gpubench.compare.result import (
    Bottleneck,
    Comparability,
    Comparisons,
    Explanation,
    FindingChange,
    GateResult,
    Noise,
    NullMetric,
    Verdict,
    WorkChange,
)
from gpubench.report import comparison as report
from gpubench.report import markdown, noise, phrases, terminal
from gpubench.report.document import Figure
from gpubench.report.phrases import headline
from gpubench.text import clean, shorten

HOSTILE = "a|b`c\n# <img src=x> \x1b[31m $x$ *y* [z](w) &amp; \u202e \udc80"


def console_of(width: int) -> Console:
    return Console(file=io.StringIO(), width=width, highlight=False)


def rendered(document: Comparisons, width: int = 120, *, everything: bool = False, details: bool = False) -> str:
    console = console_of(width)
    terminal.show(report.document(document, everything=everything), console, details=details)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_headline_of_inference_is_its_latency_unless_the_batches_differ() -> None:
    speed = verdict("throughput", unit="samples/s", better="higher")
    latency = verdict("latency_p50")
    assert " in latency p50" in headline(comparison(speed, latency))
    withheld_latency = verdict("latency_p50", verdict="withheld", reason="other batches")
    assert " in throughput" in headline(comparison(speed, withheld_latency))


@pytest.mark.parametrize("number", [1, 2])
def test_a_single_metric_gets_no_chart(number: int) -> None:
    judged = [verdict("throughput", unit="samples/s", better="higher"), verdict("latency_p50")][:number]
    drawn = [block for block in report._verdicts(comparison(*judged), True, drawn=True) if isinstance(block, Figure)]
    assert len(drawn) == number - 1


def test_parameters_differ_and_a_batch_size_differs() -> None:
    def said(key: str) -> str:
        found = withheld(difference(key, 1, 2, "workload"))
        return headline(structs.replace(comparison(), comparability=found))

    assert "parameters differ (" in said("parameters")
    assert "training.batch_size differs (" in said("training.batch_size")


def rich_comparison(**changes: Any) -> Comparisons:
    """One candidate with something in every section."""
    verdicts = [
        verdict("throughput", unit="samples/s", better="higher", baseline=1024.3, candidate=993.1, ratio=0.9695,
                interval=(0.964, 0.975)),
        verdict(),
        verdict("phase_backward"),
        verdict("peak_memory_allocated", unit="B", verdict="equivalent", ratio=1.0, interval=(1.0, 1.0)),
        verdict("peak_memory_rss", unit="B", verdict="inconclusive", leaning="more", ratio=1.0238,
                interval=(1.001, 1.047), more_repeats=4),
        verdict("energy_per_sample", unit="J", verdict="more", baseline=1.0, candidate=3.4, ratio=3.4,
                interval=(3.1, 3.7)),
        verdict("first_step_time", verdict="withheld", ratio=1.7, reason="batch size 16 against 32"),
    ]  # fmt: skip
    known: dict[str, Any] = {
        "comparability": Comparability(True, False, ["another torch"], [difference("torch.version", "2.13", "2.14")]),
        "explanation": Explanation(
            waterfall(("forward", -0.0012), ("backward", 0.0041)), [], None, ["backward takes +4.1 ms"]
        ),
        "warnings": ["new: clocks were throttled"],
    }
    gate = [GateResult("step_time>2%", "step_time", "new", 0.02, 0.031, (0.026, 0.037), 1e-5, "regressed")]
    return comparisons(comparison(*verdicts, **(known | changes)), gate=gate)


@pytest.mark.parametrize(
    ("fraction", "shown"),
    [(0, "0 %"), (1.3e-7, "<0.0001 %"), (1.8e-6, "0.00018 %"), (0.0234, "2.3 %"), (0.5, "50.0 %")],
)
def test_a_share_is_never_told_in_powers_of_ten(fraction: float, shown: str) -> None:
    assert units.percent(fraction) == shown


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "new is 3.1 % slower than base in step time (95 % interval 2.6 to 3.7 %), beyond the 0.5 % margin"),
        (
            {"verdict": "faster", "ratio": 0.969, "interval": (0.963, 0.974)},
            "new is 3.1 % faster than base in step time (95 % interval 2.6 to 3.7 %), beyond the 0.5 % margin",
        ),
        (
            {"level": "step", "assumed": 0.0024, "units": (1, 1)},
            "if equal processes differ by at most 0.24 %), beyond the 0.5 % margin",
        ),
        ({"units": (1, 1)}, "(95 % interval 2.6 to 3.7 %, from equal repeats on record), beyond the 0.5 % margin"),
        (
            {"ratio": 3.4, "interval": (3.1, 3.7)},
            "new is 3.40 x as slow as base in step time (95 % interval 3.10 to 3.70 x), beyond the 0.5 % margin",
        ),
        (
            {"verdict": "faster", "ratio": 0.25, "interval": (0.2, 0.4)},
            "new is 4 x as fast as base in step time (95 % interval 2.50 to 5 x)",
        ),
        (
            {"metric": "peak_memory_rss", "verdict": "more"},
            "new has 3.1 % more peak memory rss than base (95 % interval 2.6 to 3.7 %)",
        ),
        (
            {"metric": "peak_memory_rss", "verdict": "less", "ratio": 0.25, "interval": (0.2, 0.4)},
            "new has 0.25 x the peak memory rss of base (95 % interval 0.2 to 0.4 x)",
        ),
        (
            {"verdict": "equivalent", "ratio": 1.001, "interval": (0.999, 1.003)},
            "new and base are equivalent in step time: +0.1 % (95 % interval -0.1 to +0.3 %), within the 0.5 % margin",
        ),
        (
            {"verdict": "inconclusive", "ratio": 1.012, "interval": (0.997, 1.027), "more_repeats": 4},
            "inconclusive: step time of new differs from that of base by +1.2 % (95 % interval -0.3 to +2.7 %); "
            "about 4 more repeats a side should settle a change of this size",
        ),
        (
            {"verdict": "inconclusive", "leaning": "slower", "ratio": 1.02, "interval": (1.001, 1.04),
             "more_repeats": 1},
            ", leaning slower; about 1 more repeat a side should settle a change of this size",
        ),
        (
            {"verdict": "inconclusive", "ratio": 0.76, "interval": (0.02, 26.11)},
            "inconclusive: step time of new is 0.76 x that of base (95 % interval 0.02 to 26 x)",
        ),
        ({"verdict": "rejected", "reason": "new: 12 steps were skipped"}, "rejected, new: 12 steps were skipped"),
        ({"verdict": "withheld", "reason": "batch size"}, "withheld: batch size"),
        ({"baseline": 0.0, "ratio": None, "interval": None}, "new is slower than base in step time, from 0"),
        ({"verdict": "faster", "candidate": 0.0, "ratio": 0.0, "interval": None}, "faster than base in step time, to"),
        ({"interval": (1.031, 1.031)}, "new is 3.1 % slower than base in step time, beyond the 0.5 % margin"),
        ({"ratio": 1.2, "interval": (1.2 - 1e-12, 1.2 + 1e-12)}, "new is 20 % slower than base in step time, beyond"),
        ({"limit": 0.012}, "beyond the 1.2 % that the machine itself may account for"),
        (
            {"limit": 4.47, "ratio": 9, "interval": (8, 10)},
            "beyond the 5.5 x that the machine itself may account for",
        ),
        ({"limit": 0.02}, "beyond the 2 % that the machine itself may account for"),
    ],
)  # fmt: skip
def test_the_headline_is_a_sentence_for_a_pull_request(changes: dict[str, Any], expected: str) -> None:
    assert expected in headline(comparison(verdict(**changes)))


def test_the_headline_is_about_throughput_then_step_time_then_whatever_was_judged() -> None:
    rate = verdict("throughput_per_device", unit="samples/s", better="higher", ratio=0.97, interval=(0.96, 0.98))
    memory = verdict("peak_memory_rss", verdict="more")
    refused = verdict("step_time", verdict="withheld", reason="batch size")
    assert "in throughput per device" in headline(comparison(memory, verdict(), rate))
    assert "in step time" in headline(comparison(memory, verdict()))
    assert "more peak memory rss" in headline(comparison(refused, memory))


@pytest.mark.parametrize(
    ("runs", "changes", "hedged"),
    [
        ((1, 1), {}, True),
        ((1, 1), {"verdict": "faster", "ratio": 0.969, "interval": (0.963, 0.974)}, True),
        ((1, 1), {"limit": 0.012}, True),
        ((1, 1), {"paired": True}, False),
        ((1, 1), {"level": "step"}, False),
        ((1, 1), {"metric": "peak_memory_rss", "verdict": "more"}, False),
        ((1, 1), {"verdict": "equivalent", "ratio": 1.0, "interval": (0.999, 1.001)}, False),
        ((4, 4), {"level": "run"}, False),
        ((1, 4), {"level": "run"}, False),
    ],
)
def test_a_speed_read_off_one_run_each_is_said_to_be(
    runs: tuple[int, int], changes: dict[str, Any], hedged: bool
) -> None:
    sides = [structs.replace(side(label), runs=n) for label, n in zip(("base", "new"), runs, strict=True)]
    said = headline(structs.replace(comparison(verdict(**changes)), baseline=sides[0], candidate=sides[1]))
    assert said.endswith(", from one run each") == hedged
    assert ("from one run each" in said) == hedged


def test_what_would_settle_it_comes_after_what_is_wrong_with_it() -> None:
    other = withheld(difference("model.name", "resnet18", "resnet50", "workload"), forced=True)
    open_ = verdict(verdict="inconclusive", ratio=1.012, interval=(0.997, 1.027), more_repeats=5)
    assert headline(comparison(open_, comparability=other)) == (
        "inconclusive: step time of new differs from that of base by +1.2 % (95 % interval -0.3 to +2.7 %), "
        "although model.name differs (resnet18 against resnet50); "
        "about 5 more repeats a side should settle a change of this size"
    )


def test_another_workload_withholds_the_headline_unless_forced() -> None:
    other = difference("model.name", "resnet18", "resnet50", "workload")
    said = headline(comparison(verdict(), comparability=withheld(other)))
    assert said == "withheld: model.name differs (resnet18 against resnet50)"
    forced = headline(comparison(verdict(), comparability=withheld(other, other, forced=True)))
    assert forced.startswith("new is 3.1 % slower")
    assert forced.endswith("although model.name differs (resnet18 against resnet50, and 1 more)")
    assert headline(comparison(comparability=withheld(reason="a log against a run"))) == "withheld: a log against a run"


def test_nothing_in_common_is_said_so() -> None:
    assert headline(comparison()) == "nothing to compare: no metric is known of both sides"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "+3.1 % [+2.6, +3.7]"),
        ({"ratio": 1.0, "interval": (1.0, 1.0)}, "+0 %"),
        ({"ratio": 1.0, "interval": None}, "+0 %"),
        ({"ratio": 1.0, "interval": (0.99, 1.01)}, "+0.0 % [-1.0, +1.0]"),
        ({"ratio": 0.99996, "interval": (0.99988, 1.00012)}, "+0.00 % [-0.01, +0.01]"),
        ({"ratio": 1.123, "interval": (0.95, 1.31)}, "+12 % [-5, +31]"),
        ({"ratio": 1.031, "interval": None}, "+3.1 %"),
        ({"ratio": 3.4, "interval": (3.1, 3.7)}, "3.40 x [3.10, 3.70]"),
        ({"ratio": 0.25, "interval": None}, "0.25 x"),
        ({"baseline": 0.0, "candidate": 0.0, "ratio": None, "interval": None}, "+0 %"),
        ({"baseline": 0.0, "ratio": None, "interval": None}, "from 0"),
        ({"candidate": 0.0, "ratio": 0.0, "interval": None}, "to 0"),
        ({"verdict": "withheld"}, "-"),
        ({"ratio": 1 + 1e-12, "interval": (1.0, 1 + 2e-12)}, "+0 %"),
        ({"ratio": 1.2, "interval": (1.2 - 1e-12, 1.2 + 1e-12)}, "+20 %"),
        ({"ratio": 1.2031, "interval": (1.2031, 1.2031)}, "+20.3 %"),
        ({"ratio": 3.4, "interval": (3.4 - 1e-12, 3.4)}, "3.40 x"),
        ({"ratio": 1e-8, "interval": (1e-8, 3e-8)}, "1e-08 x [1e-08, 3e-08]"),
    ],
)
def test_a_change_is_in_percent_until_a_multiple_says_more(changes: dict[str, Any], expected: str) -> None:
    assert phrases.change(verdict(**changes)) == expected


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [(0.0, "0 %"), (0.0123, "1.2 %"), (-0.45, "-45.0 %"), (0.99, "99.0 %"), (1.0, "2.0 x"), (4.47, "5.5 x"),
     (44.868, "46 x"), (4486.8, "4,488 x")],
)  # fmt: skip
def test_a_difference_that_nothing_can_fall_by_is_a_factor(fraction: float, expected: str) -> None:
    assert units.difference(fraction) == expected


def test_a_signed_change_has_no_more_digits_than_carry_news() -> None:
    assert [units.signed_percent(change) for change in (0.0, 1e-12, 0.0026, -0.041, 0.2)] == [
        "+0 %", "+0 %", "+0.26 %", "-4.1 %", "+20.0 %",
    ]  # fmt: skip
    assert units.signed_percent(0.0026, 1) == "+0.3 %"
    assert [units.signed_seconds(change) for change in (0.0, -0.0012, 1.5)] == ["+0 s", "-1.20 ms", "+1.50 s"]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_every_width_shows_every_verdict_and_ratio_whole(width: int) -> None:
    text = rendered(rich_comparison(), width, details=True)
    table = text[text.index("metric ") : text.index("first step time: ")]
    for whole in ("-3.0 %", "+3.1 %", "+0 %", "+2.4 %", "3.40 x", "withheld", "inconclusive", "equivalent", "slower"):
        assert whole in table, text
    assert "…" not in table
    assert "-1.20 ms" in text
    assert "+4.10 ms" in text


@pytest.mark.parametrize("width", range(20, 40))
def test_a_sliver_of_a_terminal_has_every_metric_and_verdict_before_any_change(width: int) -> None:
    text = rendered(
        comparisons(comparison(verdict("energy_per_sample"), verdict("mfu", verdict="inconclusive"))), width
    )
    table = text[text.index("metric") : text.index("step time") if "step time" in text else None]
    letters = "".join(table.split())
    assert {"energy", "per", "mfu", "inconclusive", "slower"} <= set(table.split()), text
    assert ("+3.1%" in letters) == (width >= 32)


def test_tables_stay_within_the_terminal() -> None:
    sentences = re.compile(
        r"interval|baseline  |candidate  |repeats|margin|regressed|warning|backward takes|time of a step: |another"
        r"|against"
    )
    for line in rendered(rich_comparison(), 40).splitlines():
        assert len(line) <= 40 or sentences.search(line), line


def test_a_wide_terminal_shows_values_and_intervals_too() -> None:
    wide, middling = rendered(rich_comparison(), 120), rendered(rich_comparison(), 80)
    assert re.search(r"throughput +1,024 samples/s +993 samples/s +-3.0 % \[-3.6, -2.5\] +slower", wide)
    assert re.search(r"throughput +1,024 samples/s +993 samples/s +-3.0 % \[-3.6, -2.5\] +slower", middling)
    narrow = rendered(rich_comparison(), 60)
    assert re.search(r"throughput +1,024 samples/s +-3.0 % \[-3.6, -2.5\] +slower", narrow)
    assert "+4.10 ms        +4.1 %  [+4 ms, +4.20 ms]" in wide


def test_the_sections_come_in_the_order_of_the_questions() -> None:
    text = rendered(rich_comparison(), details=True)
    sections = [
        "new is 3.0 % slower than base in throughput",
        "baseline   base (results/base/1): resnet18, fp32, batch 16 on cpu; 1 run; 5 repeats; 2026-11-21 11:29 UTC",
        "candidate  new (results/new/1)",
        "another torch",
        "torch.version  2.13      2.14",
        "peak memory allocated",
        "first step time: batch size 16 against 32",
        "time of a step: 100 ms before, 103 ms after",
        "████│",
        "│████████████",
        "backward takes +4.1 ms",
        "warning: new: clocks were throttled",
        "regressed: step_time>2%: new: step_time worse by 3.1 % [2.6, 3.7] > 2 %, adjusted p 1e-05",
    ]
    places = [text.index(section) for section in sections]
    assert places == sorted(places), text


def test_phases_are_left_to_the_waterfall_unless_asked_for() -> None:
    assert "phase backward" not in rendered(rich_comparison())
    assert "phase backward" in rendered(rich_comparison(), everything=True)
    assert "phase backward" in rendered(comparisons(comparison(verdict("phase_backward"))))


def test_many_differences_are_counted_but_never_those_that_stand_in_the_way() -> None:
    many = [difference(f"model.part_{i}", 1, 2, "workload") for i in range(20)]
    many += [difference(f"packages.p{i}", 1, 2) for i in range(18)] + [difference("git.commit", "a", "b", "code")] * 2
    text = rendered(comparisons(comparison(comparability=withheld(*many))))
    assert text.count("model.part_") == 21  # once more in the headline
    assert text.count("packages.p") == 15
    assert "and 5 more (3 treatment, 2 code): --json lists them" in text


def test_a_long_value_keeps_both_ends() -> None:
    assert shorten("abcdefghij", 7) == "abc…hij"
    assert shorten("abcdefg", 7) == "abcdefg"
    long = Comparability(True, False, [], [difference("k", "begin" + "x" * 500 + "end", None)])
    text = rendered(comparisons(comparison(comparability=long)), 80)
    assert re.search(r"k +begin\S+end +-\s", text), text


def test_a_regression_is_told_apart_without_colour() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, no_color=True, highlight=False)
    terminal.show(report.document(rich_comparison()), console)
    assert isinstance(console.file, io.StringIO)
    assert "regressed: " in console.file.getvalue()
    assert "\x1b[31m" not in console.file.getvalue()


def test_markup_in_a_run_is_text() -> None:
    text = rendered(comparisons(comparison(verdict(reason="[bold]x[/] [link=http://e]"), candidate="[red]new[/]")))
    assert "[red]new[/] is 3.1 % slower" in text
    assert "[bold]x[/] [link=http://e]" in text


def hostile() -> Comparisons:
    bad = verdict(HOSTILE, unit=HOSTILE, method=HOSTILE, reason=HOSTILE)
    said = Comparability(True, False, [HOSTILE], [difference(HOSTILE, HOSTILE, float("nan"))])
    found = comparison(
        bad,
        candidate=HOSTILE,
        comparability=said,
        explanation=Explanation(waterfall((HOSTILE, 0.001)), [], None, [HOSTILE]),
        warnings=[HOSTILE],
    )
    return Comparisons(
        schema_version=2,
        confidence=0.95,
        margin=0.005,
        comparisons=[structs.replace(found, baseline=side(HOSTILE, headline=HOSTILE, started=HOSTILE))],
        gate=[GateResult(HOSTILE, HOSTILE, HOSTILE, 0.0, None, None, None, "inconclusive")],
        left_out=[HOSTILE],
    )


@pytest.mark.parametrize("width", [40, 120])
def test_no_file_moves_the_cursor(width: int) -> None:
    text = rendered(hostile(), width)
    assert not {"\x1b", "\u202e", "\udc80"} & set(text)
    assert "\\x1b[31m" in text


def test_no_file_breaks_a_markdown_table() -> None:
    text = markdown.render(report.document(hostile()))
    assert not {"\x1b", "\u202e", "\udc80"} & set(text)
    assert "<img" not in text
    assert "&lt;img src=x&gt;" in text
    for line in text.splitlines():
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            assert len(cells) in (3, 4, 5), line
        assert not re.search(r"(?<!\\)[`*$]", line.removeprefix("**").removesuffix("**")), line


def test_markdown_has_the_same_figures() -> None:
    text = markdown.render(report.document(rich_comparison()))
    for expected in (
        "### new is 3.0 % slower than base in throughput (95 % interval 2.5 to 3.6 %), beyond the 0.5 % margin, "
        "from one run each\n",
        "| torch.version | 2.13 | 2.14 |",
        "| throughput | 1,024 samples/s | 993 samples/s | -3.0 % \\[-3.6, -2.5\\] | slower |",
        "| backward | +4.10 ms | +4.1 % | \\[+4 ms, +4.20 ms\\] |",
        "- warning: new: clocks were throttled",
        "| regressed | step_time&gt;2% | new | step_time worse by 3.1 % \\[2.6, 3.7\\] &gt; 2 % | 1e-05 |",
    ):
        assert expected in text, text
    assert "phase backward" not in text


@pytest.mark.parametrize(
    ("text", "expected"), [("step_time", "step_time"), ("__init__", r"\_\_init\_\_"), ("a_ _b", r"a\_ \_b")]
)
def test_an_underscore_inside_a_word_needs_no_escape(text: str, expected: str) -> None:
    assert markdown.escape(text) == expected


@pytest.mark.parametrize(
    ("worsening", "interval", "limit", "expected"),
    [
        (0.45, (0.43, 0.47), 0.02, "worse by 45.0 % [43.0, 47.0] > 2 %"),
        (0.012, (-0.003, 0.027), 0.02, "worse by 1.2 % [-0.3, 2.7] <= 2 %"),
        (-0.81, (-0.83, -0.79), 0.02, "better by 81.0 % [79.0, 83.0], limit 2 %"),
        (-0.003, (-0.008, 0.002), 0.0, "better by 0.3 % [-0.2, 0.8], limit 0 %"),
        (0.2, (0.2, 0.2), 0.02, "worse by 20 % > 2 %"),
        (0.0, (0.0, 0.0), 0.02, "unchanged, limit 2 %"),
        (0.0, None, 0.02, "unchanged, limit 2 %"),
        (None, None, 0.02, "unknown, limit 2 %"),
        (0.3, None, 4.47, "worse by 30 % <= 5.5 x"),
    ],
)
def test_the_gate_says_worse_and_better_whatever_the_metric_counts(
    worsening: float | None, interval: tuple[float, float] | None, limit: float, expected: str
) -> None:
    result = GateResult("throughput>2%", "throughput", "new", limit, worsening, interval, None, "inconclusive")
    document = comparisons(comparison(verdict()), gate=[result])
    assert phrases.worsening(result) == f"throughput {expected}"
    assert f"inconclusive: throughput>2%: new: throughput {expected}\n" in rendered(document)
    assert markdown.escape(f"throughput {expected}") in markdown.render(report.document(document))


def test_the_gate_says_why_clear_figures_conclude_nothing() -> None:
    reason = "not beyond the noise floor of 12 %"
    result = GateResult("step_time>2%", "step_time", "new", 0.12, 0.031, (0.026, 0.037), 0.9, "inconclusive", reason)
    document = comparisons(comparison(verdict()), gate=[result])
    assert f"step_time worse by 3.1 % [2.6, 3.7] <= 12.0 % ({reason}), adjusted p 0.9" in rendered(document)
    assert markdown.escape(f"({reason})") in markdown.render(report.document(document))


def test_a_change_of_a_sample_is_told_as_such() -> None:
    found = structs.replace(waterfall(("forward", 0.001)), per="sample")
    text = rendered(comparisons(comparison(explanation=Explanation(found, [], None, []))), details=True)
    assert "of the whole" in text
    assert "time of a sample" in text


def test_no_label_brings_line_ends_or_escapes_into_csv() -> None:
    text = result.to_csv(hostile())
    assert not {"\x1b", "\u202e", "\udc80"} & set(text)
    assert len(text.splitlines()) == 2
    (row,) = csv.DictReader(io.StringIO(text))
    assert row["candidate_label"] == row["reason"] == clean(HOSTILE)


def test_csv_has_a_row_for_each_metric_and_every_field() -> None:
    document = comparisons(comparison(verdict(), verdict("mfu")), comparison(verdict(), candidate="third, one"))
    rows = list(csv.DictReader(io.StringIO(result.to_csv(document))))
    assert [(row["candidate_label"], row["metric"]) for row in rows] == [
        ("new", "step_time"),
        ("new", "mfu"),
        ("third, one", "step_time"),
    ]
    assert (rows[0]["interval_low"], rows[0]["interval_high"], rows[0]["units_candidate"]) == ("1.026", "1.037", "5")
    assert {name.split("_")[0] for name in Verdict.__struct_fields__} <= {name.split("_")[0] for name in rows[0]}


def test_a_csv_cell_without_a_value_is_empty() -> None:
    (row,) = csv.DictReader(io.StringIO(result.to_csv(comparisons(comparison(verdict(interval=None, leaning=None))))))
    assert (row["interval_low"], row["leaning"]) == ("", "")


def test_json_holds_every_number_and_reason_and_no_nan() -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    document = json.loads(result.to_json(hostile()), parse_constant=refuse)
    (only,) = document["comparisons"]
    assert only["verdicts"][0]["interval"] == [1.026, 1.037]
    assert only["comparability"]["differences"][0]["candidate"] == "nan"
    assert document["gate"][0]["outcome"] == "inconclusive"


def learned(*metrics: NullMetric, margin: float = 0.005) -> Noise:
    return Noise(2, {}, {}, ["a", "b"], margin, 0.95, list(metrics))


def null_metric(metric: str, **changes: Any) -> NullMetric:
    known: dict[str, Any] = {
        "unit": "s", "level": "repeat", "units": 8,
        "spread": 0.021, "within": 0.004, "noise_floor": 0.07, "per_side": 4,
        "resolvable": 0.05,
    }  # fmt: skip
    return NullMetric(metric=metric, **(known | changes))


def shown(found: Noise, width: int) -> str:
    console = console_of(width)
    terminal.show(noise.document(found), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_noise_is_told_with_what_it_costs() -> None:
    text = shown(learned(null_metric("step_time"), null_metric("throughput", spread=0.01)), 140)
    assert text.startswith("on this machine, expect to see changes of throughput above 5 % with 4 repeats a side\n")
    assert "8 repeats of 2 runs without a change differ in throughput by 1 % (standard deviation)" in text
    assert re.search(r"step time +2.1 % +0.4 % +7 % +5 %", text)
    price = r"\d+ repeats a side \[\d+, (over )?\d+\]"
    assert re.search(rf"to find a change of 1 % takes {price}, 2 % takes {price} and 5 % takes {price}", text)


def test_a_resolvable_change_comes_with_its_range() -> None:
    text = shown(learned(null_metric("step_time", units=4, resolvable_range=(0.02, 0.11))), 140)
    assert "5 % [2, 11.0]" in text
    assert re.search(r"2 % takes \d+ repeats a side \[\d+, over 100\]", text)


def test_noise_that_drowns_everything_is_given_no_figures() -> None:
    drowned = null_metric("step_time", spread=5.0, noise_floor=None, resolvable=None)
    text = shown(learned(drowned), 140)
    assert text.startswith("on this machine, expect to see no change of step time by less than a factor of two with 4 ")
    assert "to find a change" not in text
    assert re.search(r"step time +500.0 % +0.4 % +- +-\n", text)


def test_a_ratio_that_says_nothing_is_told_in_words() -> None:
    vague = verdict(
        verdict="inconclusive",
        ratio=None,
        interval=None,
        more_repeats=None,
        reason="the repeats differ too much to tell",
    )
    said = headline(comparison(vague))
    assert said == "inconclusive: the repeats differ too much to tell whether step time differs between new and base"
    assert phrases.change(vague) == "too noisy"
    assert "%" not in said


def test_several_candidates_begin_with_one_table() -> None:
    one, other = comparison(verdict()), comparison(verdict(verdict="equivalent", ratio=1.0, interval=(0.999, 1.001)))
    other = structs.replace(other, candidate=side("other"))
    made = comparisons(one, other)
    lines, text = rendered(made).splitlines(), markdown.render(report.document(made))
    assert lines[0] == "2 candidates against base"
    rows = [line.split()[0] for line in lines[3:5]]
    assert lines[2].split()[:2] == ["candidate", "metric"]
    assert rows == ["new", "other"]
    assert text.index("| candidate | metric |") < text.index("equivalent in")


def test_warnings_stand_below_the_answer_and_are_counted_apart() -> None:
    loud = structs.replace(rich_comparison().comparisons[0], warnings=[f"doubt {n}" for n in range(5)])
    made = structs.replace(rich_comparison(), comparisons=[loud], left_out=["a run: damaged"], gate=[])
    lines = rendered(made).splitlines()
    first = min(place for place, line in enumerate(lines) if line.startswith(("warning:", "left out:")))
    assert all(line.startswith(("warning:", "left out:", "3 more warnings")) for line in lines[first:])


@pytest.mark.parametrize("width", [40, 60, 80])
def test_noise_fits_a_narrow_terminal(width: int) -> None:
    text = shown(learned(null_metric("peak_memory_allocated")), width)
    table = text[text.index("metric ") : text.index("spread:")] if "spread:" in text else text
    assert "5 %" in table
    assert "…" not in text


def test_noise_in_markdown_is_a_table() -> None:
    text = markdown.render(noise.document(learned(null_metric("step_time"))))
    assert "| step time | 2.1 % | 0.4 % | 7 % | 5 % |" in text


def test_noise_of_nothing_is_said_so() -> None:
    assert shown(learned(), 80).startswith("no noise known")
    assert markdown.render(noise.document(learned()))


def test_causes_stand_side_by_side_after_what_explains_the_change() -> None:
    text = rendered(rich_comparison(causes=causes()))
    sections = [
        "backward takes +4.1 ms",
        "profile of the baseline: GPU idle 43.5 %: 76.6 % of it waits for the data loader (1; 6 steps, 1.34 times",
        "profile of the candidate: GPU busy 94 %: matrix products in fp32 (2; 6 steps)",
        "gone: the GPU waits for the data loader (high), worth up to 33.3 % of the step",
        "still there: one tensor at a time (medium -> low), worth up to 5 % -> 2.1 % of the step",
        "there, not judged before: matrix products in fp32 (high)",
        "gemm",
        "add",
        "and 3 others",
        "warning: new: clocks were throttled",
    ]
    places = [text.index(section) for section in sections]
    assert places == sorted(places), text
    assert text.count("they show proportions, not speed") == 1
    assert re.search(r"gemm +30 ms +18 ms +-12 ms +-40.0 % +48 -> 48", text), text


def test_markdown_has_the_causes_too() -> None:
    text = markdown.render(report.document(rich_comparison(causes=causes())))
    for expected in (
        "- profile of the candidate: GPU busy 94 %: matrix products in fp32 (2; 6 steps)",
        "- gone: the GPU waits for the data loader (high), worth up to 33.3 % of the step",
        "| gemm | 30 ms | 18 ms | -12 ms | -40.0 % | 48 -&gt; 48 |",
        "and 3 others",
    ):
        assert expected in text, text


def test_a_side_without_a_profile_and_work_that_is_not_listed_are_said() -> None:
    alone = causes(candidate=None, findings=[], of=None, work=[], others=0)
    text = rendered(comparisons(comparison(verdict(), causes=alone)))
    assert "profile of the candidate: not recorded" in text
    assert "no rule found anything" in text
    other = causes(of=None, work=[], others=0, obstacle="a trace marks no steps")
    said = "kernels and operators are not compared: a trace marks no steps"
    assert said in rendered(comparisons(comparison(verdict(), causes=other)))
    assert "profile of" not in rendered(rich_comparison())


@pytest.mark.parametrize("width", [40, 120])
def test_no_name_in_a_profile_moves_the_cursor_or_breaks_a_table(width: int) -> None:
    bad = causes(
        baseline=Bottleneck(HOSTILE, HOSTILE, 0, None),
        findings=[FindingChange(HOSTILE, HOSTILE, "gone", "high", None, None, None)],
        work=[WorkChange(HOSTILE, 0.1, 0.2, 1.0, 1.0)],
        obstacle=HOSTILE,
    )
    document = comparisons(comparison(verdict(), causes=bad))
    table = markdown.render(report.document(document))
    for text in (rendered(document, width), table):
        assert not {"\x1b", "\u202e", "\udc80"} & set(text)
    assert "<img" not in table
    assert not [line for line in table.splitlines() if line.startswith("|") and re.search(r"(?<!\\)[`*$]", line)]
