"""Findings that name functions and lines of the program, from samples and calls of its own code."""

from typing import Any

import pytest
from cases_made import PERCENT, STEPS, case, cpu, gpu, only, operator, python, stretch, training, wait

from gpubench.diagnosis.case import ProfileCase
from gpubench.diagnosis.rules import diagnose
from gpubench.findings import Finding
from gpubench.sampled import Sampled, SampledCode, SampledFunction, SeenCall

NONE = Sampled(0, 0, 0, [])


def function(samples: int, **parts: Any) -> SampledFunction:
    usual: dict[str, Any] = {
        "phase": "data_wait", "file": "data.py", "function": "augment", "first_line": 14, "line": 17,
        "on_line": samples, "source": "out[y, x] = pixel", "within": "",
    }  # fmt: skip
    return SampledFunction(samples=samples, **usual | parts)


def main(*functions: SampledFunction, samples: int = 1000) -> SampledCode:
    return SampledCode(Sampled(0, samples, 0, list(functions)), NONE)


def workers(*functions: SampledFunction, samples: int, waiting: int, processes: int = 2) -> SampledCode:
    return SampledCode(main(function(900)).main, Sampled(processes, samples, waiting, list(functions)))


def call(kind: Any, **parts: Any) -> SeenCall:
    usual: dict[str, Any] = {
        "name": "item", "phase": "other", "file": "train.py", "function": "train", "line": 31, "calls": 1,
        "source": "print(loss.item())", "within": "",
    }  # fmt: skip
    return SeenCall(kind=kind, **usual | parts)


def calling(*calls: SeenCall) -> SampledCode:
    return SampledCode(NONE, NONE, list(calls))


def waiting(code: SampledCode | None, cores: int = 8, **settings: Any) -> ProfileCase:
    return case(
        gpu(idle={"data_loader": 30 * PERCENT}, code=code),
        settings=training(**settings),
        environment={"cpu.usable_cores": cores},
        metrics={"step_time": 0.1, "phase_data_wait": 0.051},
    )


def finding(of: ProfileCase, rule: str) -> Finding:
    return next(one for one in diagnose(of).findings if one.id == rule)


def test_a_loader_without_workers_is_slow_because_of_a_function_of_the_program() -> None:
    code = main(function(465), function(20, function="read"), function(15, file="", function="collate"))
    found = only(waiting(code, data__workers=0))
    assert found.evidence[0] == (
        "a step without the profiler takes 100 ms and waits 51.0 % of it for its batches; 93.0 % of the time in which "
        "batches are made is in augment at data.py:14"
    )
    assert found.evidence[1] == (
        "93.0 % of the time in which batches are made is in augment at data.py:14 (465 of 500 samples), line "
        "17: out[y, x] = pixel"
    )
    assert not any("read" in one for one in found.evidence), "it has 4 % of the samples"
    assert "or make augment at data.py:14 faster" in found.advice
    assert found.fix == {"data.workers": 3}


def test_workers_that_have_little_to_do_are_not_given_more_of_them() -> None:
    idle = workers(function(15), samples=400, waiting=380)
    found = only(waiting(idle, data__workers=2))
    assert found.evidence[0].startswith("95.0 % of the workers' time is spent waiting")
    assert "num_workers=0" in found.advice
    assert found.fix == {"data.workers": 0}
    busy = only(waiting(workers(function(15), samples=400, waiting=300), data__workers=2))
    assert busy.fix.get("data.workers") != 0


def test_the_function_that_takes_the_time_is_the_first_that_is_said_of_python() -> None:
    slept = python(stretch(60 * PERCENT, phase="other"))
    own = function(800, phase="other", function="log")
    rank = cpu(host={"python": 60 * PERCENT}, python=slept, code=main(own))
    found = only(case(rank, settings=training()))
    assert found.id == "python-bound"
    assert "is in log at" in found.evidence[0]


def test_the_time_of_workers_is_that_in_which_they_make_batches() -> None:
    code = workers(function(90, on_line=60), samples=400, waiting=300)
    found = only(waiting(code, data__workers=2))
    assert "90.0 % of the time in which the 2 workers make batches is in augment" in found.evidence[0]
    assert "(90 of 100 samples), 67 % of it in line 17" in found.evidence[1]
    assert "75.0 % of the workers' time is spent waiting for the next batch to make" in found.evidence


def test_where_no_core_is_left_the_advice_is_the_function() -> None:
    code = workers(function(90), samples=100, waiting=0)
    found = only(waiting(code, cores=2, data__workers=2))
    assert (found.id, found.fix) == ("data-loading", {})
    assert found.advice.startswith("make augment at data.py:14 faster")


def test_what_waits_for_workers_is_no_function_that_makes_batches() -> None:
    code = main(function(900, file="train.py", function="train"))
    (first, *_) = only(waiting(code, data__workers=2)).evidence
    assert first == "a step without the profiler takes 100 ms and waits 51.0 % of it for its batches"


def test_few_samples_name_nothing() -> None:
    for code in (main(function(9)), main(function(4), function(4), function(4)), None):
        (first, *_) = only(waiting(code, data__workers=0)).evidence
        assert first.endswith("for its batches")


def test_a_library_that_makes_batches_is_named_but_needs_no_change() -> None:
    code = main(function(100, file="", function="torchvision.transforms.functional.resize", line=0, source=""))
    found = only(waiting(code, data__workers=0))
    assert "is in torchvision.transforms.functional.resize (100 of 100 samples)" in found.evidence[1]
    assert "faster" not in found.advice


def test_slow_python_in_the_loop_is_named() -> None:
    metric = function(300, phase="other", file="train.py", function="<module>", line=40, source="best = row[i]")
    code = main(metric, function(500, phase="backward"))
    rank = cpu(python=python(stretch(30 * PERCENT, phase="other")), host={"python": 40 * PERCENT}, code=code)
    found = finding(case(rank, settings=training()), "python-bound")
    named = [one for one in found.evidence if "samples" in one]
    assert named == [
        "30.0 % of the steps is in the module's own code at train.py:14 (300 of 1,000 samples), line 40: best = row[i]"
    ]


def test_a_wait_is_said_to_be_read_by_the_lines_of_its_own_phase() -> None:
    waits = [wait("aten::item", blocked=5 * PERCENT, idle=5 * PERCENT, calls=STEPS, phase="data_wait")]
    code = calling(
        call("read", phase="data_wait", file="data.py", line=11), call("read", phase="other", file="train.py", line=28)
    )
    (first, *others) = finding(case(gpu(synchronisations=waits, code=code), settings={}), "synchronisation").evidence
    assert first.endswith("; read by data.py:11 item")
    assert any(one.startswith("train.py:28") for one in others), "the other line is named with its own calls"


def test_reads_are_said_to_be_in_the_phases_in_which_the_program_was_seen_to_read() -> None:
    waits = [wait("aten::item", call="", blocked=5 * PERCENT, calls=STEPS, phase="forward")]
    code = calling(call("read", phase="evaluation"), call("read", phase="other", line=40))
    (first, *_) = finding(case(cpu(synchronisations=waits, code=code), settings={}), "synchronisation").evidence
    assert first.startswith("aten::item in evaluation and other: 1 time a step, 5 ms a step (5 %); read by train.py")


def test_the_lines_that_read_values_are_named_and_nothing_is_asked_for() -> None:
    waits = [wait("aten::item", blocked=5 * PERCENT, idle=5 * PERCENT, calls=STEPS)]
    code = calling(call("read"), call("softmax"))
    known = case(gpu(synchronisations=waits, code=code, missing={"stacks": "with_stack"}), settings={})
    found = diagnose(known)
    (one,) = [one for one in found.findings if one.id == "synchronisation"]
    assert one.evidence[0].endswith("; read by train.py:31 item")
    assert one.evidence[-1] == "train.py:31 in train calls item 1 time a step: print(loss.item())"
    assert not [each for each in found.unanswered if each.id == "synchronisation"]


@pytest.mark.parametrize(
    ("name", "types", "is_slow"),
    [
        ("aten::_slow_conv2d_forward", ["bf16"], True),
        ("aten::_slow_conv2d_forward", None, True),
        ("aten::addmm", [], True),
        ("aten::convolution_backward", ["fp16"], True),
        ("aten::addmm", ["bf16"], False),
        ("aten::addmm", None, False),
    ],
)
def test_products_in_a_type_that_the_cpu_does_not_compute_in_go_back_to_fp32(
    name: str, types: list[str] | None, is_slow: bool
) -> None:
    one = operator(name, 0, host=40 * PERCENT, dtype="bfloat16", shapes="[8, 32] [32, 10]")
    rank = cpu(
        operators=[one, operator("aten::relu", 0, host=20 * PERCENT, dtype="bfloat16")],
        code=calling(call("autocast", name="torch.autocast", line=9, source="with torch.autocast('cpu'):")),
    )
    environment = {} if types is None else {"cpu.reduced_types": types}
    found = diagnose(case(rank, settings=training(precision="bf16"), environment=environment)).findings
    slow = [one for one in found if one.id == "slow-reduced-type"]
    assert bool(slow) is is_slow
    if slow:
        assert slow[0].severity == "high"
        assert slow[0].fix == {"precision": "fp32"}
        assert "(60.0 %)" in slow[0].evidence[0]
        assert (
            slow[0].evidence[-1]
            == "train.py:9 in train calls torch.autocast 1 time a step: with torch.autocast('cpu'):"
        )
    assert not [one for one in diagnose(case(cpu(operators=[one]), environment=environment)).findings if one.fix]


def test_a_slow_convolution_in_float64_is_one_of_its_products() -> None:
    rank = cpu(operators=[operator("aten::_slow_conv2d_forward", 0, host=40 * PERCENT, dtype="float64")])
    assert finding(case(rank, settings=training()), "float64")


def test_what_makes_a_model_compute_in_float64_is_named() -> None:
    rank = cpu(
        operators=[operator("aten::mm", 0, host=40 * PERCENT, dtype="float64")],
        code=calling(
            call("float64", name="Module.double", phase="set-up", line=9, source="model.double()"),
            call("float64", name="as_tensor", phase="data_wait", file="", function="collate", line=0, source=""),
        ),
    )
    found = finding(case(rank, settings=training()), "float64")
    assert found.evidence[-2:] == [
        "train.py:9 in train calls Module.double: model.double()",
        "to make a batch, collate calls as_tensor 1 time a step",
    ]
