"""Random-weight and dummy denoisers: what a pipeline of ranks evaluates is what diffusers would."""

from typing import Any

import pytest
import torch
from cases_made import completed_pipeline
from denoised import SCHEDULERS, assert_as_reference, run, sampler_of

from gpubench.errors import SettingsError
from gpubench.kinds.pipeline.schedulers import RANDOM_WEIGHTS
from gpubench.kinds.pipeline.worker import denoiser, models
from gpubench.kinds.pipeline.worker.denoiser import Denoiser
from gpubench.settings.keys import flatten

CPU = torch.device("cpu")


def load(
    unet: Any = "tiny",
    *,
    seed: int = 0,
    seeds: str | None = None,
    dtype: torch.dtype = torch.float32,
    model: Any = None,
    **sampling: Any,
) -> Denoiser:
    model = {"unet": unet, "step_ms": 0} | (model or {})
    settings = completed_pipeline(flatten({"seed": seed, "work.seeds": seeds, "model": model, "sampling": sampling}))
    loaded = models.load(settings, CPU, dtype, first=True, last=True, images=False)
    loaded.set_conditioning(loaded.encode(["one", "two", "three"]))
    return loaded


@pytest.mark.parametrize("samples", [[1], [1, 2]])
@pytest.mark.parametrize(
    ("scheduler", "guidance_scale"),
    [
        *((scheduler, 7.5) for scheduler in SCHEDULERS),
        (SCHEDULERS[0], 1.0),
        *(pytest.param(scheduler, 1.0, marks=pytest.mark.stress) for scheduler in SCHEDULERS[1:]),
    ],
)
def test_evaluations_one_by_one_are_those_of_the_pipeline_of_diffusers(
    scheduler: str, guidance_scale: float, samples: list[int]
) -> None:
    loaded = load(scheduler=scheduler, guidance_scale=guidance_scale)
    assert loaded.reference_name == "diffusers StableDiffusionPipeline.__call__"
    assert_as_reference(loaded, samples)


def test_the_reference_is_what_a_user_of_diffusers_gets() -> None:
    from diffusers import PNDMScheduler, StableDiffusionPipeline

    loaded = load()
    embeddings = loaded.encode(["one"])[0]
    torch.manual_seed(0)
    pipe = StableDiffusionPipeline(
        unet=models.build("tiny"),
        scheduler=PNDMScheduler(**RANDOM_WEIGHTS["tiny"][1]),
        vae=None,
        text_encoder=None,
        tokenizer=None,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(100)
    latents = pipe(**embeddings, num_inference_steps=4, generator=generator, output_type="latent").images
    batch, _ = run(loaded, sampler_of(loaded), [0])
    assert torch.equal(batch.latents, latents)


@pytest.mark.parametrize(
    "scheduler", ["FlowMatchEulerDiscreteScheduler", "CogVideoXDPMScheduler", "DDPMWuerstchenScheduler"]
)
def test_a_scheduler_that_its_pipeline_does_not_run_is_checked_by_a_plain_loop(scheduler: str) -> None:
    loaded = load(scheduler=scheduler)
    assert loaded.reference_name == denoiser.LOOP
    assert_as_reference(loaded, [0, 1])


@pytest.mark.parametrize("scheduler", [None, *SCHEDULERS])
def test_the_dummy_is_checked_by_a_plain_loop(scheduler: str | None) -> None:
    assert_as_reference(load("dummy", scheduler=scheduler), [0, 1])


def test_a_reference_knows_of_eta() -> None:
    assert_as_reference(load(scheduler="DDIMScheduler", eta=0.5), [0], eta=0.5)


@pytest.mark.parametrize("guidance_scale", [7.5, 1.0])
def test_guidance_is_rescaled_as_by_the_pipeline(guidance_scale: float) -> None:
    plain = load(guidance_scale=guidance_scale)
    loaded = load(guidance_scale=guidance_scale, guidance_rescale=0.7)
    assert_as_reference(loaded, [0, 1])
    batch, other = (run(one, sampler_of(one), [0])[0] for one in (plain, loaded))
    assert torch.equal(batch.latents, other.latents) == (guidance_scale == 1.0)  # without guidance there is nothing


def test_a_reference_gives_the_brownian_noise_the_seed_of_its_sample() -> None:
    pytest.importorskip("torchsde")
    assert_as_reference(load(scheduler="DPMSolverSDEScheduler"), [2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gives_the_same_bits_too(dtype: torch.dtype) -> None:
    loaded = load(dtype=dtype)
    assert_as_reference(loaded, [0, 1])
    assert loaded.reference(sampler_of(loaded), [0], [1]).dtype == dtype


def test_an_image_size_is_that_of_the_latents_times_eight() -> None:
    loaded = load(model={"height": 64, "width": 128})
    assert loaded.latent_shape == (4, 8, 16)
    assert_as_reference(loaded, [0])


def test_an_image_size_that_latents_do_not_divide_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"model\.width 100"):
        load(model={"width": 100})


def test_the_dummy_has_latents_of_the_size_asked_for() -> None:
    assert load("dummy").latent_shape == (4, 64, 64)
    assert load("dummy", model={"height": 64}).latent_shape == (4, 8, 64)
    with pytest.raises(SettingsError, match=r"model\.height 60") as refused:
        load("dummy", model={"height": 60})
    assert refused.value.hint == "use 56 or 64"


def test_options_of_the_scheduler_reach_the_reference_as_well() -> None:
    loaded = load(scheduler="DPMSolverMultistepScheduler", options="use_karras_sigmas=true, solver_order=3")
    assert loaded.scheduler().config.solver_order == 3
    assert_as_reference(loaded, [0])


def test_the_noise_of_a_sample_does_not_depend_on_its_neighbours() -> None:
    loaded = load()
    sampler = sampler_of(loaded)
    together = loaded.prepare(sampler, [0, 1], [7, 8])
    alone = loaded.prepare(sampler, [1], [8])
    assert torch.equal(together.latents[1:], alone.latents)
    assert torch.equal(together.generators[1].get_state(), alone.generators[0].get_state())


def test_samples_use_the_prompts_in_turn() -> None:
    loaded = load(guidance_scale=1.0)
    sampler = sampler_of(loaded)
    batches = {sample: loaded.prepare(sampler, [sample], [7]) for sample in (0, 1, 3)}
    outputs = {sample: loaded.predict(batch, sampler) for sample, batch in batches.items()}
    assert torch.equal(outputs[0], outputs[3])
    assert not torch.equal(outputs[0], outputs[1])
    assert [loaded.index(sample) for sample in range(4)] == [0, 1, 2, 0]
    assert [load(guidance_scale=1.0, seeds="5,9").index(sample) for sample in range(7)] == [0, 0, 1, 1, 2, 2, 0]


def test_weights_follow_from_the_seed_alone() -> None:
    torch.manual_seed(5)
    one = load(seed=1)
    torch.manual_seed(6)
    assert load(seed=1).weights_digest() == one.weights_digest()
    assert load(seed=2).weights_digest() != one.weights_digest()


def test_a_digest_knows_names_and_types() -> None:
    assert load().weights_digest() != load(dtype=torch.bfloat16).weights_digest()


@pytest.mark.parametrize(
    ("unet", "parameters"), [("sd15", 859_520_964), ("sdxl", 2_567_463_684), ("unet2d", 274_056_163)]
)
def test_the_shapes_are_those_of_the_published_models(unet: str, parameters: int) -> None:
    with torch.device("meta"):
        model = models.build(unet)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_random_text_has_the_shape_that_the_xl_unet_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = dict(models.CONFIGS["sdxl"]) | {
        "block_out_channels": (4, 8, 8),
        "transformer_layers_per_block": 1,
        "attention_head_dim": 2,
        "norm_num_groups": 2,
        "layers_per_block": 1,
        "sample_size": 8,
    }
    monkeypatch.setattr(models, "CONFIGS", {"sdxl": tiny})
    loaded = load("sdxl")
    assert {key: tuple(tensor.shape) for key, tensor in loaded.encode(["one"])[0].items()} == {
        "prompt_embeds": (1, 77, 2048),
        "negative_prompt_embeds": (1, 77, 2048),
        "pooled_prompt_embeds": (1, 1280),
        "negative_pooled_prompt_embeds": (1, 1280),
    }
    assert loaded.reference_name == "diffusers StableDiffusionXLPipeline.__call__"
    assert_as_reference(loaded, [0, 1])


def test_an_evaluation_of_the_dummy_fills_up_its_time_and_most_of_it_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = completed_pipeline({"model.unet": "dummy", "model.step_ms": 250, "sampling.guidance_scale": 1})
    loaded = models.Dummy(settings, CPU, torch.float32)
    sampler = sampler_of(loaded)
    batch = loaded.prepare(sampler, [0, 1], [1, 2])
    clock = _Clock()
    monkeypatch.setattr(models, "time", clock)
    output = loaded.predict(batch, sampler)
    assert output.shape == batch.latents.shape
    assert clock.now == pytest.approx(0.25, abs=0.001)
    assert clock.asleep > 0.24


class _Clock:
    """Stands in for the module `time`; each look at it takes a tenth of a millisecond."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asleep = 0.0

    def perf_counter(self) -> float:
        self.now += 0.0001
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.asleep += seconds


def test_the_first_evaluation_that_differs_is_found() -> None:
    ours = [torch.zeros(2, 3), torch.ones(2, 3), torch.full((2, 3), 4.0)]
    theirs = [torch.zeros(2, 3), torch.ones(2, 3) + torch.tensor([0.0, 0.25, -0.5]), torch.zeros(2, 3)]
    assert denoiser.compare(ours, theirs) == (1, 0.5)
    assert denoiser.compare(ours, ours) is None


def test_a_bit_is_a_difference_even_where_numbers_are_equal() -> None:
    assert denoiser.compare([torch.tensor([0.0])], [torch.tensor([-0.0])]) == (0, 0.0)


def test_a_difference_from_what_is_no_number_is_infinite() -> None:
    assert denoiser.largest_difference(torch.tensor([1.0]), torch.tensor([float("nan")])) == float("inf")


def test_a_hash_does_not_depend_on_the_memory_format() -> None:
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    assert denoiser.sha256(latents.to(memory_format=torch.channels_last)) == denoiser.sha256(latents)
