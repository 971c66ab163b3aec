"""Pipeline folders before anything is loaded: what they hold, and what is said of those that cannot be run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pipelines_made
import pytest

from gpubench.errors import ModelError
from gpubench.kinds.pipeline import folders


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Stable Diffusion folder, not to be written to."""
    return pipelines_made.stable_diffusion(tmp_path_factory.mktemp("whole") / "stable_diffusion")


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """One to change, or to take something away from."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def test_a_folder_that_is_whole_says_what_it_holds(whole: Path) -> None:
    folder = folders.check(whole)
    assert folder.pipeline == "StableDiffusionPipeline"
    assert folder.kind.denoiser == "unet"
    assert folder.variant is None


def test_what_is_not_loaded_may_be_missing(copy: Path) -> None:
    index = copy / "model_index.json"
    checker = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    index.write_text(json.dumps(json.loads(index.read_text()) | {"safety_checker": checker}))
    folders.check(copy)


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("model_index.json", r"cannot read model_index\.json: No such file"),
        ("unet", r"cannot read unet/config\.json"),
        ("unet/diffusion_pytorch_model.safetensors", r"unet lacks diffusion_pytorch_model\.safetensors"),
        ("vae/config.json", r"cannot read vae/config\.json"),
        ("text_encoder/model.safetensors", r"text_encoder lacks model\.safetensors"),
        ("scheduler/scheduler_config.json", r"cannot read scheduler/scheduler_config\.json"),
        ("tokenizer/tokenizer_config.json", r"cannot read tokenizer/tokenizer_config\.json"),
        ("tokenizer/tokenizer.json", r"no tokenizer\.json or vocab\.json .* in tokenizer"),
    ],
)
def test_what_a_folder_lacks_is_named(copy: Path, gone: str, message: str) -> None:
    path = copy / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(ModelError, match=message):
        folders.check(copy)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no pipeline folder .*nowhere"):
        folders.check(tmp_path / "nowhere")


def test_a_missing_part_of_sharded_weights_is_noticed(copy: Path) -> None:
    weights = copy / "unet/diffusion_pytorch_model.safetensors"
    parts = {"a": weights.name.replace(".s", "-00001-of-00002.s"), "b": weights.name.replace(".s", "-00002-of-00002.s")}
    weights.rename(weights.with_name(parts["a"]))
    weights.with_name(f"{weights.name}.index.json").write_text(json.dumps({"weight_map": parts}))
    with pytest.raises(ModelError, match=r"unet lacks .* or a part of it"):
        folders.check(copy)
    shutil.copy(weights.with_name(parts["a"]), weights.with_name(parts["b"]))
    folders.check(copy)


@pytest.mark.parametrize("part", ["unet/diffusion_pytorch_model", "text_encoder/model", "vae/diffusion_pytorch_model"])
@pytest.mark.parametrize("kept", [0, 5, 1000, -1])
def test_weights_that_were_not_copied_to_the_end_are_refused(copy: Path, part: str, kept: int) -> None:
    weights = copy / f"{part}.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(ModelError, match=rf"{part}\.safetensors is incomplete or damaged") as refused:
        folders.check(copy)
    assert refused.value.hint == "copy or download the file again"


@pytest.mark.parametrize("content", [b"\2" + bytes(7) + b"[]", b"\x0b" + bytes(7) + b'{"a": null}'])
def test_weights_with_another_header_are_refused(copy: Path, content: bytes) -> None:
    (copy / "vae/diffusion_pytorch_model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="is incomplete or damaged"):
        folders.check(copy)


def test_weights_without_any_tensor_are_whole(copy: Path) -> None:
    (copy / "vae/diffusion_pytorch_model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    folders.check(copy)


def test_pickled_weights_are_refused(copy: Path) -> None:
    weights = copy / "unet/diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(ModelError, match="unet has its weights in pickle format"):
        folders.check(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_class_name": "LDMPipeline"}, "is for LDMPipeline, which gpubench does not run"),
        ({"unet": ["my_module", "MyUNet"]}, r"its unet is my_module\.MyUNet"),
        ({"unet": ["diffusers", "UNet3DConditionModel"]}, "its unet is a UNet3DConditionModel"),
        ({"vae": [None, None]}, "names no vae"),
    ],
)
def test_a_pipeline_that_cannot_be_run_is_refused_with_the_reason(
    copy: Path, change: dict[str, Any], message: str
) -> None:
    index = copy / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        folders.check(copy)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_an_index_that_is_damaged_is_refused(copy: Path, content: str) -> None:
    (copy / "model_index.json").write_text(content)
    with pytest.raises(ModelError, match=r"model_index\.json"):
        folders.check(copy)


@pytest.mark.parametrize(
    "file",
    [
        "model_index.json",
        "unet/config.json",
        "text_encoder/model.safetensors",
        "text_encoder/config.json",
        "tokenizer/tokenizer.json",
        "scheduler/scheduler_config.json",
        "vae/diffusion_pytorch_model.safetensors",
    ],
)
def test_a_digest_tells_which_part_of_a_pipeline_has_changed(copy: Path, file: str) -> None:
    before = folders.digests(folders.check(copy))
    content = bytearray((copy / file).read_bytes())
    content[-2] ^= 1  # the same size; of JSON, the line before its last brace
    folder = folders.check(copy)
    (copy / file).write_bytes(content)
    after = folders.digests(folder)
    assert [name for name in before if before[name] != after[name]] == [file.partition("/")[0]]


def test_a_digest_passes_over_what_is_not_loaded(copy: Path) -> None:
    before = folders.digests(folders.check(copy))
    (copy / "text_encoder" / "pytorch_model.bin").write_bytes(b"never unpickled")
    (copy / "text_encoder" / "model.fp16.safetensors").write_bytes(b"another variant")
    (copy / "README.md").write_text("about it")
    assert folders.digests(folders.check(copy)) == before


def test_a_model_id_is_told_how_to_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as refused:
        folders.check(tmp_path / "owner" / "model")
    assert refused.value.hint == (
        "nothing is downloaded: fetch owner/model first, for example with hf download, and give its folder"
    )
    (tmp_path / "owner").mkdir()  # a folder of the user's own, in which the model is misspelt
    with pytest.raises(ModelError) as refused:
        folders.check(tmp_path / "owner" / "model")
    assert "download" not in str(refused.value.hint)
