"""Every scheduler of diffusers, cut anywhere: the result is that of a plain loop bit for bit, or it is refused."""

import copy
import importlib.util
import inspect
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import diffusers
import pytest
import torch
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import retrieve_timesteps
from links import handed_off
from places import DOCS
from torch import Tensor

from gpubench.errors import SettingsError
from gpubench.kinds.pipeline.schedulers import (
    REFUSED,
    TORCHSDE,
    Default,
    check_scheduler_name,
    evaluations,
    parameters_of,
    parse_options,
    scheduler_names,
)
from gpubench.kinds.pipeline.worker import packing
from gpubench.kinds.pipeline.worker.sampler import Batch, Sampler, build, create
from gpubench.kinds.pipeline.worker.verification import prove, toy_model

pytestmark = [  # as `build` does for good, which in tests lasts only as long as the test that built
    pytest.mark.filterwarnings("ignore:__array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Should have t:UserWarning"),
]

CPU = torch.device("cpu")
PAGE = (DOCS / "schedulers.md").read_text(encoding="utf-8")
STABLE_DIFFUSION = {
    "_class_name": "PNDMScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "clip_sample": False,
}


@dataclass(frozen=True)
class Row:
    """A line of the table in docs/schedulers.md."""

    scheduler: str
    options: str
    steps: int
    evaluations: int
    draws: bool
    carried: frozenset[str]
    """What hand-offs carry besides the latents."""

    @property
    def eta(self) -> float:
        return float(parse_options(self.options).get("eta", 0))

    @property
    def given(self) -> dict[str, Any]:
        """The options without eta, which is a setting of its own."""
        return {key: value for key, value in parse_options(self.options).items() if key != "eta"}

    @cache  # noqa: B019 - as many as there are lines
    def _created(self) -> Any:
        return create(self.scheduler, self.given, {})

    def created(self) -> Any:
        """Another one for each call. It is a copy, because some classes take a quarter of a second to create."""
        return copy.deepcopy(self._created())

    @cache  # noqa: B019 - as many as there are lines
    def sampler(self, rank: int = 0) -> Sampler:
        """Another one for each rank, as it would be there."""
        sampler = build(self.created(), self.steps, CPU, eta=self.eta)
        prove(sampler, [(evaluation, evaluation + 1) for evaluation in range(sampler.total)], 1, torch.float32)
        return sampler


ROWS = [
    Row(scheduler, options, int(steps), int(evaluations), draws == "yes", frozenset(re.findall(r"`(\w+)`", carried)))
    for scheduler, options, steps, evaluations, draws, carried in re.findall(
        r"^\| (\w+Scheduler) \| (?:`(.*?)`)? *\| (\d+) \| (\d+) \| (yes|no) \| (.*?) \|", PAGE, flags=re.MULTILINE
    )
]
IN_HALF_PRECISION = [
    row for row in ROWS if re.match("PNDM|UniPC|EulerAncestral|DEIS|Heun", row.scheduler) or "sde" in row.options
]


def names(row: Row) -> str:
    return f"{row.scheduler}({row.options})"


def plain_loop(row: Row, latents: Tensor, generators: list[torch.Generator]) -> Tensor:
    """The loop as the pipelines of diffusers write it, each for the schedulers that it is used with."""
    sampler, name = row.sampler(), row.scheduler
    scheduler = copy.deepcopy(sampler.template)
    timesteps = scheduler.timesteps
    if name in ("DDPMWuerstchenScheduler", "SCMScheduler"):
        timesteps = timesteps[:-1]
    if name == "DPMSolverSDEScheduler":
        scheduler.noise_sampler_seed = generators[0].initial_seed()
    parameters = inspect.signature(scheduler.step).parameters
    extra = {key: value for key, value in (("eta", row.eta), ("generator", generators)) if key in parameters}
    old_pred_original_sample = None
    for i, t in enumerate(timesteps):
        scaled = scheduler.scale_model_input(latents, t) if hasattr(scheduler, "scale_model_input") else latents
        output = toy_model(scaled, t, sampler)
        if name == "CogVideoXDPMScheduler":
            latents, old_pred_original_sample = scheduler.step(
                output, old_pred_original_sample, t, timesteps[i - 1] if i > 0 else None, latents, **extra
            )
        elif name == "DDPMWuerstchenScheduler":
            ratio = t.expand(latents.size(0)).to(latents.dtype)
            latents = scheduler.step(model_output=output, timestep=ratio, sample=latents, **extra).prev_sample
        elif name == "UnCLIPScheduler":
            prev_timestep = None if i + 1 == timesteps.shape[0] else timesteps[i + 1]
            latents = scheduler.step(output, t, latents, prev_timestep=prev_timestep, **extra).prev_sample
        else:
            latents = scheduler.step(output, t, latents, **extra, return_dict=False)[0]
    return latents


@pytest.mark.parametrize("row", ROWS, ids=names)
def test_the_schedule_is_the_one_that_pipelines_of_diffusers_set(row: Row) -> None:
    of_class = {"intermediate_timesteps": None} if row.scheduler == "SCMScheduler" else {}
    timesteps, _ = retrieve_timesteps(row.created(), row.steps, CPU, **of_class)
    assert torch.equal(row.sampler().template.timesteps, timesteps)


def test_sigmas_of_a_model_are_the_schedule() -> None:
    sigmas = [1.0, 0.6, 0.3]
    name, options = "FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True}
    timesteps, steps = retrieve_timesteps(create(name, options, {}), 3, CPU, sigmas=sigmas, mu=0.7)
    ours = build(create(name, options, {}), 3, CPU, sigmas=sigmas, mu=0.7)
    assert steps == ours.total == 3
    assert torch.equal(ours.template.timesteps, timesteps)


def noise(sampler: Sampler, seeds: list[int], dtype: torch.dtype) -> tuple[Tensor, list[torch.Generator]]:
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    drawn = torch.cat([torch.randn((1, 4, 8, 8), generator=generator, dtype=dtype) for generator in generators])
    return drawn * sampler.noise_scale, generators


def start(sampler: Sampler, seeds: list[int], dtype: torch.dtype = torch.float32) -> Batch:
    latents, generators = noise(sampler, seeds, dtype)
    return Batch(list(range(len(seeds))), latents, sampler.fresh(seeds[0]), generators)


def advance(sampler: Sampler, batch: Batch, end: int) -> Batch:
    while batch.done < end:
        scaled = sampler.scale(batch, batch.latents)
        sampler.step(batch, toy_model(scaled, sampler.timesteps[batch.done], sampler))
    return batch


def check_every_border(row: Row, seeds: list[int], dtype: torch.dtype) -> None:
    sender, receiver = row.sampler(0), row.sampler(1)
    expected = plain_loop(row, *noise(sender, seeds, dtype))
    assert expected.isfinite().all()
    batch = start(sender, seeds, dtype)
    for border in range(1, sender.total):
        advance(sender, batch, border)
        arrived = handed_off(batch, sender, seeds, receiver)
        assert arrived.done == border
        assert torch.equal(advance(receiver, arrived, receiver.total).latents, expected), f"cut at {border}"
    assert torch.equal(advance(sender, batch, sender.total).latents, expected), "in one piece"


@pytest.mark.parametrize("method", ["__init__", "set_timesteps", "step"])
def test_the_parameters_of_every_scheduler_are_known_without_diffusers_as_with_it(method: str) -> None:
    for name in scheduler_names():
        import_error = name in TORCHSDE and importlib.util.find_spec("torchsde") is None
        function = None if import_error else getattr(getattr(diffusers.schedulers, name), method, None)
        if function is None:
            assert import_error or parameters_of(name, method) is None
            continue
        parameters = [one for one in inspect.signature(function).parameters.values() if one.name != "self"]
        real = {one.name: one.default for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
        read = parameters_of(name, method)
        assert read is not None
        assert list(read) == list(real)
        for key, default in read.items():
            assert (default is Default.required) == (real[key] is inspect.Parameter.empty)
            assert isinstance(default, Default) or default == real[key]


def test_the_page_names_every_scheduler_of_diffusers_once_as_exact_or_refused() -> None:
    exact = {row.scheduler for row in ROWS}
    refused = set(re.findall(r"^\| (\w+Scheduler) \| [^`|]*\|$", PAGE, flags=re.MULTILINE))
    assert exact | refused == set(scheduler_names())
    assert exact & refused == {"HeliosScheduler"}  # exact with stages=1, and refused as it comes
    assert set(REFUSED) <= refused


def test_the_page_claims_that_every_border_of_every_line_is_exact() -> None:
    claims = re.findall(r"\| (\d+)/(\d+) \|$", PAGE, flags=re.MULTILINE)
    assert len(claims) == len(ROWS)
    assert all(exact == borders for exact, borders in claims)


@pytest.mark.parametrize("row", ROWS, ids=names)
def test_a_sample_handed_over_at_any_border_ends_as_in_a_plain_loop(row: Row) -> None:
    sampler = row.sampler()
    assert sampler.total == row.evaluations
    check_every_border(row, [7], torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", IN_HALF_PRECISION, ids=names)
def test_half_precision_survives_a_handoff(row: Row, dtype: torch.dtype) -> None:
    check_every_border(row, [7], dtype)


@pytest.mark.parametrize("row", [row for row in ROWS if row.scheduler != "DPMSolverSDEScheduler"], ids=names)
def test_three_samples_of_a_micro_batch_end_as_in_a_plain_loop_over_the_three(row: Row) -> None:
    sender, receiver = row.sampler(0), row.sampler(1)
    seeds = [3, 4, 5]
    expected = plain_loop(row, *noise(sender, seeds, torch.float32))
    batch = advance(sender, start(sender, seeds), sender.total // 2)
    arrived = handed_off(batch, sender, seeds, receiver)
    assert torch.equal(advance(receiver, arrived, receiver.total).latents, expected)


@pytest.mark.parametrize("row", ROWS, ids=names)
def test_two_samples_in_flight_on_one_sampler_do_not_mix(row: Row) -> None:
    sampler = row.sampler()
    expected = [plain_loop(row, *noise(sampler, [seed], torch.float32)) for seed in (1, 2)]
    batches = [start(sampler, [seed]) for seed in (1, 2)]
    for evaluation in range(sampler.total):
        for batch in batches:
            advance(sampler, batch, evaluation + 1)
    assert [torch.equal(batch.latents, alone) for batch, alone in zip(batches, expected, strict=True)] == [True, True]
    assert Sampler(sampler.template, CPU, row.eta).fingerprint == sampler.fingerprint, "a step wrote to what they share"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_scheduler_that_cannot_be_split_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(REFUSED[name])) as refused:
        create(name, {}, {})
    assert name in refused.value.message


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("HeliosScheduler", {}, "stages=1"),
        ("HeliosScheduler", {"stages": 1, "scheduler_type": "dmd"}, "the caller holds"),
    ],
)
def test_a_configuration_that_cannot_be_split_is_refused_with_its_reason(
    name: str, options: dict[str, Any], reason: str
) -> None:
    scheduler = create(name, options, {})
    with pytest.raises(SettingsError, match=reason):
        build(scheduler, 10, CPU)


def test_growing_latents_are_refused() -> None:
    scheduler = create("FlowMatchLCMScheduler", {"scale_factors": [0.5, 1.0]}, {})
    with pytest.raises(SettingsError, match="grow"):
        build(scheduler, 2, CPU)


def test_a_step_that_needs_what_nobody_holds_is_refused() -> None:
    class Masked(type(create("DDIMScheduler", {}, {}))):  # type: ignore[misc]
        def step(self, model_output: Tensor, timestep: Tensor, sample: Tensor, mask: Tensor) -> None: ...

    with pytest.raises(SettingsError, match="mask, which gpubench does not have"):
        build(Masked(), 10, CPU)


@pytest.mark.parametrize("row", ROWS, ids=names)
def test_evaluations_are_counted_without_diffusers_as_with_it(row: Row) -> None:
    known = 0
    for steps in (1, 2, 3, 4, 9, 24):
        counted = evaluations(row.scheduler, steps, row.given)
        try:
            total = build(row.created(), steps, CPU, eta=row.eta).total
        except SettingsError:  # a number of steps that the class refuses
            continue
        assert counted in (total, None), steps
        known += counted is not None
    assert known or row.scheduler in ("HeliosScheduler", "DPMSolverMultistepInverseScheduler")


def test_what_a_scheduler_raises_at_a_step_is_a_refusal() -> None:
    scheduler = create("SCMScheduler", {"prediction_type": "epsilon"}, {})
    with pytest.raises(SettingsError, match="SCMScheduler so configured fails in its evaluation 0: Unsupported"):
        prove(build(scheduler, 5, CPU), [(0, 5)], 1, torch.float32)


def test_a_keyword_that_a_scheduler_does_not_take_is_no_matter_of_steps() -> None:
    with pytest.raises(SettingsError, match=r"its pipeline sets mu, which .*\.set_timesteps\(\)") as refused:
        build(create("FlowMatchHeunDiscreteScheduler", {}, {}), 5, CPU, mu=1.0)
    assert refused.value.hint == "choose another --scheduler"


def test_without_torchsde_its_two_schedulers_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchsde" else find(name))
    for name in ("DPMSolverSDEScheduler", "CosineDPMSolverMultistepScheduler"):
        with pytest.raises(SettingsError, match="torchsde") as refused:
            create(name, {}, {})
        assert refused.value.hint == "pip install torchsde, in gpubench's environment"


def test_the_names_are_those_of_diffusers_and_reading_them_loads_neither_it_nor_torch() -> None:
    from diffusers import schedulers

    code = "import sys; from gpubench.kinds.pipeline.schedulers import scheduler_names as names; print(*names()); "
    code += "assert not {'torch', 'diffusers'} & sys.modules.keys()"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    listed = {name for name in dir(schedulers) if name.endswith("Scheduler") and not name.startswith("Flax")}
    assert set(printed.stdout.split()) == listed


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("DDIMSheduler", "DDIMScheduler"),
        ("PNDM", "PNDMScheduler"),
        ("heun", "'FlowMatchHeunDiscreteScheduler' or 'HeunDisc"),
        ("xyzzy", "for example"),
    ],
)
def test_an_unknown_scheduler_is_answered_with_the_nearest(wrong: str, nearest: str) -> None:
    with pytest.raises(SettingsError, match=wrong) as refused:
        check_scheduler_name(wrong)
    assert nearest in str(refused.value.hint)


def test_options_are_read_as_the_type_of_their_default() -> None:
    options = parse_options(
        "solver_order=3, use_karras_sigmas=True,beta_end=0.02,algorithm_type=dpmsolver++,thresholding=false"
    )
    config = create("DPMSolverMultistepScheduler", options | {"flow_shift": 2}, {}).config
    assert (config.solver_order, config.use_karras_sigmas, config.thresholding) == (3, True, False)
    assert (config.beta_end, config.algorithm_type, config.flow_shift) == (0.02, "dpmsolver++", 2)


def test_an_option_whose_default_is_none_is_read_as_what_it_looks_like() -> None:
    def rescaled(text: str) -> Any:
        return create("DPMSolverMultistepScheduler", {"variance_type": text}, {}).config.variance_type

    assert [rescaled(text) for text in ("none", "learned", "3", "0.5", "true")] == [None, "learned", 3, 0.5, True]


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"solver_ordr": "3"}, "no option 'solver_ordr'", "did you mean 'solver_order'?"),
        ({"xyzzy": "3"}, "no option 'xyzzy'", "it has num_train_timesteps"),
        ({"solver_order": "many"}, "cannot be 'many'", "default is 2"),
        ({"use_karras_sigmas": "yes"}, "cannot be 'yes'", "default is False"),
        ({"algorithm_type": "magic"}, "magic", "--sampling.options"),
    ],
)
def test_an_option_that_cannot_be_is_named(options: dict[str, str], message: str, hint: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)) as refused:
        create("DPMSolverMultistepScheduler", options, {})
    assert hint in str(refused.value.hint)


@pytest.mark.parametrize("text", ["solver_order", "=3", "a=1,a=2", "a b=1"])
def test_text_that_is_not_options_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="scheduler option"):
        parse_options(text)


def test_another_scheduler_takes_from_the_models_configuration_what_it_knows() -> None:
    config = create("EulerDiscreteScheduler", {"beta_end": "0.5"}, STABLE_DIFFUSION).config
    assert (config.beta_start, config.beta_schedule, config.beta_end) == (0.00085, "scaled_linear", 0.5)
    assert "skip_prk_steps" not in config


def test_what_the_models_scheduler_had_by_default_is_the_other_schedulers_own_default() -> None:
    ours = create("DDIMScheduler", {}, create("PNDMScheduler", {"beta_start": 0.001}, {}).config).config
    assert (ours.beta_start, ours.set_alpha_to_one) == (0.001, True)


@pytest.mark.parametrize(("name", "steps"), [("DDIMScheduler", 5000), ("ConsistencyDecoderScheduler", 3)])
def test_a_number_of_steps_that_the_scheduler_refuses_is_the_users_to_change(name: str, steps: int) -> None:
    with pytest.raises(SettingsError, match=f"{name} cannot be set to {steps} steps"):
        build(create(name, {}, {}), steps, CPU)


def test_sigmas_given_are_the_schedule() -> None:
    scheduler = create("FlowMatchEulerDiscreteScheduler", {}, {})
    assert build(scheduler, 3, CPU, sigmas=[1.0, 0.5, 0.1]).timesteps.tolist() == [1000.0, 500.0, 100.0]


def test_eta_is_refused_where_no_step_would_read_it() -> None:
    with pytest.raises(SettingsError, match=r"sampling\.eta is 0\.5"):
        build(create("EulerDiscreteScheduler", {}, {}), 10, CPU, eta=0.5)


def test_the_callers_scheduler_stays_as_it_was() -> None:
    scheduler = create("DPMSolverMultistepScheduler", {}, {})
    before = dict(vars(scheduler))
    build(scheduler, 10, CPU)
    assert all(vars(scheduler)[key] is value for key, value in before.items())


def test_the_fingerprint_tells_apart_what_would_give_other_samples() -> None:
    def fingerprint(steps: int = 10, name: str = "DDIMScheduler", eta: float = 0.0, **options: Any) -> str:
        return build(create(name, options, STABLE_DIFFUSION), steps, CPU, eta=eta).fingerprint

    others = [
        fingerprint(11),
        fingerprint(name="DDIMParallelScheduler"),
        fingerprint(eta=0.1),
        fingerprint(beta_end=0.013),
        fingerprint(thresholding=True),
    ]
    assert fingerprint() == fingerprint()
    assert len({fingerprint(), *others}) == 6


def test_the_history_that_ipndm_never_reads_again_is_dropped() -> None:
    sampler = build(create("IPNDMScheduler", {}, {}), 20, CPU)
    batch = advance(sampler, start(sampler, [0]), 20)
    assert len(batch.scheduler.ets) == 3


def test_latents_doubled_for_guidance_are_scaled_like_the_latents() -> None:
    sampler = build(create("EulerDiscreteScheduler", {}, {}), 10, CPU)
    batch = start(sampler, [0])
    scaled = sampler.scale(batch, torch.cat([batch.latents] * 2))
    assert torch.equal(scaled, torch.cat([sampler.scale(batch, batch.latents)] * 2))
    assert not torch.equal(scaled[:1], batch.latents)


@pytest.mark.parametrize(
    ("name", "carried"),
    [
        ("DDIMScheduler", ()),
        ("DDPMScheduler", ("generator",)),
        ("PNDMScheduler", ("counter", "ets")),
        ("CogVideoXDPMScheduler", ("old_pred_original_sample", "generator")),
    ],
)
def test_the_proof_tells_what_travels(name: str, carried: tuple[str, ...]) -> None:
    sampler = build(create(name, {}, STABLE_DIFFUSION), 10, CPU)
    prove(sampler, [(0, 3), (3, sampler.total)], 2, torch.float32)
    assert sampler.carried == carried


def test_with_one_rank_nothing_travels() -> None:
    sampler = build(create("DDPMScheduler", {}, {}), 10, CPU)
    prove(sampler, [(0, 10)], 1, torch.float32)
    assert sampler.carried == ()


def test_the_proof_names_scheduler_and_border_where_something_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = build(create("DPMSolverMultistepScheduler", {}, {}), 10, CPU)
    monkeypatch.setattr(packing, "REBUILT", frozenset({"lower_order_nums"}))
    with pytest.raises(SettingsError, match="DPMSolverMultistepScheduler cannot be split between evaluations 3 and 4"):
        prove(sampler, [(0, 4), (4, 7), (7, 10)], 1, torch.float32)


def test_the_proof_refuses_a_scheduler_that_changes_the_type_of_latents() -> None:
    sampler = build(create("SCMScheduler", {}, {}), 5, CPU)
    prove(sampler, [(0, 5)], 1, torch.float32)
    with pytest.raises(SettingsError, match=r"torch\.float16 into \[1, 4, 8, 8\] torch\.float32 at evaluation 0"):
        prove(sampler, [(0, 5)], 1, torch.float16)


def test_the_proof_refuses_a_configuration_that_makes_nan_of_everything() -> None:
    sampler = build(create("UniPCMultistepScheduler", {"solver_type": "bh1"}, {}), 10, CPU)
    with pytest.raises(SettingsError, match="NaN"):
        prove(sampler, [(0, 5), (5, 10)], 1, torch.float32)


def test_one_seed_for_a_whole_micro_batch_is_refused() -> None:
    sampler = build(create("DPMSolverSDEScheduler", {}, {}), 10, CPU)
    with pytest.raises(SettingsError, match="one seed") as refused:
        prove(sampler, [(0, 5), (5, 19)], 2, torch.float32)
    assert refused.value.hint == "set work.micro_batch to 1"


def test_no_advice_of_the_libraries_below_reaches_the_user(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, options in (
            ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"}),
            ("DPMSolverSinglestepScheduler", {}),
            ("DEISMultistepScheduler", {}),
            ("DPMSolverSDEScheduler", {}),
        ):
            sampler = build(create(name, options, {}), 10, CPU)
            advance(sampler, start(sampler, [0]), sampler.total)
    assert capfd.readouterr() == ("", "")
