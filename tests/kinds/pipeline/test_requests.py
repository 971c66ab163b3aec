"""Prompts and seeds: which sample is made of what, and how a list of seeds is written."""

from pathlib import Path
from typing import Any

import pytest

from gpubench.errors import SettingsError
from gpubench.kinds.pipeline import defaults
from gpubench.kinds.pipeline.requests import Requests
from gpubench.kinds.pipeline.settings import PipeSettings
from gpubench.runs.directory import IMAGE, is_sample_file
from gpubench.settings.loading import load
from gpubench.settings.seeds import seeds_of, shortest


def made_of(requests: Requests, samples: int) -> list[tuple[str | None, int]]:
    return [(requests.prompt(sample), requests.seed(sample)) for sample in range(samples)]


def test_every_prompt_is_made_with_every_seed_in_the_order_of_num_images_per_prompt() -> None:
    assert made_of(Requests(["cat", "dog"], 0, [5, 3]), 4) == [("cat", 5), ("cat", 3), ("dog", 5), ("dog", 3)]
    assert made_of(Requests([], 0, [5, 3]), 2) == [(None, 5), (None, 3)]


def test_without_a_list_every_sample_has_a_seed_of_its_own_and_prompts_take_turns() -> None:
    assert made_of(Requests(["cat", "dog"], 7), 3) == [("cat", 7), ("dog", 8), ("cat", 9)]
    assert made_of(Requests([], 7), 2) == [(None, 7), (None, 8)]


def test_a_file_names_prompt_and_seed_where_seeds_are_listed() -> None:
    assert Requests(["cat", "dog"], 0, [5, 3]).file(3, IMAGE) == "samples/00003-prompt2-seed3.png"
    assert Requests(["cat", "dog"], 0).file(3, IMAGE) == "samples/00003.png"


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("samples/00003.png", True),
        ("samples/00003-prompt2-seed3.png", True),
        ("samples/00004-prompt2-seed3.png", False),
        ("samples/00003-prompt2-seed3-prompt2-seed3.png", False),
        ("../samples/00003-prompt2-seed3.png", False),
        ("samples/00003-prompt2-seed3.png/../../secret", False),
        (None, False),
    ],
)  # fmt: skip
def test_only_a_samples_own_file_is_taken_for_it(name: str | None, right: bool) -> None:
    assert is_sample_file(name, 3, IMAGE) == right


@pytest.mark.parametrize(
    ("given", "text", "seeds"),
    [
        ("1,2,3", "1-3", [1, 2, 3]),
        ("0-7", "0-7", [*range(8)]),
        ([1, 2, 3], "1-3", [1, 2, 3]),
        (["4-6", 9], "4-6,9", [4, 5, 6, 9]),
        (" 9, 3 - 4 ", "9,3,4", [9, 3, 4]),
        (42, "42", [42]),
        (None, None, []),
    ],
)  # fmt: skip
def test_a_list_of_seeds_has_one_form_however_it_was_written(given: Any, text: str | None, seeds: list[int]) -> None:
    loaded = load(PipeSettings, None, {"seeds": given}).settings.work
    assert (loaded.seeds, loaded.seed_list) == (text, seeds)
    assert seeds_of(shortest(text)) == seeds


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("1,1", "has the seed 1 twice"),
        ("1-3,2", "has the seed 2 twice"),
        ("3-1", "1 is less than 3"),
        ("", "not a seed"),
        ([], "no seed"),
        ("-1", "not a seed"),
        ("1,,2", "not a seed"),
        ("1.5", "not a seed"),
        (True, "not a seed"),
        ("0-10000000000000", "more than 100,000 seeds"),
        (str(2**63), "too large"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_seeds_is_refused_with_the_reason(given: Any, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        load(PipeSettings, None, {"work.seeds": given})


def test_there_are_as_many_samples_as_prompts_times_seeds_and_more_are_refused(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\na dog\n")
    given = {"work.prompts": str(prompts), "work.seeds": "1-3"}
    done, reasons = defaults.complete(load(PipeSettings, None, given).settings)
    assert (done.work.samples, reasons["work.samples"]) == (6, "one for each of 2 prompts and 3 seeds")
    alone, _ = defaults.complete(load(PipeSettings, None, {"work.seeds": "1-3"}).settings)
    assert alone.work.samples == 3
    with pytest.raises(SettingsError, match=r"work\.samples=7 is more than the 6 samples of 2 prompts and 3 seeds"):
        defaults.complete(load(PipeSettings, None, given | {"work.samples": 7}).settings)
