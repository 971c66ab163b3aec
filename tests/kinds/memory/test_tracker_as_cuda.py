"""What is kept for the backward pass, against closed forms and against the lists that torch is built with."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from transformers import masking_utils

from gpubench.kinds.memory.worker import attention_kernels, cuda_kernels
from gpubench.kinds.memory.worker.attention_kernels import Call, backend
from gpubench.kinds.memory.worker.cuda_kernels import RULES, as_cuda, registered
from gpubench.releases import Release, installed
from gpubench.settings.sections import DataSettings, ModelSettings
from gpubench.worker.models import build

torch.set_num_threads(1)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
AMPERE, HOPPER, TURING = (8, 0), (9, 0), (7, 5)
NAMES = {rule.name for rule in RULES}


@pytest.fixture(autouse=True)
def _attention_in_its_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that are expected here are those of PyTorch without variables that change their order."""
    for variable in ("TORCH_CUDNN_SDPA_DEPRIORITIZED", "TORCH_CUDNN_SDPA_PREFERRED"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def _kept(function: Callable[[], Tensor], *inputs: Tensor) -> list[Tensor]:
    """What `function` keeps, each memory once, but for the memory of `inputs`."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        function()
    known = {one.untyped_storage()._cdata for one in inputs}
    return [tensor for key, tensor in kept.items() if key not in known]


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _autocast(dtype: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def _header(macro: str) -> str:
    text = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    found = re.search(rf"#define {macro}\(_\)((?:.*\\\n)+.*\n)", text)
    assert found
    return found[1]


NAMED = re.compile(r"\.(.*_)?([dD]imname|names_)")
"""Overloads for named dimensions, which PyTorch had until 2.13 and no model here uses."""


def _listed(macro: str) -> tuple[str, ...]:
    pairs = re.findall(r"_\((\w+)(?:, (\w+))?\)", _header(macro))
    names = (f"{name}.{overload}" if overload else name for name, overload in pairs)
    return tuple(name for name in names if not NAMED.search(name))


@pytest.mark.parametrize(
    ("names", "macro"),
    [
        (cuda_kernels.AUTOCAST_LOWER, "AT_FORALL_LOWER_PRECISION_FP"),
        (cuda_kernels.AUTOCAST_FP32, "AT_FORALL_FP32"),
        (cuda_kernels.AUTOCAST_FP32_RESULT, "AT_FORALL_FP32_SET_OPT_DTYPE"),
        (cuda_kernels.AUTOCAST_WIDEST, "AT_FORALL_PROMOTE"),
    ],
)
def test_the_lists_of_autocast_are_those_of_the_installed_header(names: tuple[str, ...], macro: str) -> None:
    assert tuple(name for name in names if name != "rms_norm" or installed() >= Release(2, 12)) == _listed(macro)


def test_the_norms_whose_result_is_float_are_those_of_the_installed_header() -> None:
    macro = _header("AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE")
    found = re.findall(r'"(norm\.\w+)"', macro)
    assert tuple(cuda_kernels.AUTOCAST_FP32_NORM) == tuple(name for name in found if not NAMED.search(name))


def test_the_lists_of_autocast_are_those_that_torch_is_built_with() -> None:
    built = {name for name in registered("AutocastCUDA") if not NAMED.search(name)}
    lists = (
        cuda_kernels.AUTOCAST_LOWER,
        cuda_kernels.AUTOCAST_FP32,
        cuda_kernels.AUTOCAST_FP32_RESULT,
        cuda_kernels.AUTOCAST_WIDEST,
    )
    known = {
        *chain(*lists),
        *cuda_kernels.AUTOCAST_FP32_NORM,
        "binary_cross_entropy",
    }  # for which autocast raises an error on CUDA
    apart = {"cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn", "linalg_matrix_sqrth"}
    assert built - apart == known - ({"rms_norm"} if installed() < Release(2, 12) else set())


X, SIDE = torch.randn(4, 4), torch.randn(4, 4)
IMAGES = torch.randn(2, 4, 4, 4)
ALIKE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse_loss": functional.mse_loss,
    "l1_loss": functional.l1_loss,
    "smooth_l1_loss": functional.smooth_l1_loss,
    "huber_loss": functional.huber_loss,
    "soft_margin_loss": functional.soft_margin_loss,
    "kl_div": lambda one, other: functional.kl_div(one, other, reduction="sum"),
    "poisson_nll_loss": functional.poisson_nll_loss,
    "binary_cross_entropy_with_logits": functional.binary_cross_entropy_with_logits,
    "nll_loss": lambda one, _: functional.nll_loss(one, torch.tensor([0, 1, 2, 3])),
    "nll_loss2d": lambda one, _: functional.nll_loss(one[None, None], torch.zeros(1, 4, 4, dtype=torch.long)),
    "cdist": torch.cdist,
    "cosine_embedding_loss": lambda one, other: functional.cosine_embedding_loss(one, other, torch.ones(4)),
    "hinge_embedding_loss": functional.hinge_embedding_loss,
    "margin_ranking_loss": lambda one, other: functional.margin_ranking_loss(one, other, torch.ones(4, 4)),
    "triplet_margin_loss": lambda one, other: functional.triplet_margin_loss(one, other, one),
    "multi_margin_loss": lambda one, _: functional.multi_margin_loss(one, torch.tensor([0, 1, 2, 3])),
    "multilabel_margin_loss": lambda one, _: functional.multilabel_margin_loss(
        one, torch.zeros(4, 4, dtype=torch.long)
    ),
}


def test_operators_that_the_cpu_already_takes_in_float_are_left_to_it() -> None:
    theirs = {
        name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    }
    assert theirs & set(cuda_kernels.AUTOCAST_FP32) == set(ALIKE)
    for name, function in ALIKE.items():
        with _autocast(BF16):
            assert function(X.to(BF16), SIDE.to(BF16)).dtype is FP32, name


FLOAT: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "group_norm": lambda x: functional.group_norm(x, 2),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "pow": lambda x: x**2,
    "exp": torch.exp,
    "rsqrt": torch.rsqrt,
    "sum": torch.sum,
    "sum of a dimension": lambda x: x.sum(0),
    "cumsum": lambda x: x.cumsum(0),
    "norm": lambda x: torch.ops.aten.norm.Scalar(x),
    "norm of a dimension": lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [0]),
    "vector_norm": torch.linalg.vector_norm,
    "interpolate": lambda x: functional.interpolate(x, scale_factor=2),
    "cat with a float": lambda x: torch.cat([x, torch.ones(2, 4, 4, 4)]),
    "cross_entropy": lambda x: functional.cross_entropy(x.flatten(1), torch.zeros(2, dtype=torch.long)),
}
SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "matmul": lambda x: x.float() @ x.float(),
    "einsum": lambda x: torch.einsum("bchw,bchw->bc", x.float(), x.float()),
    "add": lambda x: x + 1,
    "mean": torch.mean,
    "gelu": functional.gelu,
    "batch_norm": lambda x: functional.batch_norm(x, None, None, torch.ones(4), training=True),
    "softmax with a type": lambda x: x.softmax(-1, dtype=x.dtype),
    "max_pool3d": lambda x: functional.max_pool3d(x[None], 2),
    "index_put": lambda x: x.index_put((torch.tensor([0]),), torch.ones((), dtype=x.dtype)),
}
(FLOAT if installed() >= Release(2, 12) else SAME)["rms_norm"] = lambda x: functional.rms_norm(x, x.shape[-1:])


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", FLOAT)
def test_operators_that_cuda_takes_in_float_give_float(name: str, dtype: torch.dtype) -> None:
    with as_cuda(), _autocast(dtype):
        assert FLOAT[name](IMAGES.to(dtype)).dtype is FP32


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", SAME)
def test_operators_that_cuda_takes_as_they_come_or_in_the_lower_type_give_that(name: str, dtype: torch.dtype) -> None:
    with as_cuda(), _autocast(dtype), FakeTensorMode(allow_non_fake_inputs=True):
        assert SAME[name](IMAGES.to(dtype)).dtype is dtype


def test_inputs_of_two_types_meet_in_float_where_one_of_them_is_that() -> None:
    with as_cuda(), _autocast(BF16):
        assert torch.dot(X[0].to(BF16), X[1].to(FP32)).dtype is FP32
        assert torch.dot(X[0].to(BF16), X[1].to(BF16)).dtype is BF16


def test_doubles_and_whole_numbers_are_left_as_they_are() -> None:
    with as_cuda() as applied, _autocast(BF16):
        assert X.double().exp().dtype is torch.float64
        assert torch.arange(3).sum().dtype is torch.int64
    assert not applied


def test_cross_entropy_keeps_its_log_softmax_in_the_lower_type_and_a_float_copy_of_it(fake: None) -> None:
    rows, vocabulary = 8, 100
    logits = torch.randn(rows, vocabulary, requires_grad=True, dtype=BF16)
    target = torch.zeros(rows, dtype=torch.long)
    with as_cuda(), _autocast(BF16):
        kept = _kept(lambda: functional.cross_entropy(logits, target), logits, target)
    total_weight = 4
    assert _bytes(kept) == rows * vocabulary * (2 + 4) + total_weight


def test_layer_norm_keeps_its_input_in_float_and_two_floats_a_row(fake: None) -> None:
    rows, width = 8, 100
    x = torch.randn(rows, width, dtype=BF16, requires_grad=True)
    with as_cuda(), _autocast(BF16):
        assert _bytes(_kept(lambda: functional.layer_norm(x, (width,)), x)) == 4 * rows * width + 2 * 4 * rows


def test_a_weight_that_is_used_twice_under_autocast_is_cast_once(fake: None) -> None:
    weight, x = torch.randn(16, 16, requires_grad=True), torch.randn(4, 16, dtype=BF16, requires_grad=True)
    with as_cuda(), _autocast(BF16):
        kept = _kept(lambda: functional.linear(functional.linear(x, weight), weight), x)
    assert sorted(tensor.untyped_storage().nbytes() for tensor in kept) == [2 * 4 * 16, 2 * 16 * 16]


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_dropout_keeps_one_byte_an_element(fake: None, dtype: torch.dtype) -> None:
    x = torch.randn(8, 100, dtype=dtype, requires_grad=True)
    with as_cuda() as applied:
        assert _bytes(_kept(lambda: nn.Dropout(0.1)(x), x)) == x.numel()
    assert applied == {"dropout": 1}
    with as_cuda(without=("dropout",)) as applied:
        assert _bytes(_kept(lambda: nn.Dropout(0.1)(x), x)) == x.numel() * dtype.itemsize
    assert not applied


def test_dropout_of_nothing_gives_back_its_input_and_dropout_of_all_gives_zeros() -> None:
    with as_cuda() as applied:
        assert functional.dropout(X, 0.5, training=False) is X
        assert torch.equal(functional.dropout(X, 0.0), X)
        assert not functional.dropout(X, 1.0).any()
    assert not applied


def _qkv(
    batch: int, heads: int, tokens: int, width: int, dtype: torch.dtype, keys: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    def made(count: int) -> Tensor:
        return torch.randn(batch, count, tokens, width, dtype=dtype, requires_grad=True)

    return made(heads), made(keys or heads), made(keys or heads)


def _choice(
    capability: tuple[int, int],
    dtype: torch.dtype,
    width: int = 64,
    keys: int | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> str:
    query, key, value = _qkv(2, 4, 32, width, dtype, keys)
    return backend(Call(query, key, value, mask, dropout, False, None, keys is not None), capability)


def test_the_kernel_of_attention_is_the_one_that_pytorch_takes() -> None:
    mask = torch.zeros(32, 32, dtype=torch.bool)
    assert _choice(AMPERE, BF16) == _choice(AMPERE, FP16, dropout=0.1) == _choice(AMPERE, BF16, keys=2) == "flash"
    assert _choice(AMPERE, FP32) == _choice(AMPERE, BF16, mask=mask) == _choice(TURING, FP16) == "efficient"
    assert _choice(HOPPER, BF16) == ("cudnn" if installed() >= Release(2, 10) else "flash")
    assert _choice(HOPPER, BF16, dropout=0.1) == _choice(HOPPER, BF16, width=200) == "flash"
    assert _choice(AMPERE, BF16, width=60) == "flash"
    assert _choice(AMPERE, BF16, width=264) == _choice(AMPERE, FP32, width=512) == "efficient"


def test_attention_is_plain_where_no_fused_kernel_takes_its_inputs() -> None:
    mask = torch.zeros(32, 32, dtype=torch.bool)
    shared = "efficient" if installed().efficient_attention_shares_keys else "math"
    assert _choice(AMPERE, BF16, keys=2, mask=mask) == shared  # flash takes no mask
    assert _choice(AMPERE, FP32, keys=2) == _choice(TURING, FP16, keys=2) == shared
    assert _choice(TURING, BF16) == "math"
    assert _choice(AMPERE, FP32, width=30) == _choice(TURING, FP16, width=60) == "math"
    assert _choice((8, 6), BF16, width=256, dropout=0.1) == "efficient"  # no flash backward pass there
    assert _choice(AMPERE, torch.float64) == "math"


@pytest.mark.parametrize(
    ("version", "cudnn", "capability", "first"),
    [
        ("2.8.0", 91002, HOPPER, False),  # only if asked to
        ("2.9.1", 91002, HOPPER, True),
        ("2.9.1", 90701, HOPPER, False),
        ("2.9.1", 91002, (10, 3), False),
        ("2.10.0", 91002, HOPPER, False),
        ("2.10.0", 91500, HOPPER, False),
        ("2.11.0", 91501, HOPPER, True),
        ("2.13.0", 92000, (10, 3), True),
        ("2.13.0", 92000, (12, 0), False),
        ("2.13.0", 92000, AMPERE, False),
    ],
)
def test_pytorch_asks_cudnn_first_by_its_own_version_and_cudnns(
    version: str, cudnn: int, capability: tuple[int, int], first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = Release(*map(int, version.split(".")[:2]))
    assert attention_kernels.cudnn_first(capability, cudnn, release) == first
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert not attention_kernels.cudnn_first(capability, cudnn, release)


@pytest.mark.skipif(installed() < Release(2, 10), reason="of PyTorch 2.10 and later")
def test_the_choice_follows_the_cudnn_that_runs_here_and_an_unknown_one_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_kernels, "cudnn_version", lambda: 91002)
    assert _choice(HOPPER, BF16) == "flash"
    assert attention_kernels.assumptions(HOPPER) == []
    monkeypatch.setattr(attention_kernels, "cudnn_version", lambda: 92000)
    assert _choice(HOPPER, BF16) == "cudnn"
    monkeypatch.setattr(attention_kernels, "cudnn_version", lambda: None)
    assert _choice(HOPPER, BF16) == "cudnn"
    (said,) = attention_kernels.assumptions(HOPPER)
    assert "as with cuDNN 9.15.1 or newer" in said
    assert attention_kernels.assumptions(AMPERE) == attention_kernels.assumptions(None) == []


def test_dropout_is_not_cudnns_where_its_version_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "cudnn_first", lambda capability, cudnn, release: True)
    for version, kernel in ((91100, "cudnn"), (91200, "flash"), (91400, "cudnn")):
        monkeypatch.setattr(attention_kernels, "cudnn_version", lambda version=version: version)
        assert _choice(HOPPER, BF16, dropout=0.25) == kernel
        assert _choice(HOPPER, BF16) == "cudnn"


def test_attention_uses_only_the_kernels_that_the_program_allows() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert _choice(AMPERE, BF16) == "math"
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION),
        pytest.raises(RuntimeError, match="No available kernel"),
    ):
        _choice(AMPERE, FP32)


@pytest.mark.parametrize(
    ("capability", "dtype", "row"),
    [(AMPERE, BF16, 40), (HOPPER, FP16, 40), (AMPERE, FP32, 64), (TURING, FP16, 64)],
)
def test_fused_attention_with_dropout_keeps_its_output_and_one_float_a_row(
    fake: None, capability: tuple[int, int], dtype: torch.dtype, row: int
) -> None:
    batch, heads, tokens, width = 2, 4, 40, 64
    inputs = _qkv(batch, heads, tokens, width, dtype)
    with as_cuda(capability=capability) as applied:
        kept = _kept(lambda: functional.scaled_dot_product_attention(*inputs, dropout_p=0.25), *inputs)
    random_state = 24 if capability == AMPERE and dtype is BF16 and installed() >= Release(2, 7) else 16
    out = batch * heads * tokens * width * dtype.itemsize
    assert _bytes(kept) == out + 4 * batch * heads * row + random_state  # efficient attention rounds rows up to 32
    assert applied == {"attention": 1}


def test_a_boolean_mask_is_kept_as_what_is_added_to_the_scores(fake: None) -> None:
    batch, tokens = 2, 40
    inputs, mask = _qkv(batch, 4, tokens, 64, FP32), torch.ones(batch, 1, tokens, tokens, dtype=torch.bool)
    with as_cuda():
        kept = _kept(lambda: functional.scaled_dot_product_attention(*inputs, attn_mask=mask), *inputs, mask)
    assert batch * tokens * tokens * 4 in {tensor.untyped_storage().nbytes() for tensor in kept}


def test_a_mask_whose_rows_are_no_multiple_of_8_is_padded(fake: None) -> None:
    inputs, mask = _qkv(2, 4, 30, 64, FP32), torch.zeros(30, 30)
    with as_cuda():
        kept = _kept(lambda: functional.scaled_dot_product_attention(*inputs, attn_mask=mask), *inputs, mask)
    assert 30 * 32 * 4 in {tensor.untyped_storage().nbytes() for tensor in kept}


def test_heads_whose_width_is_no_multiple_of_8_are_padded_for_flash_attention(fake: None) -> None:
    inputs = _qkv(2, 4, 32, 60, BF16)
    with as_cuda():
        kept = _kept(lambda: functional.scaled_dot_product_attention(*inputs), *inputs)
    assert sum(tuple(tensor.shape) == (2, 4, 32, 64) for tensor in kept) == 4  # query, key, value and output


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([AMPERE, (8, 9), HOPPER, TURING, (12, 0)]),
    st.sampled_from([FP32, BF16, FP16]),
    st.integers(1, 3),
    st.sampled_from([8, 20, 64, 128, 256, 320]),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.booleans(),
)
def test_scores_are_kept_by_plain_attention_alone(
    capability: tuple[int, int], dtype: torch.dtype, batch: int, width: int, dropout: float, causal: bool
) -> None:
    heads, tokens = 2, 2048
    with FakeTensorMode(), as_cuda(capability=capability):
        inputs = _qkv(batch, heads, tokens, width, dtype)
        chosen = backend(Call(*inputs, None, dropout, causal, None, False), capability)
        out = functional.scaled_dot_product_attention(*inputs, dropout_p=dropout, is_causal=causal)
        assert out.shape == inputs[0].shape
        kept = _kept(
            lambda: functional.scaled_dot_product_attention(*inputs, dropout_p=dropout, is_causal=causal), *inputs
        )
        scores = any(tensor.untyped_storage().nbytes() >= batch * heads * tokens**2 for tensor in kept)
        assert scores == (chosen == "math")
        out.sum().backward()
        assert all(one.grad is not None and one.grad.shape == one.shape for one in inputs)


@pytest.mark.skipif(not installed().fuses_rms_norm, reason="of PyTorch 2.9 and later")
def test_rms_norm_keeps_its_input_alone_but_for_numbers_of_rows(fake: None) -> None:
    x, weight = torch.randn(8, 1000, requires_grad=True), torch.ones(1000, requires_grad=True)
    with as_cuda():
        assert _bytes(_kept(lambda: functional.rms_norm(x, (1000,), weight), x, weight)) <= 2 * 4 * 8
    assert _bytes(_kept(lambda: functional.rms_norm(x, (1000,), weight), x, weight)) >= 4 * 8 * 1000


def test_log_softmax_of_float16_into_float_makes_no_copy_of_its_input(fake: None) -> None:
    x = torch.randn(8, 100, dtype=FP16, requires_grad=True)
    with as_cuda() as applied:
        out = x.log_softmax(-1, dtype=FP32)
        assert out.dtype is FP32
        out.sum().backward()
        assert applied == {"softmax": 1}
        x.to(BF16).log_softmax(-1, dtype=FP32)
        assert applied == {"softmax": 1}
    assert x.grad is not None
    assert x.grad.dtype is FP16


def test_positions_without_memory_are_those_of_one_sequence_and_others_are_read() -> None:
    two = torch.tensor([[0, 1, 2, 0, 1]])
    with as_cuda() as applied:
        assert masking_utils.find_packed_sequence_indices(two).tolist() == [[0, 0, 0, 1, 1]]
        assert not applied
        with FakeTensorMode():
            assert masking_utils.find_packed_sequence_indices(torch.arange(5)[None]) is None
        assert applied == {"packing": 1}


@pytest.mark.parametrize(("dtype", "scores"), [(BF16, False), (None, not installed().efficient_attention_shares_keys)])
def test_a_llama_without_memory_makes_no_mask_and_keeps_scores_only_where_its_keys_cannot_be_shared(
    fake: None, dtype: torch.dtype | None, scores: bool
) -> None:
    batch, heads, tokens = 2, 4, 48
    workload = build(ModelSettings(name="llama-tiny"), DataSettings(sequence_length=tokens), 0)
    assert workload.make_batch is not None
    inputs: Any = workload.make_batch(batch)
    with as_cuda(), _autocast(dtype):
        kept = _kept(lambda: workload.loss(workload.module, inputs))
    sizes = {tensor.numel() for tensor in kept}
    assert (batch * heads * tokens**2 in sizes) == scores
    assert batch * tokens**2 not in sizes


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm, self.root = nn.LayerNorm(32), nn.RMSNorm(32)
        self.groups = nn.GroupNorm(4, 32)
        self.last = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.gelu(self.root(self.norm(self.first(x))))
        heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
        x = x + functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        return functional.cross_entropy(self.last(self.groups(x.transpose(1, 2)).mean(-1)), torch.arange(4))


def _loss_and_gradients(dtype: torch.dtype | None, *, rules: bool) -> list[Tensor]:
    torch.manual_seed(0)
    module, x = _Small(), torch.randn(4, 6, 16)
    with as_cuda() if rules else nullcontext(), _autocast(dtype):
        loss = module(x)
    loss.backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    return [loss.detach(), *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 1e-5), (BF16, 3e-2), (FP16, 3e-3)])
def test_tensors_with_memory_give_the_loss_and_the_gradients_of_float(
    dtype: torch.dtype | None, tolerance: float
) -> None:
    plain = _loss_and_gradients(None, rules=False)
    ours = _loss_and_gradients(dtype, rules=True)
    assert len(ours) == len(plain)
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_the_rules_end_with_their_context() -> None:
    operators = (
        "aten::dropout",
        "aten::layer_norm",
        "aten::cat",
        "aten::softmax.int",
        "aten::scaled_dot_product_attention",
    )
    before = [torch._C._dispatch_dump_table(name) for name in operators]
    find = masking_utils.find_packed_sequence_indices
    with suppress(ZeroDivisionError), as_cuda():
        assert all(torch._C._dispatch_dump_table(name) != old for name, old in zip(operators, before, strict=True))
        assert masking_utils.find_packed_sequence_indices is not find
        raise ZeroDivisionError
    assert [torch._C._dispatch_dump_table(name) for name in operators] == before
    assert masking_utils.find_packed_sequence_indices is find


def test_every_rule_can_be_left_out(fake: None) -> None:
    table = torch._C._dispatch_dump_table("aten::layer_norm")
    with as_cuda(without=NAMES) as applied:
        assert torch._C._dispatch_dump_table("aten::layer_norm") == table
        functional.dropout(torch.randn(3), 0.5)
    assert not applied
    assert all(rule.reason for rule in RULES)


@pytest.mark.parametrize("dtype", [None, BF16, FP16])
@pytest.mark.parametrize(("name", "met"), [("gpt2-tiny", {"attention", "packing"}), ("resnet18", set())])
def test_a_training_step_without_memory_runs_under_the_rules(
    name: str, met: set[str], dtype: torch.dtype | None
) -> None:
    with FakeTensorMode(), as_cuda() as applied:
        workload = build(ModelSettings(name=name), DataSettings(image_size=32 if name == "resnet18" else None), 0)
        assert workload.make_batch is not None
        batch: Any = workload.make_batch(2)
        with _autocast(dtype):
            loss = workload.loss(workload.module, batch)
        loss.backward()
    assert all(parameter.grad is not None for parameter in workload.module.parameters())
    assert met <= set(applied)
