"""The passes of a server of language models."""

import re

import pytest
from traces_made import Record, made, slice_, work

from gpubench.trace.analyse import analyse

LENGTHS = [90, 20, 19, 18, 20]


def notes_of(names: list[str]) -> str:
    events: list[Record] = []
    start = 0
    for name, length in zip(names, LENGTHS, strict=False):
        events += [slice_(name, start, start + length - 2, cat="user_annotation"), work("gemm", start + 1, start + 5)]
        start += length
    events.append(work("gemm", start - 1, start))
    return " ".join(analyse([made(events)]).ranks[0].notes)


@pytest.mark.parametrize(
    "names",
    [
        ["execute_model"] * 5,
        ["execute_new_1_cached_0", *["execute_new_0_cached_1"] * 4],
        ["execute_context_1(512)_generation_0(0)", *["execute_context_0(0)_generation_1(1)"] * 4],
        ["step[EXTEND bs=1 toks=512]", *["step[DECODE bs=1]"] * 4],
        [
            "[Executor] _forward_step 1: 1 ctx reqs, 0 gen reqs",
            *["[Executor] _forward_step 2: 0 ctx reqs, 1 gen reqs"] * 4,
        ],
    ],
    ids=["vllm 0", "vllm 0.8", "vllm 1", "sglang", "tensorrt"],
)
def test_prefill_and_decode_have_their_times(names: list[str]) -> None:
    said = (
        r"a server of language models: 1 prefill of 90(\.0)? us and "
        r"4 decodes of 18 us to 20(\.0)? us \(median 19\.5 us\)"
    )
    assert re.search(said, notes_of(names))


def test_steps_of_one_length_are_not_said_to_read_a_prompt() -> None:
    said = notes_of(["", *["execute_model"] * 4])
    assert "4 steps of 18 us to" in said
    assert "decode" not in said


def test_a_single_pass_or_a_program_that_serves_nothing_has_no_passes() -> None:
    assert "server" not in notes_of(["execute_model"])
    assert "server" not in notes_of(["execute_modelling", "forward", "run", "step 1", "step 2"])
