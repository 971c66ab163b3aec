"""Every built-in model builds, trains and counts right; folders and callables are taken as documented or refused."""

import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpubench.errors import ModelError
from gpubench.settings.defaults import refuse_arguments
from gpubench.settings.sections import DataSettings, ModelSettings
from gpubench.worker.models import Workload, build
from gpubench.zoo import MODELS, Task, find, is_builtin

torch.set_num_threads(1)

TINY = [name for name in MODELS if name.endswith("-tiny")]


def built(name: str, seed: int = 0, **data: Any) -> Workload:
    return build(ModelSettings(name=name), DataSettings(**data), seed)


def batch_of(workload: Workload, batch_size: int = 2) -> Any:
    assert workload.make_batch is not None
    return workload.make_batch(batch_size)


def _tensors(batch: Any) -> list[torch.Tensor]:
    return list(batch.values()) if isinstance(batch, dict) else list(batch)


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def gradients_of(workload: Workload, batch: Any) -> list[torch.Tensor]:
    workload.module.zero_grad()
    workload.loss(workload.module, batch).backward()
    return [parameter.grad.clone() for parameter in workload.module.parameters() if parameter.grad is not None]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory; modules imported from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


# The table


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("vit-b16", 86_567_656),
        ("bert-base", 109_514_298),
        ("gpt2", 124_439_808),
        ("llama-3.2-1b", 1_235_814_400),
        ("sd15-unet", 859_520_964),
        ("unet2d", 274_056_163),
    ],
)
def test_full_size_models_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    with torch.device("meta"):
        assert _parameters(built(name).module) == parameters


def test_bert_large_has_the_parameters_of_its_shape_with_a_tied_decoder() -> None:
    width, inner, layers, vocabulary = 1024, 4096, 24, 30522
    norm = 2 * width
    embeddings = (vocabulary + 512 + 2) * width + norm
    attention = 4 * (width * width + width) + norm
    mlp = (width * inner + inner) + (inner * width + width) + norm
    head = (width * width + width) + norm + vocabulary  # the decoder's matrix is the token embedding; its bias is not
    with torch.device("meta"):
        assert _parameters(built("bert-large").module) == embeddings + layers * (attention + mlp) + head


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_are_tiny(name: str) -> None:
    assert 1_000 < _parameters(built(name).module) < 100_000


@pytest.mark.parametrize("name", [name for name in MODELS if name + "-tiny" not in MODELS])
def test_no_dropout_is_active(name: str) -> None:
    with torch.device("meta"):
        module = built(name).module
    assert [part.p for part in module.modules() if isinstance(part, nn.Dropout) and part.p > 0] == []


def test_every_task_has_a_tiny_model() -> None:
    assert {MODELS[name].task for name in TINY} == set(Task)


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    assert is_builtin("resnet50")
    assert not is_builtin("resnet5O")
    with pytest.raises(ModelError, match="'ResNet-50'") as caught:
        find("ResNet-50")
    assert caught.value.hint is not None
    assert "'resnet50'?" in caught.value.hint
    assert "module:callable" in caught.value.hint


def test_a_name_like_no_other_is_answered_with_all() -> None:
    with pytest.raises(ModelError) as caught:
        built("qqqqqq")
    assert caught.value.hint is not None
    assert all(name in caught.value.hint for name in MODELS)


# Training


@pytest.mark.parametrize("name", TINY)
def test_every_parameter_gets_a_gradient_from_a_finite_loss(name: str) -> None:
    workload = built(name)
    assert workload.module.training
    loss = workload.loss(workload.module, batch_of(workload))
    assert loss.shape == ()
    assert torch.isfinite(loss)
    loss.backward()
    assert [name for name, parameter in workload.module.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("name", TINY)
def test_training_on_one_batch_lowers_its_loss(name: str) -> None:
    workload = built(name)
    batch = batch_of(workload, 4)
    optimizer = torch.optim.AdamW(workload.module.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = workload.loss(workload.module, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.97 * losses[0]


@pytest.mark.parametrize("name", ["gpt2-tiny", "sd15-unet-tiny", "resnet-tiny"])
def test_weights_are_decided_by_the_seed_alone(name: str) -> None:
    first = built(name, seed=3).module.state_dict()
    torch.rand(11)
    again = built(name, seed=3).module.state_dict()
    other = built(name, seed=4).module.state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", TINY)
def test_the_step_itself_draws_no_random_numbers(name: str) -> None:
    workload = built(name)
    batch = batch_of(workload)
    state = torch.get_rng_state()
    first = gradients_of(workload, batch)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first, gradients_of(workload, batch), strict=True))


# Batches


@pytest.mark.parametrize("name", TINY)
def test_batches_are_fresh_random_and_have_the_sample_first(name: str) -> None:
    workload = built(name)
    first, second = _tensors(batch_of(workload, 5)), _tensors(batch_of(workload, 5))
    assert all(len(tensor) == 5 and tensor.device.type == "cpu" for tensor in first)
    assert all(tensor.min() < tensor.max() for tensor in first)
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch.manual_seed(1)
    one = _tensors(batch_of(workload))
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(one, _tensors(batch_of(workload)), strict=True))


@pytest.mark.parametrize("name", TINY)
def test_batch_makers_can_be_sent_to_a_loader_process(name: str) -> None:
    make_batch = pickle.loads(pickle.dumps(built(name).make_batch))
    assert len(_tensors(make_batch(3))[0]) == 3


def test_the_same_share_of_every_sequence_is_masked_and_only_that_is_predicted() -> None:
    workload = built("bert-tiny", sequence_length=40)
    batch = batch_of(workload, 16)
    masked = batch["labels"] != -100
    assert masked.sum(dim=1).tolist() == [6] * 16  # 15 % of 40
    assert torch.equal(masked, batch["input_ids"] == 256)
    assert masked.any(dim=0).sum() > 30  # not always the same positions
    assert batch["labels"][masked].max() < 256


def test_the_noise_follows_the_linear_schedule_of_ddpm() -> None:
    import diffusers

    batch = batch_of(built("unet2d-tiny"), 64)
    scheduler = diffusers.DDPMScheduler()
    expected = scheduler.add_noise(batch["clean"], batch["noise"], batch["timesteps"])
    signal = batch["alpha_bar"].view(-1, 1, 1, 1)
    torch.testing.assert_close(signal.sqrt() * batch["clean"] + (1 - signal).sqrt() * batch["noise"], expected)
    assert batch["timesteps"].min() < 200
    assert batch["timesteps"].max() > 800


def test_the_denoising_loss_is_zero_for_a_module_that_knows_the_noise() -> None:
    workload = built("sd15-unet-tiny")
    batch = batch_of(workload)

    class Oracle(nn.Module):
        def forward(self, noisy: torch.Tensor, timesteps: torch.Tensor, text: torch.Tensor) -> Any:
            signal = batch["alpha_bar"].view(-1, 1, 1, 1)
            noise = (noisy - signal.sqrt() * batch["clean"]) / (1 - signal).sqrt()
            return type("Output", (), {"sample": noise})

    assert workload.loss(Oracle(), batch).item() < 1e-8


def test_the_causal_loss_is_that_of_each_next_token() -> None:
    workload = built("gpt2-tiny")
    batch = batch_of(workload)
    tokens = batch["input_ids"]
    logits = workload.module(tokens).logits
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(workload.loss(workload.module, batch), expected)


def test_sizes_come_from_the_data_settings_else_from_the_model() -> None:
    assert built("resnet-tiny").sample_shape == "3x32x32"
    assert batch_of(built("resnet-tiny", image_size=40))[0].shape == (2, 3, 40, 40)
    vit = built("vit-tiny", image_size=64)
    assert vit.loss(vit.module, batch_of(vit)).isfinite()
    assert (built("gpt2-tiny").sequence_length, built("gpt2-tiny").sample_shape) == (32, "32 tokens")
    assert batch_of(built("llama-tiny", sequence_length=48))["input_ids"].shape == (2, 48)
    unet = built("sd15-unet-tiny", image_size=128, sequence_length=5)
    assert unet.sample_shape == "4x16x16 latent, 5x16 text embedding"
    assert batch_of(unet)["clean"].shape == (2, 4, 16, 16)
    assert batch_of(unet)["text"].shape == (2, 5, 16)
    assert unet.sequence_length is None


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("gpt2-tiny", {"sequence_length": 65}, "65 exceeds the 64 positions"),
        ("vit-tiny", {"image_size": 4}, "4 is smaller than a patch of ViTForImageClassification"),
        ("unet2d-tiny", {"image_size": 17}, "17 does not suit UNet2DModel"),
        ("sd15-unet-tiny", {"image_size": 100}, "100 does not suit UNet2DConditionModel"),
    ],
)
def test_sizes_that_the_model_cannot_take_are_refused(name: str, data: dict[str, int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        built(name, **data)


# Folders


@pytest.mark.parametrize("name", TINY)
def test_a_saved_folder_builds_the_same_workload_with_random_weights(name: str, tmp_path: Path) -> None:
    saved = built(name)
    saved.module.save_pretrained(tmp_path)  # type: ignore[operator]
    image_size = MODELS[name].image_size
    size = {"image_size": image_size} if image_size else {"sequence_length": 32}
    loaded = built(str(tmp_path), seed=1, **size)
    assert type(loaded.module) is type(saved.module)
    assert (loaded.task, loaded.sample_shape) == (saved.task, saved.sample_shape)
    assert loaded.sequence_length == saved.sequence_length
    assert _parameters(loaded.module) == _parameters(saved.module)
    assert any(
        not torch.equal(a, b) for a, b in zip(loaded.module.parameters(), saved.module.parameters(), strict=True)
    )
    assert all(parameter.dtype is torch.float32 for parameter in loaded.module.parameters())
    assert loaded.loss(loaded.module, batch_of(loaded)).isfinite()


def test_a_folder_that_asks_for_half_precision_still_trains_fp32_parameters(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "dtype": "bfloat16", "vocab_size": 256}
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | shape))
    workload = built(str(tmp_path))
    assert {parameter.dtype for parameter in workload.module.parameters()} == {torch.float32}
    assert workload.sequence_length == 64  # as many as the model has positions


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "cannot read config.json"),
        ("[]", "cannot read config.json"),
        ({"model_type": "no-such-model"}, "cannot be built"),
        ({"model_type": "gpt2"}, "architecture 'none'"),
        ({"model_type": "gpt2", "architectures": ["GPT2ForTokenClassification"]}, "GPT2ForTokenClassification"),
        ({"model_type": "gpt2", "architectures": ["NoSuchForCausalLM"]}, "NoSuchForCausalLM"),
        ({"_class_name": "AutoencoderKL"}, "AutoencoderKL"),
        (
            {"_class_name": "UNet2DConditionModel", "in_channels": 9} | dict(MODELS["sd15-unet-tiny"].config),
            "in_channels",
        ),
        (
            {"_class_name": "UNet2DModel", "num_class_embeds": 10} | dict(MODELS["unet2d-tiny"].config),
            "num_class_embeds",
        ),
    ],
)
def test_folders_that_cannot_be_fed_are_refused(config: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(ModelError, match=message) as caught:
        built(str(tmp_path))
    assert caught.value.hint


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()")
    remote = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    config = {"model_type": "evil", "architectures": ["EvilForCausalLM"], "auto_map": remote}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError):
        built(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        built(str(tmp_path))


# Callables


def test_a_callable_in_the_current_directory_may_return_a_module(here: Path) -> None:
    (here / "mine.py").write_text(
        "from torch import nn\n"
        "def net(): return nn.Linear(4, 3)\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self): super().__init__(4, 3)\n"
    )
    workload = built("mine:net", source="mine:data")
    assert (workload.make_batch, workload.task, workload.sequence_length) == (None, None, None)
    inputs = torch.randn(2, 4)
    classes, values = torch.tensor([0, 2]), torch.randn(2, 3)
    output = workload.module(inputs)
    assert torch.equal(workload.loss(workload.module, (inputs, classes)), nn.functional.cross_entropy(output, classes))
    assert torch.equal(workload.loss(workload.module, (inputs, values)), nn.functional.mse_loss(output, values))
    with pytest.raises(ModelError, match=r"\(2, 3\).*\(2,\)"):
        workload.loss(workload.module, (inputs, values[:, 0]))
    assert torch.equal(built("mine:Net", source="mine:data").module.weight, workload.module.weight)  # type: ignore[arg-type]


def test_a_callable_may_return_a_module_with_its_batches_and_loss(here: Path) -> None:
    (here / "triple.py").write_text(
        "import torch\n"
        "def batch(n): return [torch.randn(n, 4)]\n"
        "def loss(module, batch): return module(batch[0]).square().mean()\n"
        "def build(): return torch.nn.Linear(4, 3).eval(), batch, loss\n"
    )
    workload = built("triple:build")
    assert workload.module.training
    assert workload.loss(workload.module, batch_of(workload, 7)).isfinite()


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        ("", "bad:missing", "has no attribute 'missing'"),
        ("", "bad:", "has no attribute ''"),
        ("", "nowhere:net", "No module named 'nowhere'"),
        ("1 / 0", "bad:net", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "bad:net", "SystemExit: 3"),
        ("net = 3", "bad:net", "is of type int, not a callable"),
        ("def net(): raise KeyError('lost')", "bad:net", "raised KeyError: 'lost'"),
        ("def net(width): pass", "bad:net", "cannot be called with these arguments: .*'width'"),
        ("def net(): return 3", "bad:net", "returned int"),
        ("import torch\ndef net(): return torch.nn.Linear(1, 1), 3", "bad:net", "returned Linear, int"),
        ("import torch\ndef net(): return torch.nn.Linear(1, 1), 3, print", "bad:net", "returned Linear, int, builtin"),
        (
            "import torch\ndef net(): return torch.nn.ReLU(), print, print",
            "bad:net",
            "no parameters to train",
        ),
        ("import torch\ndef net(): return torch.nn.Linear(1, 1)", "bad:net", "returned a module alone"),
    ],
)
def test_callables_that_break_the_contract_are_refused(code: str, name: str, message: str, here: Path) -> None:
    (here / "bad.py").write_text(code)
    with pytest.raises(ModelError, match=message) as caught:
        built(name)
    assert name in caught.value.message
    assert caught.value.hint


SIZED = """
import torch
def batch(n): return torch.randn(n, 4)
def loss(module, batch): return module(batch).square().mean()
def build(width: int = 3, *, name="a", scale: float | None = None, deep: "bool" = False, free=None, **rest):
    return torch.nn.Linear(4, width + deep), batch, loss
def strict(width: int, at=(1, 2)): return build(width)
again = build
class Net(torch.nn.Linear):
    def __init__(self, width: int): super().__init__(4, width)
"""


def test_a_callable_gets_its_arguments_by_name(here: Path) -> None:
    (here / "sized.py").write_text(SIZED)
    model = ModelSettings(name="sized:build", arguments={"width": 7, "deep": True, "scale": 1, "free": "x", "more": 1})
    assert build(model, DataSettings(), 0).module.weight.shape == (8, 4)


@pytest.mark.parametrize(
    ("name", "arguments", "message", "in_source"),
    [
        ("strict", {"widht": 3}, "has no parameter 'widht'", True),
        ("strict", {"width": "wide"}, r"width = 'wide': sized:strict takes int here", True),
        ("strict", {"width": True}, "takes int here", True),
        ("strict", {"width": 2.5}, "takes int here", True),
        ("strict", {"width": None}, "takes int here", True),
        ("strict", {}, "missing a required argument: 'width'", True),
        ("build", {"deep": 1}, "takes bool here", True),
        ("build", {"name": 1}, "takes str here", True),
        ("build", {"scale": "x"}, "takes None or float here", True),
        ("again", {"name": 1}, "takes str here", False),
        ("Net", {"width": "x"}, "takes int here", False),
        ("Net", {"deep": 1}, "has no parameter 'deep'", False),
    ],
)
def test_arguments_that_a_callable_does_not_take_are_refused_with_its_parameters(
    name: str, arguments: dict[str, Any], message: str, in_source: bool, here: Path
) -> None:
    (here / "sized.py").write_text(SIZED)
    with pytest.raises(ModelError, match=message) as caught:
        build(ModelSettings(name=f"sized:{name}", arguments=arguments), DataSettings(source="sized:data"), 0)
    assert caught.value.hint
    assert "width: int" in caught.value.hint
    sys.modules.pop("sized")
    if not in_source:
        refuse_arguments(f"sized:{name}", arguments)  # only an import can tell
        return
    with pytest.raises(ModelError) as early:
        refuse_arguments(f"sized:{name}", arguments)
    assert (early.value.message, early.value.hint) == (caught.value.message, caught.value.hint)
    assert "sized" not in sys.modules


@pytest.mark.parametrize("code", ["def net(a, a): pass", "def net(: pass", "\0", "from mine import net", "net = 3"])
def test_arguments_are_left_to_the_import_where_the_source_does_not_tell(code: str, here: Path) -> None:
    (here / "odd.py").write_text(code)
    refuse_arguments("odd:net", {"width": 1})
    with pytest.raises(ModelError):
        build(ModelSettings(name="odd:net", arguments={"width": 1}), DataSettings(), 0)


def test_arguments_for_a_model_that_is_no_callable_are_refused(tmp_path: Path) -> None:
    for name, kind in (("resnet-tiny", "a built-in model"), (str(tmp_path), "a folder with a model")):
        with pytest.raises(ModelError, match=f"model.arguments.width: .* is {kind}, which takes no arguments"):
            refuse_arguments(name, {"width": 1})


@pytest.mark.parametrize("source", ["synthetic", "synthetic-host"])
def test_a_module_alone_is_refused_without_data_as_soon_as_it_is_built(source: str, here: Path) -> None:
    (here / "alone.py").write_text("import torch\ndef net(): return torch.nn.Linear(1, 1)")
    with pytest.raises(ModelError, match=f"data.source is {source}") as caught:
        built("alone:net", source=source)
    assert caught.value.hint
    assert "(module, make_batch, loss)" in caught.value.hint


def test_what_the_users_callable_raised_is_kept(here: Path) -> None:
    (here / "broken.py").write_text("def net(): raise KeyError('lost')")
    with pytest.raises(ModelError) as caught:
        built("broken:net")
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_model_must_be_named() -> None:
    with pytest.raises(ModelError, match=r"model\.name is not set"):
        build(ModelSettings(), DataSettings(), 0)
