"""Made-up programs whose speed under each combination of settings is known, and what a search makes of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product

import numpy as np

from gpubench.gain import Gain
from gpubench.tuning.combination import Combination
from gpubench.tuning.conclusion import Conclusion, Factor
from gpubench.tuning.durations import Limit
from gpubench.tuning.knowledge import Result
from gpubench.tuning.search import Search

LARGEST = 0.20  # gain or loss of a setting or of a pair
DRIFT_RUNS = 50  # in which the machine becomes slower by `drift`


@dataclass
class Planted:
    """The log throughput is a sum of effects of levels, of effects of pairs, and of noise."""

    effects: Sequence[Sequence[float]]
    """Of each level of each factor; the first of each is 0."""
    pairs: Mapping[tuple[int, int], float]
    """Of two factors, by their places, where neither has level 0."""
    sigma: float
    rng: np.random.Generator
    drift: float = 0.0
    failing: frozenset[tuple[int, int]] = frozenset()
    """Factors that do not run together."""
    triples: Mapping[tuple[int, int, int], float] = field(default_factory=dict)
    """Effects of three factors, by their places, where none of them has level 0."""
    noisier: Mapping[int, float] = field(default_factory=dict)
    """How many times as large the noise is with a factor, by its place, where it does not have level 0."""
    long: Mapping[int, float] = field(default_factory=dict)
    """How many times as long a run takes with a factor, by its place, where it does not have level 0."""
    made: list[Combination] = field(default_factory=list)

    @property
    def factors(self) -> list[Factor]:
        return [Factor(f"setting {place}", len(levels)) for place, levels in enumerate(self.effects)]

    def truth(self, combination: Combination) -> float:
        """The log throughput above the baseline's; minus infinity if the combination does not run."""
        if any(combination[one] and combination[other] for one, other in self.failing):
            return -math.inf
        own = sum(levels[level] for levels, level in zip(self.effects, combination, strict=True))
        together = [*self.pairs.items(), *self.triples.items()]
        return own + sum(effect for places, effect in together if all(combination[place] for place in places))

    def optimum(self) -> float:
        return max(map(self.truth, product(*(range(len(levels)) for levels in self.effects))))

    def run(self, combination: Combination) -> Result:
        more = math.prod(factor for place, factor in self.noisier.items() if combination[place])
        noise = more * self.sigma * self.rng.standard_normal() - self.drift * len(self.made) / DRIFT_RUNS
        self.made.append(combination)
        rate = self.truth(combination)
        return Result(rate + noise if math.isfinite(rate) else None, seconds=self.seconds(combination))

    def seconds(self, combination: Combination) -> float:
        """The time of a run: 1 of the baseline, half of which the speed decides."""
        more = math.prod(self.long.get(place, 1.0) for place, level in enumerate(combination) if level)
        return more * (0.5 + 0.5 * math.exp(-max(-1.0, self.truth(combination))))


@dataclass(frozen=True)
class Ending:
    """What a search made of a planted program."""

    conclusion: Conclusion
    regret: float
    """By how much the best combination is faster than the one that was found, in log throughput."""
    runs: int
    announced: int
    """The most runs that the search may make, as it says once the noise is known."""
    spent: float
    """The time that the runs took, in units of one of the baseline."""
    missed: Mapping[str, Sequence[bool]]
    """For each kind of interval, whether each of them misses the truth."""
    excess: float | None
    """By how much the logarithm of the gain that is named is above the truth; None if no gain is named as proved."""
    false_pairs: int


def drawn(rng: np.random.Generator, sigma: float, settings: int = 8, drift: float = 0.0, failing: int = 0) -> Planted:
    """Half of the settings help, a quarter does nothing, a quarter hurts; two pairs interact; all sizes are random."""
    signs = rng.choice([1, 1, 0, -1], settings)
    every = list(combinations(range(settings), 2))
    interacting = rng.choice(len(every), min(2, len(every)), replace=False)
    return Planted(
        [(0.0, float(sign * math.log1p(rng.uniform(0, LARGEST)))) for sign in signs],
        {every[place]: float(rng.choice([-1, 1]) * math.log1p(rng.uniform(0, LARGEST))) for place in interacting},
        sigma,
        rng,
        drift,
        frozenset(every[place] for place in rng.choice(len(every), failing, replace=False)),
    )


def fixed(rng: np.random.Generator, sigma: float, drift: float = 0.0) -> Planted:
    """The same effects in any order: two settings that help only together, and the two best nearly cancel."""
    effects = [0.18, 0.10, 0.06, 0.03, 0.0, 0.0, -0.05, -0.12]
    places = rng.permutation(len(effects)).tolist()
    found = [(0.0, 0.0)] * len(effects)
    for place, effect in zip(places, effects, strict=True):
        found[place] = (0.0, effect)
    bundle, cancelling = sorted((places[4], places[5])), sorted((places[0], places[1]))
    return Planted(found, {(bundle[0], bundle[1]): 0.10, (cancelling[0], cancelling[1]): -0.13}, sigma, rng, drift)


def sparse(rng: np.random.Generator, sigma: float, settings: int, drift: float = 0.0) -> Planted:
    """Three settings help, and the others do nothing."""
    helping = dict(zip(rng.choice(settings, 3, replace=False).tolist(), (0.15, 0.10, 0.06), strict=True))
    return Planted([(0.0, helping.get(place, 0.0)) for place in range(settings)], {}, sigma, rng, drift)


def nothing(rng: np.random.Generator, sigma: float, settings: int = 8, drift: float = 0.0) -> Planted:
    """No setting does anything."""
    return Planted([(0.0, 0.0)] * settings, {}, sigma, rng, drift)


def levelled(rng: np.random.Generator, sigma: float, drift: float = 0.0) -> Planted:
    """Five settings of two levels, and three of four, four and three, such as workers, batch size and threads."""
    two = drawn(rng, sigma, 5, drift)
    rising = np.cumsum([0.0, rng.uniform(0, 0.3), rng.uniform(-0.05, 0.1), rng.uniform(-0.1, 0.05)])
    batch = np.cumsum([0.0, *rng.uniform(-0.05, 0.1, 3)])
    threads = np.array([0.0, *rng.uniform(-0.1, 0.1, 2)])
    more = [tuple(float(effect) for effect in effects) for effects in (rising, batch, threads)]
    return Planted([*two.effects, *more], two.pairs, sigma, rng, drift)


def uneven(rng: np.random.Generator, sigma: float, settings: int = 8, times: float = 3.0) -> Planted:
    """As `drawn`, and equal runs with one of the settings differ by `times` as much as others."""
    return replace(drawn(rng, sigma, settings), noisier={int(rng.integers(settings)): times})


def threefold(rng: np.random.Generator, sigma: float, settings: int = 8) -> Planted:
    """As `drawn`, and three of the settings interact by 5 % or more, beyond their effects and those of their pairs."""
    places = sorted(rng.choice(settings, 3, replace=False).tolist())
    effect = float(rng.choice([-1, 1]) * math.log1p(rng.uniform(LARGEST / 4, LARGEST)))
    return replace(drawn(rng, sigma, settings), triples={(places[0], places[1], places[2]): effect})


def large(rng: np.random.Generator, sigma: float, settings: int = 8) -> Planted:
    """As `drawn`, but two of the settings make the program 1.5 to 3 times as fast."""
    planted = drawn(rng, sigma, settings)
    effects = [tuple(levels) for levels in planted.effects]
    for place in rng.choice(settings, 2, replace=False).tolist():
        effects[place] = (0.0, float(rng.uniform(math.log(1.5), math.log(3))))
    return replace(planted, effects=effects)


def slow_to_load(rng: np.random.Generator, sigma: float, drift: float = 0.0) -> Planted:
    """One setting doubles the speed, three matter little, and with one of those a run takes six times as long."""
    return Planted([(0.0, one) for one in (0.69, 0.08, 0.0, -0.05, 0.03)], {}, sigma, rng, drift, long={4: 6.0})


def solve(planted: Planted, most_runs: int | None = None, seed: int = 0, budget: float | None = None) -> Ending:
    """Lets a search make its runs on a planted program, in at most `budget` times the time of one of the baseline."""
    search = Search(planted.factors, seed=seed)
    announced = 0
    spent = 0.0
    while True:
        search.limit(Limit(most_runs, None if budget is None else budget - spent))
        block = search.next()
        if not block:
            break
        spent += sum(map(planted.seconds, block.runs))
        if block.stage != "noise" and not announced:
            announced = search.planned().most
        search.record([planted.run(combination) for combination in block.runs])
    conclusion = search.conclude()
    regret = planted.optimum() - planted.truth(conclusion.best)
    missed, false = _judged(planted, conclusion)
    excess = None
    if conclusion.proved and conclusion.gain:
        excess = math.log(conclusion.gain.ratio) - planted.truth(conclusion.best)
    return Ending(conclusion, regret, len(planted.made), announced, spent, missed, excess, false)


def _judged(planted: Planted, conclusion: Conclusion) -> tuple[dict[str, list[bool]], int]:
    best, baseline = conclusion.best, (0,) * len(planted.effects)
    kinds = ("gain", "with others", "alone", "step by step", "not kept", "pair", "interaction")
    missed: dict[str, list[bool]] = {kind: [] for kind in kinds}

    def judge(kind: str, estimate: Gain | None, one: Combination, other: Combination) -> None:
        if estimate and math.isfinite(truth := planted.truth(one) - planted.truth(other)):
            missed[kind].append(not estimate.low <= math.exp(truth) <= estimate.high)

    judge("gain", conclusion.gain, best, baseline)
    for one in conclusion.contributions:
        place = int(one.factor.split()[-1])
        judge("with others", one.with_others, best, (*best[:place], 0, *best[place + 1 :]))
        alone = (*baseline[:place], one.level, *baseline[place + 1 :])
        judge("alone", one.alone, alone, baseline)
    reached = baseline
    for rung in conclusion.ladder:
        place = int(rung.factor.split()[-1])
        reached = (*reached[:place], rung.level, *reached[place + 1 :])
        judge("step by step", rung.gain, reached, baseline)
    for dropped in conclusion.dropped:
        place = int(dropped.factor.split()[-1])
        with_it = (*best[:place], dropped.level, *best[place + 1 :])
        judge("not kept", dropped.gain, with_it, (*best[:place], 0, *best[place + 1 :]))
    for pair in conclusion.interactions:
        levels = {int(name.split()[-1]): level for name, level in zip(pair.factors, pair.levels, strict=True)}
        both = tuple(levels.get(place, 0) for place in range(len(best)))
        own = (tuple(level if place == other else 0 for other in range(len(best))) for place, level in levels.items())
        if math.isfinite(truth := planted.truth(both) - sum(map(planted.truth, own))):
            missed["interaction"].append(not pair.effect.low <= math.exp(truth) <= pair.effect.high)
    false = 0
    for pair in conclusion.pairs:
        places = tuple(sorted(int(name.split()[-1]) for name in pair.factors))
        together = [*planted.pairs.items(), *planted.triples.items()]
        effect = next((effect for which, effect in together if which == places), None)
        false += effect is None
        missed["pair"].append(not pair.effect.low <= math.exp(effect or 0.0) <= pair.effect.high)
    return missed, false
