"""The blocks of a model, and the recomputation of their activations."""

from collections import Counter
from typing import Any

import pytest
import torch
from test_models import TINY, batch_of, built, gradients_of
from torch import nn

from gpubench.errors import ModelError, SettingsError
from gpubench.settings.loading import validate
from gpubench.settings.schema import TrainSettings
from gpubench.settings.sections import ModelSettings
from gpubench.worker.checkpointing import blocks, checkpoint_activations


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("resnet50", {"ResNetBottleNeckLayer": 16}),
        ("vit-b16", {"ViTLayer": 12}),
        ("bert-base", {"BertLayer": 12}),
        ("gpt2", {"GPT2Block": 12}),
        ("llama-3.2-1b", {"LlamaDecoderLayer": 16}),
        (
            "sd15-unet",
            {
                "CrossAttnDownBlock2D": 3,
                "ResnetBlock2D": 2 + 2,  # the lowest level is nothing but two; two more in the middle
                "Transformer2DModel": 1,
                "UpBlock2D": 1,
                "CrossAttnUpBlock2D": 3,
            },
        ),
    ],
)
def test_blocks_are_the_repeated_parts(name: str, kinds: dict[str, int]) -> None:
    with torch.device("meta"):
        module = built(name).module
    names = [type(block).__name__ for block in blocks(module)]
    assert {kind: names.count(kind) for kind in names} == kinds
    inside = [id(parameter) for block in blocks(module) for parameter in block.parameters()]
    assert len(inside) == len(set(inside))


def test_blocks_of_a_sequential_are_its_parts_with_parameters() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert blocks(module) == [module[0], module[2]]
    assert blocks(nn.Linear(2, 2)) == []


@pytest.mark.parametrize("name", TINY)
def test_checkpointing_recomputes_the_blocks_and_leaves_gradients_as_they_were(name: str) -> None:
    workload = built(name)
    batch = batch_of(workload)
    plain = gradients_of(workload, batch)
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    for block in blocks(workload.module):
        next(child for child in block.modules() if not list(child.children())).register_forward_hook(count)
    undo = checkpoint_activations(workload.module)
    recomputed = gradients_of(workload, batch)
    assert forwards == 2 * len(blocks(workload.module))
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))
    undo()
    forwards = 0
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients_of(workload, batch), strict=True))
    assert forwards == len(blocks(workload.module))


def test_checkpointing_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="Linear has no repeated blocks"):
        checkpoint_activations(nn.Linear(2, 2))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(4, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attn(x))  # type: ignore[no-any-return]


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(5))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def _checkpointed(which: bool | int | str) -> list[str]:
    """The paths of what is computed twice, once `which` is checkpointed; gradients are as they were."""
    module, batch = _Layers(), torch.randn(3, 4)
    module(batch).sum().backward()
    plain = [parameter.grad for parameter in module.parameters()]
    module.zero_grad(set_to_none=True)
    undo = checkpoint_activations(module, which)
    wrapped = [path for path, part in module.named_modules() if "forward" in part.__dict__]
    calls: Counter[str] = Counter()
    for path, part in module.named_modules():
        part.register_forward_hook(lambda *_, path=path: calls.update([path]))
    module(batch).sum().backward()
    for parameter, expected in zip(module.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=0)
    inner = [path for path in wrapped if calls[f"{path}.0"] == 2 or calls[f"{path}.attn"] == 2 or "attn" in path]
    assert inner == wrapped  # what a wrapped module calls is called again; the module itself is called once
    undo()
    assert not any("forward" in part.__dict__ for part in module.modules())
    return wrapped


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        (True, [0, 1, 2, 3, 4]), (1, [0, 1, 2, 3, 4]), (2, [1, 3]), (3, [2]), (5, [4]),
        ("layers.*", [0, 1, 2, 3, 4]), ("layers.[02]", [0, 2]), ("layers.3, layers.1,layers.3", [1, 3]),
    ],
)  # fmt: skip
def test_every_kth_block_or_named_ones_are_checkpointed(which: bool | int | str, expected: list[int]) -> None:
    assert _checkpointed(which) == [f"layers.{number}" for number in expected]


def test_parts_of_blocks_are_checkpointed_by_name() -> None:
    assert _checkpointed("layers.*.mlp") == [f"layers.{number}.mlp" for number in range(5)]
    assert _checkpointed("layers.0.attn,layers.*.m?p") == ["layers.0.attn", *(f"layers.{n}.mlp" for n in range(5))]
    assert _checkpointed("layers.1.mlp,layers.1") == ["layers.1"]  # of one within the other, the outer


@pytest.mark.parametrize(
    ("which", "said", "hint"),
    [
        (6, "activation_checkpointing=6: _Layers has 5 blocks, layers.* (5)", "up to 5, or true"),
        ("layers.*.mpl", "has no module layers.*.mpl; its blocks are layers.* (5)", "layers.*.mlp"),
        ("layers.0,h.*", "has no module h.*; its blocks are layers.* (5)", "nearest names"),
        ("layers", "has no module layers; its blocks are layers.* (5)", "layers.*"),  # a list is never called
        ("*.mlp", "has no module *.mlp", "layers.*.mlp"),
    ],
)
def test_checkpointing_what_is_not_there_names_what_is(which: int | str, said: str, hint: str) -> None:
    with pytest.raises(ModelError) as caught:
        checkpoint_activations(_Layers(), which)
    assert said in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (True, True), ("true", True), ("ON", True), ("1", True), (1, True), (False, False), ("no", False), ("0", False),
        (2, 2), (" 3 ", 3), ("layers.*.mlp", "layers.*.mlp"), (["layers.0", "layers.2"], "layers.0,layers.2"),
    ],
)  # fmt: skip
def test_what_to_checkpoint_is_a_switch_a_number_or_names(given: Any, meant: bool | int | str) -> None:
    found = ModelSettings(activation_checkpointing=given).activation_checkpointing
    assert (found, type(found)) == (meant, type(meant))
    assert ModelSettings(activation_checkpointing=found).activation_checkpointing == found


@pytest.mark.parametrize("wrong", ["-2", -1, 2.5, "", ",", "layers/0", "a,,b", {}, [], 2**63, "2,layers 0"])
def test_what_cannot_be_checkpointed_is_refused_before_a_model_is_built(wrong: Any) -> None:
    key = "model.activation_checkpointing"
    with pytest.raises(SettingsError) as caught:
        validate(TrainSettings, {key: wrong}, {key: "command line"})
    assert caught.value.message.count(key) == 1
    assert "a number k for every k-th block" in caught.value.message
