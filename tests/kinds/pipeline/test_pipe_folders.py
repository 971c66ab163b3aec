"""Pipeline folders through the command line: prompts in, verified samples and images out."""

from collections.abc import Iterator
from pathlib import Path

import pipelines_made
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image
from running import Finished, gpubench

from gpubench.kinds.pipeline.worker.denoiser import sha256

PROMPTS = ["a cat", "two dogs", "a house by the sea"]
SAMPLES = 4
SEED = 40
STEPS = 5


def run(folder: Path, world_size: int, results: Path, *options: str) -> Finished:
    asked = ("--model", str(folder), "--world-size", str(world_size), "--steps", str(STEPS), "--verify")
    fixed = ("--device", "cpu", "--performance.cpu_threads=1", "--repeats", "1", "--baseline", "off")
    return gpubench("pipe-infer", *asked, *fixed, *options, results=results)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipelines_made.stable_diffusion(tmp_path_factory.mktemp("stable-diffusion"))


@pytest.fixture(scope="module")
def illustrated(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of three ranks that kept its images."""
    results = tmp_path_factory.mktemp("illustrated")
    prompts = results / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS) + "\n")
    texts = ("--prompts", str(prompts), "--samples", str(SAMPLES), "--seed", str(SEED))
    done = run(folder, 3, results, *texts, "--output.images=true")
    assert done.code == 0, done.stderr
    return done


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the run had: results can depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_sample_of_a_folder_is_the_one_of_its_own_pipeline(illustrated: Finished) -> None:
    assert (
        f"{SAMPLES} of {SAMPLES} samples are bit-identical to diffusers StableDiffusionPipeline.__call__"
        in illustrated.stdout
    )
    found = illustrated.document("summary.json")["pipeline"]["verification"]
    assert (found["samples"], found["identical"], found["divergence"]) == (SAMPLES, SAMPLES, None)


def test_samples_are_recorded_with_their_prompts_in_turn_and_their_seeds(illustrated: Finished) -> None:
    lines = illustrated.lines("samples.jsonl")
    assert [line["sample"] for line in lines] == list(range(SAMPLES))
    assert [line["seed"] for line in lines] == list(range(SEED, SEED + SAMPLES))
    assert [line["prompt"] for line in lines] == [*PROMPTS, PROMPTS[0]]


@pytest.mark.usefixtures("one_thread")
def test_images_are_what_a_user_of_diffusers_gets_and_say_how(illustrated: Finished, folder: Path) -> None:
    pipe = StableDiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    for line in illustrated.lines("samples.jsonl"):
        generator = torch.Generator().manual_seed(line["seed"])
        (wanted,) = pipe(line["prompt"], num_inference_steps=STEPS, generator=generator).images
        with Image.open(illustrated.run / line["image"]) as image:
            assert image.tobytes() == wanted.tobytes(), line["sample"]
            assert image.info == {"seed": str(line["seed"]), "prompt": line["prompt"]}


def test_images_are_as_large_as_the_latents_say_and_not_all_one(illustrated: Finished) -> None:
    images = sorted(illustrated.run.glob("samples/*.png"))
    assert len(images) == SAMPLES
    assert len({path.read_bytes() for path in images}) == SAMPLES
    for path in images:
        with Image.open(path) as image:
            assert (image.format, image.size, image.mode) == ("PNG", (32, 32), "RGB")


@pytest.mark.usefixtures("one_thread")
def test_every_prompt_is_made_with_every_seed_as_by_calls_of_diffusers(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS[:2]))
    done = run(folder, 2, tmp_path, "--prompts", str(prompts), "--seeds", "900,5")
    assert done.code == 0, done.stderr
    lines = sorted(done.lines("samples.jsonl"), key=lambda line: int(line["sample"]))
    wanted = [(prompt, seed) for prompt in PROMPTS[:2] for seed in (900, 5)]
    assert [(line["prompt"], line["seed"]) for line in lines] == wanted
    assert [line["latent"] for line in lines] == [
        f"samples/0000{sample}-prompt{1 + sample // 2}-seed{seed}.safetensors"
        for sample, (_, seed) in enumerate(wanted)
    ]
    pipe = StableDiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    for line in lines:
        generator = torch.Generator().manual_seed(line["seed"])
        made = pipe(line["prompt"], num_inference_steps=STEPS, generator=generator, output_type="latent").images
        assert sha256(made) == line["sha256"], line["sample"]


@pytest.mark.parametrize("kind", ["stable_diffusion_xl", "ddpm"])
def test_other_pipelines_are_verified_against_their_own_call(kind: str, tmp_path: Path) -> None:
    made = getattr(pipelines_made, kind)(tmp_path / kind)
    done = run(made, 2, tmp_path / "results", "--samples", "3")
    assert done.code == 0, done.stderr
    own = {"stable_diffusion_xl": "StableDiffusionXLPipeline", "ddpm": "DDPMPipeline"}[kind]
    assert f"3 of 3 samples are bit-identical to diffusers {own}.__call__" in done.stdout
