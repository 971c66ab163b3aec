from typing import Any

import msgspec
import pytest
from allocation_logs_made import adamw, histories, with_readings
from footprints_made import GIB, MIB, of_phases, of_snapshot, on_cpu, phase, predicted
from hypothesis import given
from hypothesis import strategies as st
from traces_made import PUBLIC

from gpubench.diagnosis.rules import advise
from gpubench.findings import Finding, Findings, Saving
from gpubench.kinds.memory.settings import MemorySettings
from gpubench.kinds.memory.worker.predict import with_prediction
from gpubench.memory.allocation_log import Phase
from gpubench.memory.allocator import Rules
from gpubench.memory.analysis import footprint
from gpubench.memory.footprint import OTHERS, Amounts, Footprint, Holder, Level, ModuleFootprint
from gpubench.memory.from_trace import of_trace_file
from gpubench.memory.libraries import HANDLES, blas_workspace
from gpubench.memory.snapshot import of_snapshot as of_snapshot_file
from gpubench.settings.keys import flatten
from gpubench.settings.loading import apply_overrides

public = pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")

PASSES: tuple[Phase, ...] = ("forward", "loss", "backward")
ELSEWHERE: tuple[Phase, ...] = ("data", "optimizer", "zero_grad")
TOTAL = 100 * GIB


def settings(**overrides: Any) -> dict[str, Any]:
    """As a run has them whose gaps are filled. overrides: training__batch_size=3."""
    usual = {"training.batch_size": 16, "precision": "bf16"}
    given = {name.replace("__", "."): value for name, value in overrides.items()}
    chosen = apply_overrides(MemorySettings(), usual | given)
    return flatten(chosen.model_dump(mode="json"))


def at_peak(name: Phase, *holders: Holder, **parts: Any) -> Footprint:
    """Of 100 GiB at its peak in a phase. parts: GiB by category, which `other` fills up; or fields of the footprint."""
    fields = {key: parts.pop(key) for key in list(parts) if key in Footprint.__struct_fields__}
    amounts: Amounts = {category: round(size * GIB) for category, size in parts.items()}
    for one in holders:
        amounts[one.category] = amounts.get(one.category, 0) + one.size
    amounts["other"] = TOTAL - sum(amounts.values())
    phases = [phase("steady", name, amounts)]
    usual = {"holders": list(holders), "modules": []}
    return of_phases(predicted(), phases, "steady", name, **usual | fields)


def held(category: str, size: float, operator: str = "", shape: str = "", count: int = 1, module: str = "") -> Holder:
    """size: in GiB."""
    return Holder(category, module, operator, shape, "", count, round(size * GIB))


def ids(footprint: Footprint, known: dict[str, Any] | None = None) -> set[str]:
    return {finding.id for finding in advise(footprint, known).findings}


def found(footprint: Footprint, id_: str, known: dict[str, Any] | None = None) -> Finding:
    return next(finding for finding in advise(footprint, known).findings if finding.id == id_)


def missing(findings: Findings) -> dict[str, str]:
    return {one.id: one.needs for one in findings.unanswered}


# Activations


@pytest.mark.parametrize("name", PASSES)
def test_activations_that_are_a_quarter_of_the_peak_can_be_computed_again(name: Phase) -> None:
    finding = found(at_peak(name, activations=25), "activations-kept", settings())
    assert finding.fix == {"model.activation_checkpointing": True}
    assert any("25 GiB (25.0 %)" in line for line in finding.evidence)
    assert "a third more compute" in finding.advice
    assert not ids(at_peak(name, activations=24.99), settings())


@pytest.mark.parametrize("name", ELSEWHERE)
def test_activations_are_not_to_blame_for_a_peak_outside_of_the_passes(name: Phase) -> None:
    assert ids(at_peak(name, activations=60), settings(precision="fp32")) == set()


def test_activations_that_are_computed_again_already_are_not_advised_on_but_their_batch_is() -> None:
    some = settings(model__activation_checkpointing=2)
    assert found(at_peak("backward", activations=40), "activations-kept", some).fix == {
        "model.activation_checkpointing": True
    }
    known = settings(model__activation_checkpointing=True)
    assert ids(at_peak("backward", activations=40), known) == {"micro-batch"}


def test_somebody_elses_program_gets_words_and_no_overrides() -> None:
    findings = advise(at_peak("backward", activations=40, fragmentation=10, optimizer_state=30), None).findings
    assert {finding.id for finding in findings} == {
        "activations-kept", "micro-batch", "fragmentation", "optimizer-state",
    }  # fmt: skip
    assert all(finding.fix == {} and finding.advice for finding in findings)


def test_a_backward_pass_is_told_of_only_where_one_is_known() -> None:
    """A snapshot of inference without inference_mode keeps activations too, and one of training may end before it."""
    passes = found(at_peak("backward", activations=40), "activations-kept", None)
    assert "backward pass reaches it" in passes.cause
    assert "inference" not in passes.advice
    forward = at_peak("forward", activations=40)
    kept, batch = found(forward, "activations-kept", None), found(forward, "micro-batch", None)
    assert "the backward pass" not in kept.title + kept.cause + batch.cause
    assert "torch.inference_mode()" in kept.advice
    assert ", in training, double the passes" in batch.advice


def test_what_checkpointing_leaves_is_not_counted_for_it() -> None:
    """The loss's own tensors lie in no block."""
    loss = held("activations", 20, "aten::_log_softmax", "float32[16384, 50257]")
    assert ids(at_peak("loss", loss, activations=20), settings()) == {"micro-batch", "logits"}
    assert ids(at_peak("loss", loss, activations=25), settings()) == {"activations-kept", "micro-batch", "logits"}


def test_the_blocks_that_hold_most_are_named_with_what_they_hold() -> None:
    modules = [
        *(ModuleFootprint(f"model.h.{number}.mlp", {"activations": (2 + number) * GIB}) for number in range(4)),
        *(ModuleFootprint(f"model.h.{number}.attn.1", {"activations": GIB}) for number in range(4)),
        ModuleFootprint("head", {"activations": 6 * GIB, "parameters": 30 * GIB}),
        ModuleFootprint("norm", {"activations": GIB}),
        ModuleFootprint("", {"activations": 9 * GIB}),
        ModuleFootprint(OTHERS, {"activations": 9 * GIB}),
    ]
    evidence = found(at_peak("forward", activations=45, modules=modules), "activations-kept").evidence
    assert "the 4 members of model.h hold 18 GiB (18.0 %), model.h.3 most with 6 GiB" in evidence
    assert "head holds 6 GiB (6 %)" in evidence
    assert len(evidence) == 3  # the norm is left to the table


def test_a_sequential_models_members_have_no_name_but_a_number() -> None:
    modules = [ModuleFootprint(str(number), {"activations": 10 * GIB}) for number in range(3)]
    evidence = found(at_peak("forward", activations=30, modules=modules), "activations-kept").evidence
    assert "the 3 members hold 30 GiB (30.0 %), 0 most with 10 GiB" in evidence


def test_a_name_that_ends_in_a_digit_is_no_member_of_a_list() -> None:
    modules = [ModuleFootprint(path, {"activations": 12 * GIB}) for path in ("conv1", "layer1.0.conv1", "layer1.1.bn2")]
    evidence = found(at_peak("forward", activations=36, modules=modules), "activations-kept").evidence
    assert evidence[1:] == [
        "the 2 members of layer1 hold 24 GiB (24.0 %), layer1.0 most with 12 GiB", "conv1 holds 12 GiB (12.0 %)",
    ]  # fmt: skip


def test_what_blocks_repeat_is_named_once() -> None:
    holders = [held("activations", 3, "aten::tanh", "float32[8, 8]", module=f"h.{number}") for number in range(9)]
    other = held("activations", 2, "aten::mul", "float32[8, 8]", module="h.0")
    evidence = found(at_peak("forward", *holders, other), "activations-kept").evidence
    assert evidence[1:] == ["aten::tanh float32[8, 8] in h.0: 3 GiB", "aten::mul float32[8, 8] in h.0: 2 GiB"]


def test_half_the_batch_in_twice_as_many_passes_is_the_same_step() -> None:
    known = settings(training__batch_size=6, training__grad_accumulation=4)
    fix = found(at_peak("loss", activations=30), "micro-batch", known).fix
    assert fix == {"training.batch_size": 3, "training.grad_accumulation": 8}
    assert fix["training.batch_size"] * fix["training.grad_accumulation"] == 6 * 4


def test_an_odd_batch_cannot_be_halved_and_one_sample_cannot_be_split() -> None:
    many = at_peak("loss", activations=30)
    assert found(many, "micro-batch", settings(training__batch_size=3)).fix == {}
    assert "micro-batch" not in ids(many, settings(training__batch_size=1))


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_activations_of_four_bytes_may_have_two(precision: str) -> None:
    wide = settings(precision=precision)
    assert found(at_peak("backward", activations=25), "wide-activations", wide).fix == {"precision": "bf16"}
    assert "wide-activations" not in ids(at_peak("backward", activations=24.99), wide)


@pytest.mark.parametrize("precision", ["bf16", "amp"])
def test_activations_of_two_bytes_are_narrow_enough(precision: str) -> None:
    assert "wide-activations" not in ids(at_peak("backward", activations=60), settings(precision=precision))


@pytest.mark.parametrize(
    ("device", "narrow"),
    [("t4", "amp"), ("v100s", "amp"), ("Tesla T4", "amp"), ("a100-80gb", "bf16"), ("mi300x", "bf16"), ("cpu", "bf16"),
     (None, "bf16")],
)  # fmt: skip
def test_bfloat16_is_proposed_where_the_device_has_it(device: str | None, narrow: str) -> None:
    footprint = at_peak("backward", activations=40, device=device)
    assert found(footprint, "wide-activations", settings(precision="fp32")).fix == {"precision": narrow}


def test_inputs_are_small_unless_several_batches_are_held() -> None:
    several = at_peak("forward", held("inputs", 10, shape="float32[64, 3, 224, 224]", count=4))
    assert "float32[64, 3, 224, 224]: 10 GiB in 4 pieces" in found(several, "inputs").evidence
    assert "data.source=synthetic keeps up to 4 batches on the device" in found(several, "inputs", settings()).evidence
    assert ids(at_peak("forward", inputs=9.99)) == set()


# Operators


def test_logits_are_told_with_tokens_and_vocabulary() -> None:
    loss = held("activations", 6, "aten::_log_softmax", "float32[16384, 50257]")
    back = held("temporaries", 9, "aten::nll_loss_backward", "float32[16384, 50257]", count=3)
    finding = found(at_peak("backward", back, loss), "logits")
    assert "cross entropy and its inputs hold 15 GiB (15.0 %) at the peak in the backward pass" in finding.evidence
    assert "16,384 tokens x a vocabulary of 50,257: up to 6 GiB each time" in finding.evidence
    assert finding.fix == {}


def test_logits_below_a_seventh_of_the_peak_and_in_other_phases_are_let_be() -> None:
    loss = held("activations", 14.9, "aten::_log_softmax", "float32[16384, 50257]")
    assert ids(at_peak("backward", loss)) == set()
    assert ids(at_peak("optimizer", held("activations", 60, loss.operator, loss.shape))) == set()


def test_what_goes_into_the_loss_is_known_by_its_shape() -> None:
    loss = held("activations", 10, "aten::_log_softmax", "float32[1023, 50257]")
    head = held("activations", 5, "aten::mm", "bfloat16[1, 1024, 50257]")
    weight = held("parameters", 20, "aten::empty", "float32[1024, 50257]")
    bias = held("activations", 20, "aten::add", "float32[50257]")
    other = held("activations", 20, "aten::mm", "bfloat16[1024, 768]")
    evidence = found(at_peak("loss", head, loss, weight, bias, other), "logits").evidence
    assert "hold 15 GiB" in evidence[0]
    assert "1,023 tokens x a vocabulary of 50,257: up to 10 GiB each time" in evidence


def test_a_loss_of_pixels_has_no_table_of_tokens() -> None:
    evidence = found(
        at_peak("loss", held("activations", 20, "aten::_log_softmax", "float32[8, 21, 512, 512]")), "logits"
    ).evidence
    assert "up to 20 GiB each time" in evidence


def test_attention_that_writes_out_its_matrix_is_told_with_its_length() -> None:
    soft = held("activations", 6, "aten::_softmax", "float32[16, 12, 1024, 1024]", count=12)
    cast = held("activations", 4, "aten::_to_copy", "bfloat16[16, 12, 1024, 1024]", count=12)
    values = held("activations", 9, "aten::bmm", "bfloat16[192, 1024, 64]", count=12)
    finding = found(at_peak("forward", soft, cast, values), "attention-matrix")
    assert finding.evidence[0].startswith("matrices of up to 1,024 x 1,024 tokens hold 10 GiB (10.0 %)")
    assert "scaled_dot_product_attention" in finding.advice
    assert 'attn_implementation="sdpa"' in finding.advice


@pytest.mark.parametrize(
    ("operator", "shape"),
    [
        ("aten::_softmax", "float32[192, 1024, 64]"),  # of classes
        ("aten::_softmax", "float32[1024, 1024]"),  # as many rows as classes
        ("aten::bmm", "float32[16, 768, 768]"),  # without a softmax
        ("aten::_log_softmax", "float32[8, 21, 512, 512]"),
    ],
)
def test_what_is_no_matrix_of_attention_is_not_taken_for_one(operator: str, shape: str) -> None:
    assert "attention-matrix" not in ids(at_peak("forward", held("activations", 20, operator, shape)))


def test_a_small_matrix_of_attention_is_let_be_and_so_is_one_elsewhere() -> None:
    shape = "float32[16, 12, 1024, 1024]"
    assert ids(at_peak("forward", held("activations", 9.9, "aten::_softmax", shape))) == set()
    assert ids(at_peak("optimizer", held("activations", 60, "aten::_softmax", shape))) == set()


# The model and its optimizer


def foreach(size: float, elsewhere: float = 10, name: Phase = "optimizer") -> Footprint:
    """Temporaries beside 20 GiB of parameters, and GiB in another phase."""
    made = at_peak(name, held("temporaries", size, "aten::_foreach_sqrt", "float32[768, 768]"), parameters=20)
    other = phase("steady", "backward", {"parameters": round(elsewhere * GIB)})
    return msgspec.structs.replace(made, phases=[other, *made.phases])


def test_foreach_temporaries_at_the_peak_are_what_fusing_saves() -> None:
    finding = found(foreach(5), "foreach-temporaries", settings(training__optimizer_impl="foreach"))
    assert finding.fix == {"training.optimizer_impl": "fused"}
    assert finding.expected == Saving(5 * GIB / TOTAL)
    assert ids(foreach(4.99), settings()) == set()


def test_foreach_temporaries_are_silent_where_the_peak_lies_elsewhere() -> None:
    assert ids(foreach(20, name="backward"), settings()) == set()


def test_fusing_saves_no_more_than_down_to_the_next_peak() -> None:
    finding = found(foreach(20, elsewhere=32), "foreach-temporaries")
    assert finding.expected == Saving(8 * GIB / TOTAL)
    assert "without them the peak would be in the backward pass, 32 GiB" in finding.evidence


def test_temporaries_of_a_loop_are_not_foreachs() -> None:
    assert ids(at_peak("optimizer", held("temporaries", 20, "aten::sqrt", "float32[768, 768]"))) == set()


MODEL = {
    "optimizer-state": ("optimizer_state", 30.0),
    "gradients": ("gradients", 20.0),
    "parameters": ("parameters", 30.0),
}


@pytest.mark.parametrize("name", [*PASSES, "optimizer"])
@pytest.mark.parametrize("id_", MODEL)
def test_what_grows_with_the_model_is_told_from_its_threshold_on(id_: str, name: Phase) -> None:
    category, share = MODEL[id_]
    assert ids(at_peak(name, **{category: share}), settings()) == {id_}
    assert ids(at_peak(name, **{category: share - 0.01}), settings()) == set()


@pytest.mark.parametrize("id_", MODEL)
def test_ranks_that_each_have_all_of_it_may_share_it(id_: str) -> None:
    category, share = MODEL[id_]
    large = at_peak("optimizer", **{category: share})
    finding = found(large, id_, settings(distributed__world_size=8))
    assert finding.fix == {"distributed.strategy": "fsdp2"}
    assert "each of 8 ranks has all of it" in finding.evidence
    assert "FSDP2" in finding.advice
    assert found(large, id_, settings()).fix == {}
    assert found(large, id_, settings(distributed__world_size=8, distributed__strategy="fsdp2")).fix == {}
    assert found(large, id_, None).fix == {}


def test_one_fix_is_proposed_once_by_what_it_frees_most_of() -> None:
    many = at_peak("optimizer", optimizer_state=40, gradients=25, parameters=30)
    findings = advise(many, settings(distributed__world_size=2)).findings
    assert [(finding.id, bool(finding.fix)) for finding in findings] == [
        ("optimizer-state", True), ("parameters", False), ("gradients", False),
    ]  # fmt: skip


def test_a_smaller_optimizer_is_smaller_than_the_one_there_is() -> None:
    large = at_peak("optimizer", optimizer_state=40, parameters=20)
    adam = found(large, "optimizer-state", settings())
    assert "SGD with momentum keeps half of Adam's" in adam.advice
    assert "that is 2 times the parameters" in adam.evidence
    sgd = found(large, "optimizer-state", settings(training__optimizer="sgd"))
    assert sgd.advice == "use SGD with momentum 0, which keeps no state"


def test_gradients_that_outlive_the_step_are_to_be_dropped_unless_they_accumulate() -> None:
    assert "set_to_none=True" in found(at_peak("forward", gradients=25), "gradients").advice
    accumulating = settings(training__grad_accumulation=4)
    finding = found(at_peak("forward", gradients=25), "gradients", accumulating)
    assert "4 passes accumulate into them" in finding.evidence
    assert "set_to_none" not in finding.advice
    assert "register_post_accumulate_grad_hook" in found(at_peak("backward", gradients=25), "gradients").advice


def test_gradients_that_are_copies_of_the_buckets_of_ddp_may_be_views_of_them() -> None:
    large = at_peak("optimizer", gradients=25)
    copies = {"distributed.gradient_as_bucket_view": False}
    assert found(large, "gradients", copies).fix == {"distributed.gradient_as_bucket_view": True}
    assert found(large, "gradients", {"distributed.gradient_as_bucket_view": True}).fix == {}


# Below the tensors


def test_memory_that_no_tensor_is_in_may_be_avoided_by_segments_that_grow() -> None:
    finding = found(at_peak("backward", fragmentation=5), "fragmentation", settings())
    assert finding.fix == {"performance.expandable_segments": True}
    assert "expandable_segments:True" in finding.advice
    assert ids(at_peak("backward", fragmentation=4.99), settings()) == set()
    assert ids(at_peak("backward", fragmentation=20), settings(performance__expandable_segments=True)) == set()


def test_nothing_is_kept_back_where_there_is_no_allocator() -> None:
    phases = [phase("first", "forward", {"fragmentation": MIB}, counted=Level(MIB, MIB, None, MIB))]
    assert ids(of_phases(on_cpu(), phases, "first", "forward")) == set()


def with_workspaces(size: int, **parts: Any) -> Footprint:
    """With as little beside them that they count."""
    phases = [phase("first", "forward", {"workspaces": size}, counted=Level(size, size, size, size))]
    return of_phases(predicted(**parts), phases, "first", "forward", holders=[], modules=[])


@pytest.mark.parametrize(
    ("size", "setting", "left"),
    [
        (HANDLES * blas_workspace((9, 0)), ":4096:2:16:8", "16.2 MiB"),
        (HANDLES * blas_workspace((8, 0)), ":16:8", "256 KiB"),
    ],
)
def test_workspaces_are_left_smaller_by_cublas_own_setting(size: int, setting: str, left: str) -> None:
    advice = found(with_workspaces(size), "workspaces").advice
    assert f"CUBLAS_WORKSPACE_CONFIG={setting} in the environment, which leaves {left} for cuBLAS" in advice
    assert "cudnn" not in advice


def test_what_cublas_cannot_have_taken_is_other_kernels() -> None:
    assert "cudnn.benchmark=False" in found(with_workspaces(GIB), "workspaces").advice


def test_amds_libraries_do_not_read_cublas_setting() -> None:
    assert ids(with_workspaces(GIB, device="mi300x")) == set()


def test_workspaces_are_told_from_a_twentieth_of_the_peak_on() -> None:
    assert ids(at_peak("forward", workspaces=5)) == {"workspaces"}
    assert ids(at_peak("forward", workspaces=4.99)) == set()


# What cannot be told


def test_a_snapshot_without_stacks_does_not_tell_the_phase_and_says_what_would() -> None:
    lacking = missing(advise(of_snapshot(), None))
    rules = {"activations-kept", "micro-batch", "logits", "attention-matrix", "foreach-temporaries"}
    assert rules <= lacking.keys()
    assert {lacking[rule] for rule in rules} == {'torch.cuda.memory._record_memory_history(stacks="python")'}


def test_a_trace_without_annotations_asks_for_them() -> None:
    assert "record_function" in missing(advise(of_snapshot(source="trace"), None))["micro-batch"]


def test_what_was_there_before_a_snapshot_may_be_the_model() -> None:
    lacking = missing(advise(of_snapshot(), None))
    assert {"parameters", "gradients", "optimizer-state"} <= lacking.keys()
    assert "max_entries" in lacking["parameters"]
    assert "max_entries" not in missing(advise(of_snapshot(truncated=False, late=True), None))["parameters"]


def test_a_snapshot_with_pythons_stacks_alone_does_not_tell_operators() -> None:
    python = at_peak("backward", held("activations", 40), source="snapshot")
    lacking = missing(advise(python, None))
    assert lacking.keys() == {"logits", "attention-matrix"}
    assert set(lacking.values()) == {'torch.cuda.memory._record_memory_history(stacks="all")'}
    optimizer = at_peak("optimizer", held("temporaries", 10), source="snapshot")
    assert missing(advise(optimizer, None)).keys() == {"foreach-temporaries"}
    assert missing(advise(at_peak("optimizer", held("temporaries", 1), source="snapshot"), None)) == {}


def test_shapes_of_attention_are_in_no_snapshot() -> None:
    all_ = at_peak("backward", held("activations", 40, "aten::_softmax"), source="snapshot")
    assert missing(advise(all_, None)) == {"attention-matrix": ""}


@public
def test_a_real_snapshot_of_a_transformer_is_full_of_activations_at_named_lines() -> None:
    (made,) = of_snapshot_file(PUBLIC / "snapshot_magma27_small.pickle")
    advised = advise(made, None)
    assert [finding.id for finding in advised.findings] == ["activations-kept", "micro-batch", "attention-matrix"]
    assert advised.findings[2].evidence[0] == "what softmax makes holds 2.26 GiB (17.1 %) at the peak in the loss"
    assert "at cs336_basics/model.py:39: 2.56 GiB in 25 pieces" in advised.findings[0].evidence
    assert missing(advised).keys() == {"logits"}  # only Python's stacks were recorded


@public
def test_a_real_trace_of_a_convolutional_model_is_full_of_activations() -> None:
    (made,) = of_trace_file(PUBLIC / "kineto_v100_resnet50_workers0.pt.trace.json.gz")
    assert [finding.id for finding in advise(made, None).findings] == ["activations-kept", "micro-batch"]


# All of them together


def test_the_most_worthwhile_comes_first_and_the_headline_is_the_footprints() -> None:
    advised = advise(at_peak("backward", activations=60, fragmentation=10, optimizer_state=30), settings())
    assert [finding.id for finding in advised.findings] == [
        "activations-kept", "micro-batch", "optimizer-state", "fragmentation",
    ]  # fmt: skip
    assert [finding.severity for finding in advised.findings] == ["high", "high", "high", "medium"]
    assert advised.headline == ""


def test_every_fix_is_one_that_the_settings_take() -> None:
    known = {
        "precision": "fp32",
        "training.batch_size": 16,
        "distributed.world_size": 2,
        "training.optimizer_impl": "foreach",
    }
    full = apply_overrides(MemorySettings(), known)
    flat = flatten(full.model_dump(mode="json"))
    places = [at_peak("backward", activations=40, fragmentation=10, gradients=20, optimizer_state=30), foreach(20)]
    fixes = [finding.fix for one in places for finding in advise(one, flat).findings if finding.fix]
    assert len(fixes) == 6
    for fix in fixes:
        changed = flatten(apply_overrides(full, fix).model_dump(mode="json"))
        assert {key: changed[key] for key in fix} == fix
        assert any(flat[key] != value for key, value in fix.items())


def needing(total: int, later: int = 0) -> Footprint:
    """Of `total` bytes in its optimizer step, and so much more that its allocator takes when that is over."""
    phases = [phase("steady", "optimizer", {"parameters": total})]
    made = of_phases(predicted(), phases, "steady", "optimizer")
    assert made.timeline.reserved is not None
    grown = [*made.timeline.reserved[:-1], total + later]
    return msgspec.structs.replace(made, timeline=msgspec.structs.replace(made.timeline, reserved=grown))


def test_a_prediction_gives_the_saving_and_what_both_need() -> None:
    before = at_peak("backward", activations=40)
    finding = found(before, "activations-kept", settings())
    told = with_prediction(finding, before, needing(TOTAL // 4))
    assert told.expected == Saving(0.75)
    assert told.evidence == [*finding.evidence, "predicted with the fix: 25 GiB; without: 100 GiB"]
    assert told.fix == finding.fix


def test_a_fix_that_raises_the_peak_has_a_negative_saving() -> None:
    before = at_peak("backward", activations=40)
    told = with_prediction(found(before, "micro-batch"), before, needing(TOTAL * 5 // 4))
    assert told.expected == Saving(-0.25)


def test_a_fix_saves_only_what_is_not_taken_when_the_peak_is_over() -> None:
    before = at_peak("backward", activations=40)
    finding = found(before, "micro-batch")
    told = with_prediction(finding, before, needing(TOTAL // 4, later=TOTAL // 4))
    assert told.expected == Saving(0.5)
    assert told.evidence[-1] == "predicted with the fix: 50 GiB; without: 100 GiB"
    nothing = with_prediction(finding, before, needing(TOTAL // 4, later=TOTAL * 3 // 4))
    assert nothing.expected == Saving(0.0)


def test_training_with_many_activations_peaks_in_the_passes_and_a_large_model_in_the_optimizer() -> None:
    def of(elements: int, activations: int) -> set[str]:
        made = footprint(adamw(elements, activations=activations), source="measured", device="cpu", capacity=None)
        return ids(made, settings(device="cpu"))

    assert of(10, 10**6) == {"activations-kept", "micro-batch"}
    assert of(10**6, 10) == {"optimizer-state"}  # 8 bytes of 20 for each element


def test_under_an_allocator_half_empty_segments_are_told_of() -> None:
    history = with_readings(adamw(6_400_000, activations=80_000_000), Rules())
    made = footprint(history, source="measured", device=None, capacity=None)
    size = made.peak.amounts["fragmentation"]
    assert size >= 0.05 * made.peak.level.total
    assert found(made, "fragmentation", settings()).severity in ("medium", "high")


@given(histories(), st.booleans(), st.booleans())
def test_whatever_happened_advice_is_sound(history: Any, kept_back: bool, known: bool) -> None:
    made = footprint(
        with_readings(history, Rules()) if kept_back else history, source="measured", device=None, capacity=None
    )
    advised = advise(made, settings(precision="fp32", distributed__world_size=2) if known else None)
    assert len({finding.id for finding in advised.findings}) == len(advised.findings)
    fixes = [finding.fix for finding in advised.findings if finding.fix]
    assert all(fixes.count(fix) == 1 for fix in fixes)
    for finding in advised.findings:
        assert finding.evidence
        assert known or not finding.fix
        assert finding.expected is None or 0 <= finding.expected.estimate <= 1
        if finding.id in ("activations-kept", "micro-batch", "wide-activations"):
            assert made.peak.phase in PASSES


def test_growth_is_a_finding_if_several_steps_keep_enough() -> None:
    def keeping(*kept: int) -> set[str]:
        base = at_peak("optimizer", parameters=10)
        return ids(msgspec.structs.replace(base, kept=list(kept)))

    least = -(-at_peak("optimizer", parameters=10).peak.level.total // 10_000)
    assert keeping(least, least + 1) == {"growth"}
    assert keeping(least - 1, least) == set()
    assert keeping(least) == set()
    assert keeping(least, 0, least) == set()


def test_a_peak_in_the_evaluation_is_a_finding_that_says_what_training_needs() -> None:
    phases = [
        phase("steady", "backward", {"parameters": 2 * GIB, "activations": GIB}),
        phase("steady", "evaluation", {"parameters": 2 * GIB, "activations": 4 * GIB, "temporaries": 2 * GIB}),
    ]
    made = of_phases(on_cpu(), phases, "steady", "evaluation")
    first = found(made, "evaluation-memory", settings(device="cpu"))
    assert first.severity == "high"
    assert first.evidence[1] == "training needs up to 3 GiB"
    assert "no_grad" in first.advice
    assert "evaluation-memory" not in ids(of_phases(on_cpu(), phases, "steady", "backward"), settings(device="cpu"))


def test_what_frees_little_is_of_low_severity_however_large_its_share_is() -> None:
    made = of_phases(
        on_cpu(), [phase("steady", "backward", {"gradients": 8 * MIB, "unknown": 16 * MIB})], "steady", "backward"
    )
    assert found(made, "gradients", settings(device="cpu")).severity == "low"
