"""What libraries take, against the sizes that snapshots of real runs show."""

import pytest

from gpubench.errors import DeviceError
from gpubench.hardware import ACCELERATORS, capability
from gpubench.memory.libraries import HANDLES, blas_workspace

AMD = {row.key for row in ACCELERATORS if any("AMD" in name for name in row.names)}


@pytest.mark.parametrize("key", [row.key for row in ACCELERATORS])
def test_every_accelerator_of_nvidia_has_a_compute_capability_and_none_of_amd(key: str) -> None:
    found = capability(key)
    assert (found is None) == (key in AMD)
    assert blas_workspace(found) > 0


@pytest.mark.parametrize(("kind", "bf16", "tf32"), [("v100", False, False), ("t4", False, False), ("a100", True, True)])
def test_a_capability_before_8_belongs_to_a_gpu_without_bf16(kind: str, bf16: bool, tf32: bool) -> None:
    for row in ACCELERATORS:
        if row.key.startswith(kind):
            assert ("bf16" in row.peaks) == bf16 == ((capability(row.key) or (0, 0)) >= (8, 0))
            assert ("tf32" in row.peaks) == tf32


def test_an_accelerator_that_is_not_in_the_table_is_named_with_its_nearest() -> None:
    with pytest.raises(DeviceError) as caught:
        capability("h220")
    assert "'h220'" in caught.value.message
    assert "h200" in (caught.value.hint or "")


def test_a_workspace_before_hopper_has_the_bytes_that_are_seen_after_one_linear_layer_on_an_a10() -> None:
    # PyTorch issue 95668: memory_allocated() is 8519680 once nn.Linear(1, 1) has run.
    assert blas_workspace(capability("a10")) == 8_519_680


def test_two_workspaces_of_a_hopper_are_the_67_108_864_bytes_of_a_snapshot_after_a_backward_pass() -> None:
    assert HANDLES * blas_workspace(capability("h100")) == 2 * 33_554_432


def test_blackwell_has_hoppers_workspace_and_ada_the_older_one() -> None:
    assert blas_workspace(capability("b200")) == blas_workspace(capability("rtx-5090")) == 32 * 2**20
    assert blas_workspace(capability("rtx-4090")) == blas_workspace(capability("t4")) == 8_519_680
