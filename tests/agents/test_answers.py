"""What an agent is told of a result: what matters first, in little room, and how to ask for the rest."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from running import Finished

from gpubench.agents.answers import MOST, of_listing, of_runs, of_shown, written
from gpubench.errors import UsageError

CommandLine = Callable[..., Finished]
METRIC = {"unit": "s", "better": "lower", "n": 9, "effective_n": 9.0, "repeats": [1.0, 2.0], "distribution": None}
FINDING = {
    "id": "slow",
    "severity": "high",
    "evidence": ["e"],
    "title": "a title",
    "code": "f() at train.py:3",
    "fix": {},
}
RUN: dict[str, Any] = {
    "path": "results/program/1",
    "status": "completed",
    "error": None,
    "metrics": [{"name": name, "estimate": 0.123456, "interval": None, **METRIC} for name in ("one", "two", "three")],
    "warnings": ["noisy"],
    "findings": {"headline": "a headline", "findings": [FINDING]},
    "profile": {"ranks": [{"modules": [{"path": f"layer.{number}", "own": number} for number in range(2000)]}]},
}
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inside: st.lists(inside, max_size=20) | st.dictionaries(st.text(), inside, max_size=20),
    max_leaves=60,
)


def answer(value: Any, part: str = "", first: int = 0) -> Any:
    text = written(value, "ask for more", part, first)
    assert len(text) <= MOST
    return json.loads(text)


def test_what_to_change_and_where_comes_first() -> None:
    found = answer(of_runs({"runs": [RUN]}))
    assert list(found)[:3] == ["findings", "warnings", "metrics"]
    assert list(found["findings"]) == ["headline", "findings"]
    assert list(found["findings"]["findings"][0].items())[:2] == [("title", "a title"), ("code", "f() at train.py:3")]


def test_what_is_unknown_is_left_out_and_numbers_are_rounded_after_their_decimal_point() -> None:
    value: dict[str, Any] = {
        "a": None,
        "b": [],
        "c": "",
        "d": {},
        "e": 0,
        "f": False,
        "g": 0.123456,
        "h": 1795523385.66,
        "i": 2.5e-9,
    }
    assert answer(value) == {"e": 0, "f": False, "g": 0.1235, "h": 1795523386, "i": 2.5e-9}


def test_what_does_not_fit_is_named_and_can_be_asked_for_to_its_end() -> None:
    found = answer(of_runs({"runs": [RUN]}))
    assert found["more"] == "ask for more"
    assert set(found["omitted"]) == {"profile.ranks.0.modules"}
    modules: list[Any] = []
    while len(modules) < 2000:
        got = answer(of_runs({"runs": [RUN]}), "profile.ranks.0.modules", len(modules))
        assert got["value"]
        modules += got["value"]
        if "omitted" in got:
            assert got["omitted"]["profile.ranks.0.modules"].startswith(f"items from {len(modules)} to 1999, ")
    assert modules == RUN["profile"]["ranks"][0]["modules"]


def test_large_values_do_not_push_out_the_small_ones_after_them() -> None:
    found = answer({"findings": ["x" * 300] * 100, "other": ["y" * 300] * 100, "path": "here", "status": "completed"})
    assert len(found["findings"]) > len(found["other"]) > 0
    assert (found["path"], found["status"]) == ("here", "completed")


def test_a_long_text_is_cut() -> None:
    found = answer({"error": "x" * 100_000, "path": "here"})
    assert found["error"].endswith("x…")
    assert found["path"] == "here"


def test_a_name_that_is_no_text_arrives_as_it_is() -> None:
    written({"name": "photo\udc80"}, "more").encode()
    assert answer({"name": "photo\udc80"}) == {"name": "photo\udc80"}


@given(values)
def test_no_answer_is_longer_than_it_may_be(value: Any) -> None:
    answer([value] * 50)
    answer({"findings": value, **{str(number): value for number in range(30)}})


def test_a_part_may_be_a_key_with_dots() -> None:
    value = {"settings": {"data.workers": {"a.b": 1}}}
    assert answer(value, "settings.data.workers.a.b") == {"part": "settings.data.workers.a.b", "value": 1}


@pytest.mark.parametrize(
    ("part", "hint"),
    [
        ("nothing", "its parts are findings, warnings, metrics, path, status, profile"),
        ("metrics.3", "its items are 0 to 2"),
        ("metrics.-1", "its items are 0 to 2"),
        (f"metrics.{'9' * 5000}", "its items are 0 to 2"),
        ("path.x", "it has no parts"),
    ],
)
def test_a_part_that_there_is_not_is_refused_with_those_that_there_are(part: str, hint: str) -> None:
    with pytest.raises(UsageError, match="there is no part") as error:
        answer(of_runs({"runs": [RUN]}), part)
    assert error.value.hint == hint


def test_the_work_for_a_part_grows_no_faster_than_its_length() -> None:
    with pytest.raises(UsageError, match="'a' is not there"):  # a million words, whose beginnings are a terabyte
        written({"a": {"a.a": [1]}}, "", "a." * 1_000_000 + "b", 0)


def test_of_two_runs_the_comparison_comes_first_and_of_each_run_what_leads() -> None:
    found = answer(of_runs({"schema_version": 4, "comparisons": [{"verdicts": ["v"]}], "runs": [RUN, RUN]}))
    assert list(found) == ["comparisons", "runs"]
    assert [one["name"] for one in found["runs"][0]["metrics"]] == ["one", "two"]
    assert "profile" not in found["runs"][1]


def test_a_listed_run_and_a_shown_one_have_the_names_of_the_command_line(
    command_line: CommandLine, finished_run: Path
) -> None:
    results = ("--results", str(finished_run.parents[1]), "--json")
    (listed,) = answer(of_listing(json.loads(command_line("runs", *results).stdout)))["runs"]
    assert (listed["path"], listed["name"], listed["status"]) == (str(finished_run), "tiny-run", "completed")
    assert list(listed["metrics"]) == ["throughput", "token_throughput"]  # of a language model
    shown = answer(of_shown(json.loads(command_line("runs", "show", str(finished_run), *results).stdout)))
    assert {key: shown[key] for key in listed} | {"metrics": listed["metrics"]} == listed
    assert shown["metrics"][0]["name"] == "throughput"
    assert shown["metrics"][0]["estimate"] == listed["metrics"]["throughput"]["estimate"]
