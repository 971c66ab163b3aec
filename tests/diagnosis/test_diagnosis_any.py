"""Any profile at all: a diagnosis, never a traceback, and no saving of more than there is."""

import re
from typing import Any

import msgspec
from cases_made import (
    WALL,
    case,
    copy,
    cpu,
    gpu,
    kernel,
    launches,
    operator,
    phase,
    piping,
    python,
    stretch,
    training,
    wait,
)
from hypothesis import given
from hypothesis import strategies as st

from gpubench.diagnosis.case import ProfileCase
from gpubench.diagnosis.headline import HEADLINE_MINIMUM, IDLE_CAUSES_IN_WORDS, OF_IDLE
from gpubench.diagnosis.rules import diagnose
from gpubench.findings import Findings
from gpubench.trace.profile import CAUSES, HOST_PARTS, Collective, Compiled, Held, Profile, RankProfile, Straggler

TIMES = st.integers(0, 2 * WALL)
COUNTS = st.integers(0, 500)
PHASES = st.sampled_from(["data_wait", "host_to_device", "forward", "backward", "optimizer", "other"])
PLACES = st.sampled_from([None, "train.py:12"])

COPIES = st.builds(
    copy,
    st.sampled_from(["host_to_device", "device_to_host", "device_to_device", "dtype_cast", "layout_change", "same"]),
    pinned=st.sampled_from([None, True, False]), calls=COUNTS, host=TIMES, device=TIMES, phase=PHASES, where=PLACES,
    bytes=st.none() | COUNTS,
)  # fmt: skip
WAITS = st.builds(
    wait,
    st.sampled_from(["aten::item", "aten::copy_", "aten::nonzero", "cudaDeviceSynchronize"]),
    calls=COUNTS, blocked=TIMES, idle=TIMES, phase=PHASES, where=PLACES,
)  # fmt: skip
KERNELS = st.builds(
    kernel, st.sampled_from(["volta_sgemm_128x64_nn", "sm80_xmma", "nchwToNhwcKernel", ""]), TIMES, calls=COUNTS
)
OPERATORS = st.builds(
    operator,
    st.sampled_from(["aten::mm", "aten::addmm", "aten::convolution", "aten::zero_", "aten::_fused_adam_"]), TIMES,
    shapes=st.sampled_from(["", "[]", "[7, 9] [9, 50257]", "[9]", "[[2, 3], [4]] [5]", "[64, 30] [60, 30, 3, 3]"]),
    dtype=st.sampled_from(["", "float16", "float32", "bool"]), calls=COUNTS,
    bound=st.sampled_from(["memory", "compute", "insufficient data"]), of_ceiling=st.sampled_from([None, 0.0, 0.5, 1]),
)  # fmt: skip
PARTS = {
    "wall": st.sampled_from([0, 1, WALL]),
    "step_numbers": st.sampled_from([[], [3], [3, 4, 5]]),
    "copies": st.lists(COPIES, max_size=5),
    "synchronisations": st.lists(WAITS, max_size=5),
    "kernels": st.lists(KERNELS, max_size=4),
    "operators": st.lists(OPERATORS, max_size=5),
    "phases": st.lists(st.builds(phase, PHASES, host=TIMES, device=TIMES, recompute=TIMES), max_size=4),
    "launches": st.none()
    | st.builds(launches, calls=COUNTS, works=COUNTS, short=COUNTS, short_total=TIMES, late=COUNTS),
    "collectives": st.lists(st.builds(Collective, st.just("nccl"), COUNTS, TIMES, TIMES, st.none()), max_size=2),
    "compiled": st.none() | st.builds(Compiled, COUNTS, COUNTS, COUNTS, TIMES),
    "held": st.lists(st.builds(Held, st.sampled_from(["", "aten::mul"]), COUNTS, TIMES), max_size=2),
    "zeroed_gradients": COUNTS,
    "python": st.none()
    | st.builds(
        python,
        st.builds(stretch, TIMES, length=TIMES, phase=PHASES, where=PLACES),
        operators=COUNTS,
        operator_median=st.integers(0, 9000),
        median=st.integers(0, WALL),
    ),
    "zeroing": TIMES,
    "zeroing_idle": TIMES,
    "world_size": st.sampled_from([None, 1, 2, 8]),
    "optimizer_kernels": COUNTS,
    "optimizer_steps": COUNTS,
    "missing": st.sampled_from([{}, {"shapes": "record_shapes", "stacks": "with_stack"}]),
}
BOTH = st.booleans()
KNOWN = {
    "settings": st.sampled_from([
        None, {}, piping(), piping(precision="fp32"), training(),
        training(
            data__workers=0, training__batch_size=8, training__grad_accumulation=4, distributed__world_size=2,
            distributed__sync_gradients="each", precision="amp", training__read_loss=True, performance__cpu_threads=1,
        ),
        training(performance__compile=True, performance__cpu_threads=9, data__workers=2, precision="bf16"),
    ]),
    "environment": st.sampled_from([
        {}, {"cpu.usable_cores": 4, "gpus": []}, {"gpus": [{"compute_capability": "9.0", "memory_bytes": 8e9}]},
        {"variables.CUDA_LAUNCH_BLOCKING": "1", "threads.intra_op": 2, "cpu.usable_cores": 1},
    ]),
    "metrics": st.sampled_from([
        {}, {"step_time": 0.0, "phase_data_wait": 0.0}, {"phase_optimizer": 0.1, "starved_steps": 0.5},
        {"step_time": 0.1, "phase_data_wait": 0.1, "phase_optimizer": 0.05, "phase_exposed_communication": 0.09},
    ]),
}  # fmt: skip


@st.composite
def ranks(draw: st.DrawFn, of_gpus: st.SearchStrategy[bool]) -> RankProfile:
    parts: dict[str, Any] = {name: draw(strategy) for name, strategy in PARTS.items()}
    if draw(of_gpus):
        idle = draw(st.dictionaries(st.sampled_from(CAUSES), st.integers(0, WALL // 20)))
        return gpu(idle=idle, exposed_communication=draw(st.integers(0, WALL // 4)), **parts)
    return cpu(host=draw(st.dictionaries(st.sampled_from(HOST_PARTS), st.integers(0, WALL // 6))), **parts)


@st.composite
def cases(draw: st.DrawFn, of_gpus: st.SearchStrategy[bool] = BOTH) -> ProfileCase:
    found = draw(st.lists(ranks(of_gpus), min_size=1, max_size=3))
    stragglers = draw(st.lists(st.builds(Straggler, st.integers(0, 3), TIMES, COUNTS, COUNTS), max_size=2))
    overhead = draw(st.sampled_from([None, -0.5, 0.0, 0.3, 4.0]))
    return case(
        *found, stragglers=stragglers, overhead=overhead, **{name: draw(strategy) for name, strategy in KNOWN.items()}
    )


def check(case: ProfileCase, findings: Findings) -> None:
    assert findings.headline
    for finding in findings.findings:
        assert finding.evidence, finding.id
        assert finding.fix.keys() <= (case.settings or {}).keys()
        assert all(case.setting(key) != value for key, value in finding.fix.items()), finding.fix
        assert finding.expected is None or 0 <= finding.expected.estimate <= 1
    ids = [finding.id for finding in findings.findings]
    assert len(set(ids)) == len(ids)


@given(cases())
def test_every_profile_has_a_diagnosis(case: ProfileCase) -> None:
    check(case, diagnose(case))


@given(cases())
def test_the_headline_names_the_cause_of_the_first_finding_on_idle_time(case: ProfileCase) -> None:
    found = diagnose(case)
    causes = [OF_IDLE[one.id] for one in found.findings if one.id in OF_IDLE]
    idle = case.rank.device.idle if case.rank.device else 0
    if found.headline.startswith("GPU idle") and causes and case.rank.idle[causes[0]] >= HEADLINE_MINIMUM * idle:
        assert IDLE_CAUSES_IN_WORDS[causes[0]] in found.headline


@given(cases())
def test_nothing_is_told_of_steps_where_none_were_recorded(case: ProfileCase) -> None:
    one = msgspec.structs.replace(case.rank, step_numbers=[])
    for finding in diagnose(ProfileCase(Profile([one], []))).findings:
        told = [finding.title, finding.threshold, *finding.evidence]
        assert not [text for text in told if re.search(r"\b(the|a|every|many|each) steps?\b|in \d+ steps?\b", text)]


@given(cases(of_gpus=st.just(False)))
def test_what_runs_on_a_cpu_alone_is_told_nothing_of_a_gpu(case: ProfileCase) -> None:
    for finding in diagnose(case).findings:
        told = [finding.title, finding.cause, finding.advice]
        assert not [text for text in told if re.search(r"\bGPU\b|\bthe device\b|torch\.cuda", text)], finding.id
