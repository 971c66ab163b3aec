"""Whether a faster run still trains the same, with planted harm. The figures are in docs/same-work.md."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from recorded_runs import edit, write_run
from scipy.signal import lfilter
from torch import nn

from gpubench.compare import losses
from gpubench.compare.evidence import Series, open_run
from gpubench.compare.intervals import Error
from gpubench.compare.losses import Claim, Judgement, LossCurve, Margin, curves_of, judge
from gpubench.compare.work import CountedWork, less_work, work_of
from gpubench.runs.directory import SUMMARY
from gpubench.tuning.claims import claim_of

TRIALS = [5, pytest.param(500, marks=pytest.mark.stress)]
PARTS = 10.0  # of the steps: the time in which a loss falls fastest


@dataclass
class Training:
    """Losses that fall as a power of the steps, with noise of the data that is common to runs with one seed."""

    rng: np.random.Generator
    steps: int = 60
    fall: float = 2.0
    noise: float = 0.1
    """The standard deviation of the loss of a step by its data, as a share of the fall."""
    spread: float = 0.03
    """That of the loss between seeds."""
    chaos: float = 0.003
    """That of the loss between runs with one seed that round differently, once that has grown."""
    _seeds: dict[int, Series] = field(default_factory=dict)

    def learned(self, step: Series) -> Series:
        return np.asarray(self.fall * (1 - (1 + PARTS * step / self.steps) ** -0.8) / (1 - (1 + PARTS) ** -0.8))

    def of_seed(self, seed: int) -> Series:
        if seed not in self._seeds:
            draws = lfilter([1.0], [1.0, -0.3], self.rng.standard_normal(self.steps + 50))[50:]
            path = np.cumsum(self.rng.standard_normal(self.steps)) / math.sqrt(self.steps)
            path += self.rng.standard_normal() * np.minimum(1, 0.3 + 4 * np.arange(self.steps) / self.steps)
            self._seeds[seed] = self.fall * (self.noise * math.sqrt(1 - 0.3**2) * draws + self.spread * path)
        return self._seeds[seed]

    def apart(self, first: float) -> Series:
        """What rounding adds: relative differences of `first` at first, which grow with every step."""
        walk = np.cumsum(self.rng.standard_normal(self.steps)) / math.sqrt(self.steps)
        size = np.minimum(first * 1.5 ** np.minimum(np.arange(self.steps), 200), self.chaos)
        return np.asarray(self.fall * size * (walk + self.rng.standard_normal(self.steps)))

    def run(self, seed: int, kind: str = "unchanged") -> Series:
        step = np.arange(self.steps, dtype=np.float64)
        learned = LEARNING[kind](self, step)
        added = 0.0 if kind == "unchanged" else self.apart(1e-7 if kind == "rounding" else 1e-4)
        return np.asarray(4 * self.fall - learned + self.of_seed(seed) + added)

    def diverging(self, step: Series) -> Series:
        after = np.maximum(0, step - self.steps * self.rng.uniform(0.8, 0.9)) / (0.04 * self.steps)
        return self.learned(step) - 0.05 * self.fall * np.expm1(after * self.rng.uniform(1, 1.5))

    def disturbed(self, step: Series) -> Series:
        """By noise in the gradients, from the first update on."""
        noise = 0.05 * self.fall * self.rng.standard_normal(self.steps)
        return 0.95 * self.learned(step / 1.5) + np.where(step > 0, noise, 0.0)


LEARNING: dict[str, Callable[[Training, Series], Series]] = {
    "unchanged": Training.learned,
    "rounding": Training.learned,
    "biased": lambda one, step: 0.996 * one.learned(step),
    "not learning": lambda one, step: 1e-4 * one.learned(step),
    "frozen": lambda one, step: 0.8 * one.learned(step),
    "skipping": lambda one, step: one.learned(step / 2),
    "noisy": Training.disturbed,
    "diverging": Training.diverging,
    "one batch": lambda one, step: 1.3 * one.learned(step),
}
HARMLESS: dict[str, Claim] = {"unchanged": "same", "rounding": "rounding", "biased": "type"}
HARMFUL = [kind for kind in LEARNING if kind not in HARMLESS]


def judged(training: Training, kind: str, seeds: int = 1, *, seeded: bool = True) -> Judgement:
    """Of a program whose seed is the same in each run, of runs with several seeds, or of a program that sets none."""
    claim = HARMLESS.get(kind, "type")
    if seeded and seeds == 1:
        own = LossCurve(training.run(0))
        return judge([own, own], [LossCurve(training.run(0, kind))], claim)
    ours = [LossCurve(training.run(seed), seed if seeded else None) for seed in range(seeds)]
    others = range(seeds) if seeded else range(seeds, 2 * seeds)
    return judge(ours, [LossCurve(training.run(seed, kind), seed if seeded else None) for seed in others], claim)


def outcomes(trials: int, kind: str, seeds: int, **how: float) -> Counter[str]:
    rng = np.random.default_rng(3)
    return Counter(judged(Training(rng, **how), kind, seeds).outcome for _ in range(trials))  # type: ignore[arg-type]


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("seeds", [1, 4])
@pytest.mark.parametrize(("steps", "noise", "spread"), [(60, 0.03, 0.01), (60, 0.1, 0.03), (200, 0.3, 0.06)])
@pytest.mark.parametrize("kind", HARMFUL)
def test_harm_is_always_found(kind: str, steps: int, noise: float, spread: float, seeds: int, trials: int) -> None:
    assert outcomes(trials, kind, seeds, steps=steps, noise=noise, spread=spread) == {"harmed": trials}


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("seeds", [1, 4])
@pytest.mark.parametrize(("steps", "noise", "spread"), [(60, 0.03, 0.01), (60, 0.1, 0.03), (200, 0.3, 0.06)])
@pytest.mark.parametrize("kind", HARMLESS)
def test_what_does_no_harm_passes(kind: str, steps: int, noise: float, spread: float, seeds: int, trials: int) -> None:
    found = outcomes(trials, kind, seeds, steps=steps, noise=noise, spread=spread)
    assert found["unharmed"] >= 0.95 * trials
    assert not found["harmed"]


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("kind", [*HARMFUL, *HARMLESS])
def test_noise_makes_a_judgement_unclear_and_never_wrong(kind: str, trials: int) -> None:
    """In a few steps, and without a seed, so that neither the noise of the data nor the weights are common."""
    rng = np.random.default_rng(4)
    for steps, seeds, seeded in ((30, 1, True), (30, 4, False), (100, 4, False)):
        trainings = [Training(rng, steps=steps, noise=0.3, spread=0.06) for _ in range(trials)]
        found = Counter(judged(one, kind, seeds, seeded=seeded).outcome for one in trainings)
        assert found["harmed" if kind in HARMLESS else "unharmed"] <= 0.05 * trials


def test_the_runs_that_are_named_tell() -> None:
    rng = np.random.default_rng(5)
    few = Training(rng, steps=200, noise=0.1, spread=0.03)
    unclear = judged(few, "unchanged", 4, seeded=False)
    assert unclear.outcome == "unclear"
    assert unclear.power is not None
    assert unclear.power < 0.1
    assert unclear.runs is not None
    enough = [
        judged(Training(rng, steps=200, noise=0.1, spread=0.03), "rounding", unclear.runs, seeded=False)
        for _ in range(20)
    ]
    assert sum(one.outcome == "unharmed" for one in enough) >= 14
    assert np.mean([one.power or 0.0 for one in enough]) > 0.8
    assert unclear.runs < 250


def falling(start: float, end: float, steps: int = 400) -> Series:
    """Losses that fall fast at first and hardly any more in the second half, as those of a language model do."""
    return np.asarray(end + (start - end) * np.exp(-np.arange(steps) / (steps / 12)))


@pytest.mark.parametrize("seeds", [1, 4])
@pytest.mark.parametrize(
    ("higher", "outcomes"), [(0.0, {"unharmed"}), (0.004, {"unharmed"}), (0.02, {"unclear", "harmed"})]
)
def test_two_percent_of_the_final_loss_matter_however_far_it_fell(
    higher: float, outcomes: set[str], seeds: int
) -> None:
    rng = np.random.default_rng(0)
    ours, theirs = [], []
    for seed in range(seeds):
        data = 0.05 * rng.standard_normal(400)
        drift = 0.002 * np.cumsum(rng.standard_normal(400)) / 20
        ours.append(LossCurve(falling(10.8, 3.3) + data, seed))
        theirs.append(LossCurve(falling(10.8, 3.3 * (1 + higher)) + data + drift, seed))
    found = judge(ours, theirs, "type")
    assert found.outcome in outcomes, found.reason
    assert found.margin == pytest.approx(0.033, rel=0.02)
    if higher and seeds == 4:
        assert found.outcome == ("harmed" if higher > 0.01 else "unharmed")


def test_the_margin_is_that_of_the_user() -> None:
    ours, theirs = [LossCurve(falling(10.8, 3.3))], [LossCurve(falling(10.8, 3.3 * 1.02))]
    assert judge(ours, theirs, "type").outcome == "unclear"
    assert judge(ours, theirs, "type", margin=Margin(0.05, is_set=True)).outcome == "unharmed"
    assert judge(ours, theirs, "type", margin=Margin(0.1, is_share=False, is_set=True)).outcome == "unharmed"
    assert judge(ours, theirs, "type", margin=Margin(0.001, is_set=True)).outcome == "unclear"


def test_one_percent_of_a_loss_that_goes_to_zero_does_not_matter() -> None:
    found = judge([LossCurve(falling(2.3, 0.001))], [LossCurve(falling(2.3, 0.0015))], "type")
    assert found.outcome == "unharmed"
    assert "of the fall of the loss" in found.reason


def test_a_program_without_a_seed_is_told_how_to_set_one() -> None:
    rng = np.random.default_rng(9)
    ours, theirs = ([LossCurve(falling(4, 2, 60) + rng.normal(0, 0.3, 60))] for _ in range(2))
    assert "--seed 0" in judge(ours, theirs, "type").reason


def test_without_losses_nothing_is_known() -> None:
    curve = LossCurve(np.linspace(2, 1, 30))
    assert {judge([], [curve], "type").outcome, judge([curve], [], "same").outcome} == {"unknown"}
    assert judge([LossCurve(np.full(30, np.nan))], [curve], "type").outcome == "unknown"


def test_a_loss_that_is_not_finite_is_harm() -> None:
    losses = np.linspace(2, 1, 30)
    assert (
        judge([LossCurve(losses)], [LossCurve(np.where(np.arange(30) == 7, np.inf, losses))], "same").outcome
        == "harmed"
    )


def test_losses_are_judged_by_the_steps_that_have_one_on_both_sides() -> None:
    training = Training(np.random.default_rng(0))
    losses = training.run(0)
    numbers = np.arange(len(losses))
    every_second = np.where(numbers % 2, np.nan, losses)
    found = judge([LossCurve(every_second)], [LossCurve(every_second)], "same")
    assert (found.outcome, "all 30 steps" in found.reason) == ("unharmed", True)
    skipped = np.where(np.isin(numbers, [4, 20]), np.nan, losses)
    assert judge([LossCurve(losses)], [LossCurve(skipped)], "same").outcome == "unharmed"
    assert judge([LossCurve(skipped)], [LossCurve(losses)], "same").outcome == "unharmed"
    other_update = np.where(numbers >= 2, every_second * 1.1, every_second)
    assert "at step 2 (counting from 0)" in judge([LossCurve(every_second)], [LossCurve(other_update)], "same").reason
    diverged = np.where(numbers == 41, np.inf, every_second)
    assert "not finite at step 41 " in judge([LossCurve(every_second)], [LossCurve(diverged)], "same").reason
    halves = judge([LossCurve(losses, samples=2.0)], [LossCurve(np.repeat(every_second, 2), samples=1.0)], "same")
    assert halves.outcome == "unharmed"


def test_too_few_steps_with_a_known_loss_are_unclear_and_none_are_unknown() -> None:
    losses = Training(np.random.default_rng(0)).run(0)
    few = np.where(np.arange(len(losses)) % 10, np.nan, losses)
    found = judge([LossCurve(few)], [LossCurve(few)], "same")
    assert (found.outcome, found.steps) == ("unclear", 100)
    assert found.reason.startswith("6 steps with a known loss cannot tell")
    shifted = np.roll(few, 1)
    assert judge([LossCurve(few)], [LossCurve(shifted)], "same").outcome == "unknown"


def test_few_steps_cannot_tell_and_name_how_many_may() -> None:
    curve = LossCurve(np.linspace(2, 1, 9))
    found = judge([curve], [curve], "type")
    assert (found.outcome, found.steps) == ("unclear", 10)
    flat = np.random.default_rng(1).normal(5, 0.1, 40)
    found = judge([LossCurve(flat)], [LossCurve(flat + 0.01 * np.sin(np.arange(40)))], "type")
    assert found.outcome == "unclear"
    assert found.steps is not None
    assert found.steps > 40


def test_the_same_numbers_are_the_same_loss_whether_it_falls_or_not() -> None:
    flat = np.random.default_rng(1).normal(5, 0.1, 40)
    assert judge([LossCurve(flat)], [LossCurve(flat)], "same").outcome == "unharmed"
    assert judge([LossCurve(flat)], [LossCurve(flat * (1 + 5e-7))], "type").outcome == "unharmed"


def test_another_update_of_the_parameters_is_no_rounding() -> None:
    """As by a fused optimizer that decays the weights by mistake: it would not matter yet in so few steps."""
    losses = Training(np.random.default_rng(2)).run(0)
    wrong = losses * (1 + 2e-3 * np.minimum(1, np.arange(60) / 3))
    assert judge([LossCurve(losses)], [LossCurve(wrong)], "rounding", precision="fp32").outcome == "harmed"
    assert judge([LossCurve(losses)], [LossCurve(wrong)], "type").outcome == "unharmed"
    other = losses * (1 + 1e-3 * (np.arange(60) > 0))  # of a baseline that is not deterministic
    assert (
        judge([LossCurve(losses), LossCurve(other)], [LossCurve(wrong)], "rounding", precision="fp32").outcome
        == "unharmed"
    )
    assert judge([LossCurve(losses)], [LossCurve(wrong)], "rounding", precision="bf16").outcome == "unharmed"


def test_other_random_numbers_are_no_harm() -> None:
    """As those of dropout in compiled code, which differ from the first step on."""
    rng = np.random.default_rng(6)
    training = Training(rng, steps=200)
    runs = [LossCurve(training.run(seed), seed) for seed in range(5)]
    drawn = [LossCurve(one.losses + rng.normal(0, 0.02, 200), one.seed) for one in runs]
    assert judge(runs, drawn, "rounding").outcome == "unharmed"


@pytest.mark.parametrize(("last", "outcome"), [(8, "unclear"), (35, "harmed")])
def test_one_pair_whose_loss_is_lower_at_the_end_alone_shows_no_harm(last: int, outcome: str) -> None:
    """As with other random numbers of dropout. A loss that is lower for half of the steps is that of other training."""
    rng = np.random.default_rng(0)
    ours = 1 + 1.3 * np.exp(-np.arange(70) / 20) + rng.normal(0, 0.03, 70)
    theirs = ours + rng.normal(0, 0.01, 70)
    theirs[-last:] -= 0.2
    assert judge([LossCurve(ours), LossCurve(ours)], [LossCurve(theirs)], "type").outcome == outcome


def test_larger_batches_are_judged_after_as_many_samples() -> None:
    """As often updated for the samples, or half as often."""
    rng = np.random.default_rng(7)
    training = Training(rng, steps=200)
    runs = [LossCurve(training.run(seed), seed, samples=8.0) for seed in range(4)]
    doubled = [LossCurve(one.losses.reshape(-1, 2).mean(axis=1), one.seed, samples=16.0) for one in runs]
    assert judge(runs, doubled, "type").outcome == "unharmed"
    behind = [LossCurve(training.run(seed, "skipping").reshape(-1, 2).mean(axis=1), seed, 16.0) for seed in range(4)]
    assert judge(runs, behind, "type").outcome == "harmed"


@pytest.mark.parametrize(
    ("keys", "claim"),
    [
        ((), "same"),
        (("data.workers",), "same"),
        (("data.workers", "training.optimizer_impl"), "rounding"),
        (("model.activation_checkpointing",), "rounding"),
        (("precision", "data.workers"), "type"),
        (("performance.compile",), "type"),
        (("training.learning_rate",), "type"),
    ],
)
def test_the_widest_claim_counts(keys: Sequence[str], claim: Claim) -> None:
    assert claim_of(keys) == claim


BATCH, WIDTH = 32, 20


@cache
def task() -> tuple[torch.Tensor, torch.Tensor]:
    """Samples and their classes, by a network that is to be learned."""
    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(2048, WIDTH, generator=generator)
    hidden = torch.tanh(samples @ torch.randn(WIDTH, 32, generator=generator) * 0.7)
    return samples, (hidden @ torch.randn(32, 10, generator=generator)).argmax(-1)


def train(seed: int, kind: str = "fp32", steps: int = 60) -> LossCurve:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    for layer in (model[0], model[2]):
        layer.requires_grad_(kind != "frozen")
    rate = 1e-9 if kind == "not learning" else 2e-3
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, fused=kind == "fused")
    samples, classes = task()
    losses = []
    for step in range(steps):
        rows = torch.randint(2048, (BATCH,), generator=torch.Generator().manual_seed(1000 * seed + step))
        with torch.autocast("cpu", torch.bfloat16) if kind == "bf16" else nullcontext():
            loss = nn.functional.cross_entropy(model(samples[rows]).float(), classes[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return LossCurve(np.array(losses), seed)


@pytest.fixture(scope="module")
def baseline() -> list[LossCurve]:
    return [train(seed) for seed in range(4)]


@pytest.mark.parametrize("seeds", [1, 4])
@pytest.mark.parametrize(
    ("kind", "claim", "outcome"),
    [
        ("fused", "rounding", "unharmed"),
        ("bf16", "type", "unharmed"),
        ("frozen", "type", "harmed"),
        ("not learning", "type", "harmed"),
    ],
)
def test_real_trainings(baseline: Sequence[LossCurve], kind: str, claim: Claim, outcome: str, seeds: int) -> None:
    found = judge(baseline[:seeds], [train(seed, kind) for seed in range(seeds)], claim)
    assert found.outcome == outcome, found.reason


def test_runs_give_their_losses_and_their_work(tmp_path: Path) -> None:
    path = write_run(tmp_path, ranks=2)
    counted = {"backward_passes": 60, "updated_first": 100, "updated_least": 90}
    edit(path / SUMMARY, work=[None, counted])
    run = open_run(path)
    curves = curves_of(run)
    assert [(curve.seed, curve.samples) for curve in curves] == [(0, 16.0), (0, 16.0)]
    assert curves[0].losses.tolist() == [2 / (1 + step) for step in range(30)]
    assert work_of(run) == CountedWork(samples=16.0, skipped=0, updated=90, passes=2.0, errors={"samples": 0.0})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"samples": 32.0}, ""),
        ({"samples": None}, ""),
        ({"flops": 0.9995e9}, ""),
        ({"samples": 8.0}, "2 times fewer samples are in a step (8 instead of 16)"),
        (
            {"updated": 500_000},
            "2 times fewer elements of parameters get a gradient (500 k instead of 1 M)",
        ),
        ({"forwarded": 8.0}, "2 times fewer samples reach the model (8 instead of 16)"),
        ({"passes": 1.0}, "2 times fewer backward passes are in a step (1 instead of 2)"),
        ({"flops": 0.5e9}, "2 times fewer FLOPs are needed for a sample (500 M instead of 1 G)"),
        ({"skipped": 3}, "3 updates skipped by the gradient scaler instead of 1"),
    ],
)
def test_less_work_is_told(changes: dict[str, float], said: str) -> None:
    work = {"samples": 16.0, "skipped": 1, "updated": 10**6, "passes": 2.0, "flops": 1e9, "forwarded": 16.0}
    assert less_work([CountedWork(**work)], CountedWork(**work | changes)) == said  # type: ignore[arg-type]


def test_work_that_varies_between_equal_runs_is_less_only_beyond_that() -> None:
    equal = [CountedWork(passes=100.0), CountedWork(passes=98.0)]
    assert not less_work(equal, CountedWork(passes=97.0))
    assert less_work(equal, CountedWork(passes=95.0)) == "3.1 % fewer backward passes are in a step (95 instead of 98)"
    assert not less_work([], CountedWork(passes=95.0))


@pytest.mark.parametrize(
    ("estimate", "said"),
    [
        (-0.1, "differs by -0.1 (95 % interval "),
        (0.1, "differs by +0.1 (95 % interval "),
        (-9.0, "is lower by 9 (95 % interval 7.9 to 10)"),
        (9.0, "is higher by 9 (95 % interval 7.9 to 10)"),
    ],
)
def test_no_direction_is_claimed_of_a_loss_whose_interval_has_both(estimate: float, said: str) -> None:
    assert losses._in_words(losses._Change(estimate, Error(0.5, 10))).startswith(said)
