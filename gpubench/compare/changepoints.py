"""Finds the change points of a series of runs: where its level changed, by how much, and how sure that is.

The logarithms of the runs are a level, steps, single outliers, and noise whose variance is unknown. The noise may be
correlated between neighbours and within a day, the level may drift smoothly, and the machine itself may become slower,
which the reference workload shows. How strong each of these is, is not estimated: each combination of a grid is a
model, and the models are weighted by how probable they make the series. So a step has to explain it better than
outliers, drift and machine do. The formulas are those of the linear model with a conjugate prior: inverse gamma for
the variance, normal for a step. The level, and what was found before, have flat priors.

The constants were chosen on series of `tests/support/drifting.py` with other seeds than those that its error rates are
for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.intp]

SURE = 0.8
"""The probability from which a change point is reported."""
FEWEST = 3
"""Runs before the first change point and after the last one, at least: fewer cannot be told from outliers."""
SHORTEST = 5
"""Runs between two change points, at least: what goes away sooner is a disturbance."""
MOST = 160
"""Runs that are searched at a time: the time of a search grows with their third power."""
SAME = 2
"""Runs by which two searches may place one change differently."""

POWER = 2.0
"""A run may change by this power of the change of the reference workload."""
NEAR = 8
"""The runs on each side that show a change of the reference workload: over more, a drift would look like one."""
NOTICED = 3.0
"""The reference workload counts as changed by at least so many standard errors."""

# Variance of the part of the noise that is correlated, in units of the rest, its correlation with the run before, and
# the prior share of such series. The others are alike: the variance of the days' levels; a drift's standard deviation
# in units of the noise, and the runs over which it changes, relative to all; and the power of the reference workload.
_CORRELATED = ((0.0, 0.0, 0.6), (1.0, 0.5, 0.4))
_DAILY = ((0.0, 0.6), (1.0, 0.4))
_DRIFTING = ((0.0, 1.0, 0.5), (2.0, 1.0, 0.3), (6.0, 1.0, 0.2))
# Series of which nothing but the days varies besides: those whose correlation lasts, and those that wander, as in
# cycles, of which the second figure is a number of runs.
_PERSISTENT = (8.0, 0.8, 0.05)
_WANDERING = ((2.0, 4.0, 0.0025), (6.0, 4.0, 0.0025), (2.0, 8.0, 0.0025), (6.0, 8.0, 0.0025))
# Series whose days differ more than their runs: the variance of the days' levels, up to a hundred times the runs'
# standard deviation.
_OF_DAYS = tuple((8.0 * 6.0**power, 0.1) for power in range(5))
_INDEPENDENT, _STEADY = (0.0, 0.0, 1.0), (0.0, 1.0, 1.0)
_OF_MACHINE = ((0.0, 0.5), (1.0, 0.3), (1.8, 0.2))
_STEPS = 2.0  # expected number of steps in a series
_OUTLIERS = 0.03  # share of the runs
_DISTURBANCES = 0.01  # share of the runs at which one of two or more runs begins, divided among its lengths
_STEP_SIZE, _OUTLIER_SIZE = 3.0, 20.0  # standard deviations, in units of the noise
# Larger steps, and their prior share, in series of which nothing but the days varies besides. Without them any other
# explanation of a change by half would be better than a step, as that of two days which happen to differ by as much.
_LARGE_STEPS = ((20.0, 0.05), (130.0, 0.05))
_NOISE = 0.005  # the prior of the noise is worth two runs of this standard deviation
_LOG_DISTURBANCE = math.log(_DISTURBANCES / (SHORTEST - 2))
_EQUAL = 1e-9  # a difference of rounding: of the places before and after an outlier, which explain as much, the first
_NEGLIGIBLE = 1e-6  # of the largest share of a model, and of the end of an interval
_FARTHEST = 6.0  # standard deviations that hardly anything lies beyond
_UNUSUAL = 3.0  # standard errors of a run from its repeats, relative to the median run's, that make it count less


@dataclass(frozen=True)
class ChangePoint:
    """A change of the level between the runs `index` - 1 and `index`."""

    index: int
    first: int
    """The 95 % interval of the index begins here, and ends with `last`."""
    last: int
    probability: float
    """Of a change by more than the margin, rather than outliers, drift, noise or the machine."""
    change: float
    """The change of the level, as a difference of logarithms."""
    half_width: float
    """Half of the 95 % interval of the change, over all models and places."""
    cause: Literal["code", "machine"] = "code"
    """Whether the change of the reference workload explains it, so that it is the machine's."""


def find(
    values: Floats,
    *,
    days: Sequence[str] | None = None,
    errors: Floats | None = None,
    reference: Floats | None = None,
    margin: float = 0.005,
) -> list[ChangePoint]:
    """Returns the change points of `values`, the logarithms of a series of runs, in order.

    `errors` are the standard errors of the runs from their repeats, NaN where unknown: a run whose repeats differ far
    more than those of others counts less. `days` has the day of each run, and `reference` the logarithm of the time of
    the reference workload. Changes up to `margin`, as a difference of logarithms, do not count.
    """
    if reference is None or not np.isfinite(reference).all():
        return _in_windows(values, days, errors, [None], margin)[0]
    alone, found = _in_windows(values, days, errors, [None, reference], margin)
    extra = [one for one in alone if not any(abs(one.index - other.index) <= SAME for other in found)]
    judged = [_attributed(one, [*found, *extra], values, reference) for one in (*found, *extra)]
    kept = [one for one in judged if one.cause == "machine" or one.index in {other.index for other in found}]
    return sorted(kept, key=lambda one: one.index)


def _attributed(one: ChangePoint, every: Sequence[ChangePoint], values: Floats, reference: Floats) -> ChangePoint:
    """Attributes the change point to the machine if the reference workload explains it.

    It does if it changed there too, and enough for what `gpubench compare` allows for: its change to the power of
    POWER.
    """
    before = max((other.index for other in every if other.index < one.index), default=0)
    after = min((other.index for other in every if other.index > one.index), default=len(values))
    near = slice(max(before, one.index - NEAR), one.index), slice(one.index, min(after, one.index + NEAR))
    sides = [reference[part] for part in near]
    moved = float(np.median(sides[1]) - np.median(sides[0]))
    noise = np.concatenate([side - np.median(side) for side in sides])
    error = float(np.std(noise)) * math.sqrt(1 / len(sides[0]) + 1 / len(sides[1]))
    whole = float(np.median(values[near[1]]) - np.median(values[near[0]]))
    established = abs(moved) > NOTICED * error and moved * whole > 0
    explained = abs(whole) <= POWER * abs(moved) + one.half_width
    return replace(one, cause="machine") if established and explained else one


def _in_windows(
    values: Floats,
    days: Sequence[str] | None,
    errors: Floats | None,
    references: Sequence[Floats | None],
    margin: float,
) -> list[list[ChangePoint]]:
    """Searches a long series in windows that overlap by half, of which the middle halves count.

    Returns the change points with each of `references`, all of which have the same models.
    """
    n = len(values)
    found: list[list[ChangePoint]] = [[] for _ in references]
    starts = list(range(0, max(1, n - MOST // 2), MOST // 2))
    for start in starts:
        part = slice(start, min(n, start + MOST))
        length = part.stop - start
        low = start if start == starts[0] else start + MOST // 4
        high = n if start == starts[-1] else start + 3 * MOST // 4
        if length < 2 * FEWEST:
            continue
        inflation = _inflation(length, None if errors is None else errors[part])
        models = _models(length, None if days is None else days[part], inflation)
        for points, reference in zip(found, references, strict=True):
            series = _Series(values[part], None if reference is None else reference[part], models, margin)
            for one in series.search():
                if low <= start + one.index < high:
                    first, last = start + one.first, start + one.last
                    points.append(replace(one, index=start + one.index, first=first, last=last))
    return found


class _Series:
    """A series whose change points are searched for."""

    def __init__(self, values: Floats, reference: Floats | None, models: "_Models", margin: float) -> None:
        self.n, self.models, self.margin = len(values), models, margin
        values = values - np.mean(values)
        of_machine = np.zeros(self.n) if reference is None else reference - np.mean(reference)
        powers = _OF_MACHINE if reference is not None else ((0.0, 1.0),)
        self.values = np.stack([values - power * of_machine for power, _ in powers])
        self.log_shares = np.log([share for _, share in powers])
        self.positions = np.arange(2, self.n - 1)  # also the ones too near to an end, which are not change points yet
        self.log_step = math.log(_STEPS / max(_STEPS, len(self.positions)))

    def search(self) -> list[ChangePoint]:
        """Adds the most probable step, pair of steps or disturbance, until none is; leaves out what is not sure.

        The runs of a disturbance need not differ by the same amount, so each of them is an outlier from then on.
        """
        steps: list[int] = []
        outliers: list[int] = []
        while len(steps) + len(outliers) < self.n // 3:
            kind, where = self._best(steps, outliers)
            if not where:
                break
            if kind == "outlier":
                outliers += where
            elif kind == "disturbance":
                outliers += [run for run in range(*where) if run not in outliers]
            else:
                steps = sorted([*steps, *where])
        while steps:
            found = [self._described(step, steps, outliers) for step in steps]
            weakest = min(found, key=lambda one: one.probability)
            if weakest.probability >= SURE:
                return [one for one in found if FEWEST <= one.index <= self.n - FEWEST]
            steps.remove(steps[found.index(weakest)])
        return []

    def _fitted(self, steps: Sequence[int], outliers: Sequence[int]) -> "_Fits":
        return _Fits(self.models, _columns(self.n, steps, outliers), self.values, self.log_shares)

    def _best(self, steps: Sequence[int], outliers: Sequence[int]) -> tuple[str, list[int]]:
        """Returns the most probable kind of addition, and its most probable places; none if nothing is the best."""
        allowed, free = self._allowed(steps), np.setdiff1d(np.arange(self.n), outliers)
        pairs, disturbed = _pairs(allowed), self._disturbed(outliers)
        fits = self._fitted(steps, outliers)
        weights = {
            "nothing": _total(fits.evidence()),
            "step": _total(fits.with_step(allowed)) + self.log_step,
            "outlier": _total(fits.with_outlier(free)) + math.log(_OUTLIERS),
            "disturbance": _total(fits.with_disturbance(*disturbed)) + _LOG_DISTURBANCE,
            "pair": _total(fits.with_steps(*pairs)) + 2 * self.log_step,
        }
        places = {"step": (allowed,), "outlier": (free,), "disturbance": disturbed, "pair": pairs, "nothing": ()}
        masses = {kind: float(np.logaddexp.reduce(found)) for kind, found in weights.items() if found.size}
        kind = max(masses, key=masses.__getitem__)
        best = int(np.argmax(weights[kind] >= weights[kind].max() - _EQUAL))
        return kind, [int(each[best]) for each in places[kind]]

    def _disturbed(self, outliers: Sequence[int]) -> tuple[Places, Places]:
        """Returns for all possible disturbances the first run, and the one after the last.

        A disturbance ends before the series does. Until then it cannot be told from a step.
        """
        free = np.ones(self.n, bool)
        free[list(outliers)] = False
        first, length = (each.ravel() for each in np.meshgrid(np.arange(1, self.n), range(2, SHORTEST), indexing="ij"))
        after = first + length
        inside = after < self.n
        first, after = first[inside], after[inside]
        known = np.concatenate([[0], np.cumsum(free)])
        new = known[after] > known[first]
        return first[new], after[new]

    def _allowed(self, steps: Sequence[int]) -> Places:
        """Returns the places that are far enough from all steps."""
        near = np.zeros(self.n + 1, bool)
        for step in steps:
            near[max(0, step - SHORTEST + 1) : step + SHORTEST] = True
        return self.positions[~near[self.positions]]

    def _described(self, step: int, steps: Sequence[int], outliers: Sequence[int]) -> ChangePoint:
        """Returns what is known of a step, given the places of the others."""
        others = [one for one in steps if one != step]
        below = max((one for one in others if one < step), default=0)
        above = min((one for one in others if one > step), default=self.n)
        allowed = self._allowed(others)
        allowed = allowed[(allowed > below) & (allowed < above)]
        fits = self._fitted(others, outliers)
        weights = fits.with_step(allowed) + self.log_step
        means, errors = fits.size_of(allowed)
        nothing = float(_total(fits.evidence())[0])
        total = float(np.logaddexp.reduce(weights, axis=None))
        shares = np.exp(weights - total)  # shape (models, rows, places)
        mean = float(np.sum(shares * means))
        beyond = np.sum(shares * _below((np.sign(mean) * means - self.margin) / errors))
        by_place = shares.sum(axis=(0, 1))
        order = np.argsort(by_place)[::-1]
        within = allowed[order[: int(np.searchsorted(np.cumsum(by_place[order]), 0.95)) + 1]]
        return ChangePoint(
            index=int(allowed[np.argmax(by_place >= by_place.max() * (1 - _EQUAL))]),
            first=int(within.min()),
            last=int(within.max()),
            probability=float(beyond) / (1 + math.exp(min(700.0, nothing - total))),
            change=mean,
            half_width=_half_width(shares.ravel(), means.ravel() - mean, errors.ravel()),
        )


@dataclass(frozen=True)
class _Models:
    """All combinations of correlation, days and drift."""

    log_priors: Floats
    """Shape (models,)."""
    inverses: Floats
    """The inverse covariances, in units of the noise's variance, shape (models, runs, runs)."""
    log_determinants: Floats
    """Those of the covariances, shape (models,)."""
    of_steps: Floats
    """The sums of an inverse covariance over the runs after each two steps, shape (models, runs + 1, runs + 1)."""
    step_sizes: Floats
    """The standard deviations of the steps, in units of the noise, shape (models, 1)."""


class _Fits:
    """All models with given columns, applied to rows of values: the logarithm of the evidence, also with more columns.

    A step is a sum over the runs after it, so what a step explains comes from sums of the inverse covariance, less what
    the columns explain already. The evidence has the shape (models, rows, places).
    """

    def __init__(self, models: _Models, columns: Floats, values: Floats, log_shares: Floats) -> None:
        """`values` has the shape (rows, runs), and `log_shares` (rows,)."""
        weighted = models.inverses @ columns
        normal = columns.T @ weighted
        solved: Floats = np.asarray(np.linalg.solve(normal, _transposed(weighted)), float)
        self._of_outlier = _diagonal(models.inverses) - np.sum(_transposed(weighted) * solved, axis=1)
        self._score = values @ models.inverses - (values @ weighted) @ solved
        self._of_steps, self._step_sizes = models.of_steps, models.step_sizes
        self._after = _sums_after(weighted)
        self._solved_after = _transposed(_sums_after(_transposed(solved)))
        of_step = _diagonal(models.of_steps) - np.sum(_transposed(self._after) * self._solved_after, axis=1)
        self._of_step = np.maximum(of_step, _EQUAL)  # nothing is left of a step that the columns explain
        self._step_score = _transposed(_sums_after(_transposed(self._score)))
        self._squares = np.sum(values * self._score, axis=2)[:, :, None]
        self._freedom = columns.shape[0] - columns.shape[1]
        log_evidence = models.log_priors - (models.log_determinants + np.linalg.slogdet(normal)[1]) / 2
        self._base = log_evidence[:, None, None] + log_shares[:, None]

    def evidence(self) -> Floats:
        """Returns the evidence without a further column, as for one place."""
        return self._evidence(np.zeros_like(self._base), np.ones((len(self._base), 1)))

    def with_step(self, places: Places) -> Floats:
        return self._with_one(self._step_score[:, :, places], self._of_step[:, places], self._step_sizes)

    def with_outlier(self, places: Places) -> Floats:
        return self._with_one(self._score[:, :, places], self._of_outlier[:, places], _OUTLIER_SIZE)

    def with_disturbance(self, first: Places, after: Places) -> Floats:
        """Returns the evidence with runs that differ by one amount: a step, and the same step back."""
        explained = np.sum(_transposed(self._after)[:, :, first] * self._solved_after[:, :, after], axis=1)
        both = self._of_steps[:, first, after] - explained
        gram = np.maximum(self._of_step[:, first] + self._of_step[:, after] - 2 * both, _EQUAL)
        score = self._step_score[:, :, first] - self._step_score[:, :, after]
        return self._with_one(score, gram, _OUTLIER_SIZE)

    def with_steps(self, first: Places, second: Places) -> Floats:
        """Returns the evidence with two steps each."""
        diagonal = self._of_step + self._step_sizes**-2.0
        both = self._of_steps - self._after @ self._solved_after
        a, c = diagonal[:, first], both[:, first, second]
        left = diagonal[:, second] - c * c / a  # of the second step, beside the first one
        apart = self._step_score.take(second, axis=2)
        apart -= (c / a)[:, None] * self._step_score.take(first, axis=2)
        explained = np.square(apart, out=apart)
        explained /= left[:, None]
        explained += (np.square(self._step_score) / diagonal[:, None]).take(first, axis=2)
        return self._evidence(explained, a * left * self._step_sizes**4)

    def size_of(self, places: Places) -> tuple[Floats, Floats]:
        """Returns the sizes of steps, one at a time, and their standard deviations."""
        score, gram = self._step_score[:, :, places], self._of_step[:, None, places]
        left = np.maximum(0.0, self._squares - np.square(score) / gram)
        return score / gram, np.sqrt((2 * _NOISE**2 + left) / max(1.0, self._freedom - 1) / gram)

    def _with_one(self, score: Floats, gram: Floats, size: float | Floats) -> Floats:
        return self._evidence(np.square(score) / (gram + size**-2.0)[:, None], 1 + size**2 * gram)

    def _evidence(self, explained: Floats, determinants: Floats) -> Floats:
        """Returns the evidence. `explained` has its shape, and is overwritten; `determinants` (models, places)."""
        found: Floats = np.subtract(self._squares, explained, out=explained)
        np.maximum(found, 0.0, out=found)
        found /= 2
        found += _NOISE**2
        np.log(found, out=found)
        found *= -(self._freedom / 2 + 1)
        found += self._base
        found -= np.log(determinants)[:, None] / 2
        return found


def _models(n: int, days: Sequence[str] | None, inflation: Floats) -> _Models:
    apart = np.abs(np.subtract.outer(np.arange(n), np.arange(n))).astype(float)
    names = np.array(days if days is not None else np.arange(n))
    same_day = (names[:, None] == names[None, :]).astype(float)
    daily = _DAILY if 1 < len(np.unique(names)) < n else ((0.0, 1.0),)
    covariances, priors = [], []
    kinds = [*product(_CORRELATED, _DRIFTING), (_PERSISTENT, _STEADY)]
    kinds += [(_INDEPENDENT, (size, runs / n, share)) for size, runs, share in _WANDERING]
    usual = [(_STEP_SIZE, 1.0)]
    models = [*product(kinds, daily, usual), *product([(_INDEPENDENT, _STEADY)], daily, _LARGE_STEPS)]
    if len(daily) > 1:
        models += product(product([_INDEPENDENT], _DRIFTING), _OF_DAYS, usual)
    for ((alike, correlation, first), (drift, length, third)), (of_day, second), (_, fourth) in models:
        covariance = (np.diag(inflation) + alike * correlation**apart + of_day * same_day) / (1 + of_day)
        covariances.append(covariance + drift**2 * np.exp(-0.5 * np.square(apart / (length * n))))
        priors.append(first * second * third * fourth)
    every = np.stack(covariances)
    inverses = np.linalg.inv(every)
    of_steps = _sums_after(_transposed(_sums_after(inverses)))
    sizes = np.array([[size] for _, _, (size, _) in models])
    return _Models(np.log(priors), inverses, np.linalg.slogdet(every)[1], of_steps, sizes)


def _diagonal(matrices: Floats) -> Floats:
    return np.diagonal(matrices, axis1=1, axis2=2)


def _transposed(matrices: Floats) -> Floats:
    return matrices.swapaxes(1, 2)


def _sums_after(rows: Floats) -> Floats:
    """Returns, for each matrix and row, the sum of that row and all after it, and a last row of zeros."""
    matrices, n, columns = rows.shape
    sums = np.zeros((matrices, n + 1, columns))
    np.cumsum(rows[:, ::-1], axis=1, out=sums[:, -2::-1])
    return sums


def _inflation(n: int, errors: Floats | None) -> Floats:
    """Returns the factors on the variances of runs, above 1 for runs whose repeats differ unusually."""
    if errors is None or not np.isfinite(errors).any() or (usual := float(np.nanmedian(errors))) <= 0:
        return np.ones(n)
    return np.maximum(1.0, np.square(np.where(np.isfinite(errors), errors, usual) / usual / _UNUSUAL))


def _columns(n: int, steps: Sequence[int], outliers: Sequence[int]) -> Floats:
    """Returns the level, the steps and the outliers as columns."""
    runs = np.arange(n)[:, None]
    return np.hstack([np.ones((n, 1)), runs >= np.array(steps, int), runs == np.array(outliers, int)])


def _pairs(allowed: Places) -> tuple[Places, Places]:
    first, second = np.meshgrid(allowed, allowed, indexing="ij")
    apart = second - first >= SHORTEST
    return first[apart], second[apart]


def _total(logarithms: Floats) -> Floats:
    """Returns the logarithm of the sum over all models and rows; -inf where it is negligible beside the largest one.

    `logarithms` has the shape (models, rows, places), and is overwritten.
    """
    if not logarithms.size:
        return np.zeros(0)
    largest = float(logarithms.max())
    logarithms -= largest
    with np.errstate(divide="ignore"):
        found: Floats = largest + np.log(np.exp(logarithms, out=logarithms).sum(axis=(0, 1)))
    return found


def _half_width(shares: Floats, means: Floats, errors: Floats) -> float:
    """Returns the distance from 0 within which 95 % of a mixture of normal distributions lie.

    Its standard deviation would not do: a model of days that differ by a lot has a small share and a large error.
    """
    counts = shares > _NEGLIGIBLE * shares.max()
    shares, means, errors = shares[counts], means[counts], errors[counts]
    low, high = 0.0, float(np.max(np.abs(means) + _FARTHEST * errors))
    while high - low > _NEGLIGIBLE * high:
        middle = (low + high) / 2
        outside = _below((-middle - means) / errors) + _below((means - middle) / errors)
        low, high = (middle, high) if np.sum(shares * outside) > 0.05 else (low, middle)
    return high


def _below(x: Floats) -> Floats:
    erfc = [math.erfc(-one / math.sqrt(2)) / 2 for one in x.ravel().tolist()]
    return np.array(erfc).reshape(x.shape)
