"""Real programs: one before and after its loader was mended, and two that launch too slowly."""

import gzip
import json
from pathlib import Path

import pytest
from traces_made import PUBLIC, write

from gpubench.diagnosis.case import ProfileCase
from gpubench.diagnosis.rules import diagnose
from gpubench.findings import Findings
from gpubench.trace.analyse import analyse
from gpubench.trace.load import read

pytestmark = pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")


def diagnosed(name: str) -> Findings:
    return diagnose(ProfileCase(analyse([read(PUBLIC / name)])))


def test_the_loader_is_the_first_finding_before_it_is_mended() -> None:
    before = diagnosed("kineto_v100_resnet50_workers0.pt.trace.json.gz")
    assert before.headline == "GPU idle 44 %: 76 % of it waits for the data loader"
    assert before.findings[0].id == "data-loading"


def test_after_the_loader_is_mended_launches_and_pageable_copies_are_left() -> None:
    after = diagnosed("kineto_v100_resnet50_workers4.pt.trace.json.gz")
    found = [finding.id for finding in after.findings]
    assert found[:4] == ["fp32-products", "launch-bound", "memory-bound", "pinning"]
    assert "data-loading" not in found


def test_attention_in_separate_operators_is_named_with_its_share_and_sizes() -> None:
    findings = diagnosed("tracelens_h100_owlv2.json.gz")
    found = {finding.id: finding for finding in findings.findings}
    attention, odd = found["unfused-attention"], found["odd-shapes"]
    assert findings.headline.endswith("; attention in separate operators is 89 % of what it computes")
    assert "(40.7 %), 89.2 % of the time that the GPU computes" in attention.evidence[0]
    assert "16 (batch x heads) x 5185 queries x 5185 keys, head size 64, bfloat16" in attention.evidence[1]
    assert "scaled_dot_product_attention" in attention.advice
    assert "sequence length N = 5185 is not a multiple of 8" in odd.evidence[0]
    assert "vocabulary" not in odd.advice
    assert "memory-bound" not in found  # what is left of it is 2 % of the step


def test_attention_and_what_memory_bounds_are_found_from_the_names_of_kernels_alone(tmp_path: Path) -> None:
    """Without operators, shapes and properties of the device."""
    for name, expected in (
        ("tracelens_h100_owlv2.json.gz", "89.3 % of the time that the GPU computes"),
        ("tracelens_mi300_qwen.json.gz", "(43.5 %) in memory-bound work"),
    ):
        events = json.loads(gzip.decompress((PUBLIC / name).read_bytes()))["traceEvents"]
        bare = write(tmp_path / "bare.json", [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy")])
        (finding,) = diagnose(ProfileCase(analyse([read(bare)]))).findings
        assert expected in finding.evidence[0]


def test_elementwise_operators_of_a_real_program_count_though_a_third_of_them_has_no_launch() -> None:
    findings = diagnosed("tracelens_mi300_qwen.json.gz")
    found = findings.findings[0]
    assert (found.id, found.severity) == ("memory-bound", "high")
    assert "(43.1 %) in memory-bound work: elementwise 27.3 %, copies 13.9 %" in found.evidence[0]
    assert "rms_norm" in found.advice
    assert "20 % in its 24 Qwen2Attention layers" in findings.headline


def test_inference_on_a_small_model_is_bound_by_its_launches() -> None:
    findings = diagnosed("tracelens_h100_bert_small.json.gz")
    assert findings.headline == "GPU idle 93 %: 97 % of it waits for Python and launches"
    assert [finding.id for finding in findings.findings] == ["launch-bound"]


def test_a_program_that_sends_every_gradient_alone_is_told_to_join_them() -> None:
    found = {finding.id: finding for finding in diagnosed("hta_v100_ddp_rank1of2.json.gz").findings}
    assert "404 collectives a step" in found["exposed-communication"].evidence
    assert "larger buckets" in found["exposed-communication"].advice


def test_copies_to_the_host_are_no_fix_where_the_gpu_had_its_next_work() -> None:
    findings = diagnosed("hta_a100_rank0of16_alltoall.json.gz")
    assert findings.headline.startswith("GPU idle 64 %: 98 % of it comes after the launch of the next work")
    assert "device-to-host" not in {finding.id for finding in findings.findings}
    assert all(finding.expected is None or finding.expected.estimate < 0.2 for finding in findings.findings)
