import pytest
from allocation_logs_made import PHASES, Script
from hypothesis import given
from hypothesis import strategies as st

from gpubench.memory.allocation_log import Allocation, AllocationLog, Category, Phase, classify, filled, steps


def categories(history: AllocationLog) -> list[str]:
    classify(history)
    return [one.category for one in history.allocations]


def test_what_forward_hands_to_the_backward_pass_is_an_activation() -> None:
    script = Script()
    script.phase("forward", 0)
    kept, scratch = script.hold(8), script.hold(4)
    script.release(scratch)
    script.phase("backward", 0)
    script.release(kept)
    assert categories(script.log()) == ["activations", "temporaries"]


def test_what_is_given_back_between_forward_and_backward_is_temporary() -> None:
    script = Script()
    script.phase("forward", 0)
    probabilities = script.hold(8)
    script.phase("loss", 0)
    loss = script.hold(4)
    script.release(probabilities)
    script.phase("backward", 0)
    script.release(loss)
    assert categories(script.log()) == ["temporaries", "activations"]


def test_outputs_that_the_loop_still_names_in_the_next_step_are_activations() -> None:
    script = Script()
    script.phase("forward", 0)
    logits = script.hold(8)
    script.phase("backward", 0)
    script.phase("optimizer", 0)
    script.phase("forward", 1)
    script.release(logits)
    script.phase("backward", 1)
    assert categories(script.log()) == ["activations"]


def test_without_a_backward_pass_only_what_outlives_the_step_is_an_activation() -> None:
    script = Script()
    script.phase("forward", 0)
    used, result, last = script.hold(8), script.hold(2), script.hold(1)
    script.release(used)
    script.phase("data", 0)
    script.phase("forward", 1)
    script.release(result)
    assert categories(script.log()) == ["temporaries", "activations", "activations"]
    assert last.end is None


@pytest.mark.parametrize("removed_in", ["zero_grad", "forward"])
def test_gradients_are_those_wherever_they_are_removed(removed_in: Phase) -> None:
    script = Script()
    script.phase("backward", 0)
    gradient, scratch = script.hold(8), script.hold(4)
    script.release(scratch)
    script.phase("optimizer", 0)
    script.phase(removed_in, 1)
    script.release(gradient)
    assert categories(script.log()) == ["gradients", "temporaries"]


def test_what_the_backward_pass_does_again_of_forward_is_temporary() -> None:
    script = Script()
    script.phase("forward", 0)
    checkpoint = script.hold(1)
    script.phase("backward", 0)
    again = script.hold(8)
    script.release(again, checkpoint)
    script.phase("optimizer", 0)
    assert categories(script.log()) == ["activations", "temporaries"]


def test_the_optimizer_s_state_is_what_it_keeps() -> None:
    script = Script()
    script.phase("optimizer", 0)
    script.hold(8)
    foreach = script.hold(4)
    script.release(foreach)
    script.phase("data", 1)
    assert categories(script.log()) == ["optimizer_state", "temporaries"]


def test_a_batch_is_inputs_and_a_model_parameters() -> None:
    script = Script()
    script.phase("model")
    cast = script.hold(16)
    script.hold(8)
    script.release(cast)
    script.phase("data", 0)
    script.release(script.hold(4))
    script.hold(4)
    assert categories(script.log()) == ["temporaries", "parameters", "inputs", "inputs"]


def test_a_category_that_is_known_stays() -> None:
    script = Script()
    script.phase("forward", 0)
    script.hold(8, "workspaces")
    assert categories(script.log()) == ["workspaces"]


@pytest.mark.parametrize("phase", ["unknown", "start", "zero_grad"])
def test_of_a_phase_that_tells_nothing_nothing_is_claimed(phase: Phase) -> None:
    script = Script()
    script.phase(phase)
    script.release(script.hold(8))
    script.hold(8)
    assert categories(script.log()) == ["unknown", "unknown"]


@st.composite
def scripts(draw: st.DrawFn) -> AllocationLog:
    script, held = Script(), list[Allocation]()
    for phase, step in draw(st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 2)), min_size=1, max_size=8)):
        script.phase(phase, step)
        for gives in draw(st.lists(st.booleans(), min_size=1, max_size=5)):
            if gives or not held:
                held.append(script.hold(1))
            else:
                script.release(held.pop(draw(st.integers(0, len(held) - 1))))
    return script.log()


@given(scripts())
def test_what_is_held_to_the_end_is_never_temporary_and_all_of_a_known_phase_is_told(history: AllocationLog) -> None:
    classify(history)
    lasting: dict[str, Category] = {"forward": "activations", "loss": "activations", "backward": "gradients"}
    for one in history.allocations:
        assert (one.category == "unknown") == (one.phase == "zero_grad")
        assert one.end is not None or one.category != "temporaries"
        assert one.category in ("temporaries", lasting.get(one.phase, one.category))


def test_what_tells_no_phase_is_between_those_that_do() -> None:
    told: list[Phase | None] = [
        None, "forward", None, "forward", None, "backward", None, "backward", None, "optimizer", None, "forward", None,
    ]  # fmt: skip
    assert filled(told) == [
        "unknown", "forward", "forward", "forward", "loss", "backward", "backward", "backward", "optimizer",
        "optimizer", "data", "forward", "unknown",
    ]  # fmt: skip


def test_between_the_model_and_its_first_forward_pass_nothing_is_claimed() -> None:
    assert filled(["model", None, "forward"]) == ["model", "unknown", "forward"]


def test_gradients_removed_between_forward_and_backward_leave_the_loss_around_them() -> None:
    told: list[Phase | None] = ["forward", None, "zero_grad", None, "backward"]
    assert filled(told) == ["forward", "loss", "zero_grad", "loss", "backward"]


def test_where_nothing_tells_a_phase_all_is_unknown() -> None:
    assert filled([None, None]) == ["unknown", "unknown"]
    assert list(steps(["unknown", "unknown"])) == [None, None]


def test_a_step_ends_with_its_optimizer_and_the_removal_of_gradients() -> None:
    phases: list[Phase] = ["model", "forward", "backward", "forward", "backward", "optimizer", "zero_grad", "forward"]
    assert list(steps(phases)) == [None, 0, 0, 0, 0, 0, 0, 1]


def test_gradients_removed_at_the_beginning_do_not_split_a_step() -> None:
    loop: list[Phase] = ["data", "zero_grad", "forward", "backward", "optimizer"]
    assert list(steps([*loop, *loop])) == [0] * 5 + [1] * 5


def test_without_an_optimizer_a_step_ends_with_the_backward_pass() -> None:
    assert list(steps(["forward", "loss", "backward", "data", "forward", "backward"])) == [0, 0, 0, 1, 1, 1]
    assert list(steps(["forward", "data", "forward"])) == [0, 0, 0]
