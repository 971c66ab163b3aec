"""Decides which of a program's batches are for training, how many samples they have, and which time is evaluation.

A batch trains if a backward pass, or an update without one, follows it before the next batch is drawn. That is known
only afterwards, so that the batches of a part of the loop wait until then: `settle` counts those that train, and makes
evaluation of the time that the others have taken. Batches of different DataLoaders between which no module is called,
as those of `zip(labelled, unlabelled)`, belong together, and the samples of all of them count.

What is seen of a batch that no backward pass follows: whether gradients were off, or the modules in evaluation mode,
when it was drawn; whether modules were called then; whether the pass over the data ended; and whether its DataLoader
has trained before. Calls without gradients alone are not evaluation: teachers, target networks and rollouts make them.
They are evaluation after a pass over the data for training, if the next batch comes from a DataLoader that has trained
before, and not from one that may hold their results. Evaluation mode between each batch and its update is none.

A program may draw each batch while it still has the one before it, as Accelerate does. Its first part draws one batch
more than it uses, and the last one fewer. The samples of such a batch count where the next one is drawn.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Iterator, Mapping, Sequence
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.utils.data.dataloader import _DatasetKind

from .observed import first_tensor, is_vector
from .timeline import EVALUATION, LoopPart

REGULAR = 3
"""Updates in a row with a batch of the same pass over a DataLoader, after which such batches count as training."""
DOUBTS = 2
"""Updates in a row that follow a batch drawn as for evaluation, after which its DataLoader counts as training."""
NESTS = 2
"""Batches for each of which a pass over another DataLoader has trained, after which such batches are not samples."""
UNDRAWN = 8
"""Updates in a row without a batch, after which what the model is given counts: the program trains with batches that it
has kept. Those with a batch of a pass that goes on are fewer."""
MOST_WAITING = 4096
"""The largest number of batches whose indices are known before they arrive."""
INDICES = "indices drawn by"
CONSTANT = "samples in the batches of"
DIMENSION = "entries of the tensors in the batches of"
ROWS = "rows of the batches that the dataset makes for"
"""What the samples of a batch are, before the name of its DataLoader."""
OF_MODEL, OF_LOSS = "entries of the first tensor that {} is given", "rows of the loss of {}"
"""What they are where no DataLoader is drawn from."""


@dataclass(eq=False)
class Loader:
    """What is known of a DataLoader."""

    trains: bool = False
    nests: int = 0
    """The number of its batches for each of which a pass over another DataLoader has trained more than once."""
    doubts: int = 0
    """The updates in a row before which only batches of it were drawn, as for evaluation."""
    counted: str = ""
    """How the samples of its batches are counted."""
    doubtful: bool = False
    """Whether no two parts of a batch have as many entries, so that nothing shows which of them are samples."""
    sampler: int = 0
    """The identity of its sampler."""
    dataset: ref[Any] | None = None
    """Its dataset, if there are references to it that do not keep it."""
    again: bool = False
    """Whether another DataLoader has trained with the same dataset before."""
    ahead: bool | None = None
    """Whether its batches are drawn before the ones before them are used; None while that is unknown."""
    rows: int | None = 0
    """The rows of the batches that its dataset seems to make, each with one index: 0 before the first one, and None
    if they vary, as those of clouds of points do, so that they are not samples."""


@dataclass(eq=False)
class DataPass:
    """One pass over a DataLoader."""

    loader: Loader
    iterator: ref[Any] | None = None
    sizes: deque[int | None] = field(default_factory=lambda: deque(maxlen=MOST_WAITING))
    """The numbers of indices of the batches that have not arrived yet, None where it is unknown."""
    drawn: int = 0
    """The batches that have arrived; `before` is their number at the last update while `Loader.ahead` is unknown."""
    before: int = 0
    first: int = 0
    """The number of those that the first part drew; 0 before its end."""
    ahead: bool = False
    """Whether the last batch counts where the next one is drawn, or where the pass ends; `held` are its samples."""
    held: int = 0
    uneven: bool = False
    """Whether the rows of a batch were others than `Loader.rows`, as those of the last batch are."""
    within: tuple[DataPass, int] | None = None
    """The pass whose batch was drawn before the first one of this pass, without a call in between, and its batches."""
    trains: bool = False
    seen: int = 0
    """The number of the last decision about a batch of it; `row` is the number of such decisions in a row."""
    row: int = 0


class BatchStretch:
    """Successive batches of one pass over a DataLoader. The numbers are those of the part's marks, -1 for none.

    The attributes of the class are their values at first, because nearly every step makes one, and changes few.
    """

    samples = 0
    latest = 0
    """The samples of the batch that was drawn last, as far as `samples` has them."""
    failed = 0
    """Those of the batch that was drawn last if the call of a module with it has raised an error."""
    without = False
    """Whether modules were called without gradients or in evaluation mode."""
    forward = -1
    """Where the first call began that may train."""
    drained = False
    """Whether the pass over the data ended with these batches; `over` if modules were called before that."""
    over = False
    resumed = -1
    """Where the first call began that may train after the end of the pass."""
    left = -1
    """Where the program has done since what is no evaluation; see `DrawnBatches.leave`."""

    def __init__(self, data_pass: DataPass, evaluates: bool, began: int) -> None:
        self.data_pass = data_pass
        self.evaluates = evaluates
        """Whether gradients were off, or the modules in evaluation mode, when the batches were drawn."""
        self.began = began

    @property
    def called(self) -> bool:
        return self.without or self.forward >= 0


class DrawnBatches:
    """The batches of the thread that trains."""

    def __init__(self) -> None:
        self._passes_by_iterator: WeakKeyDictionary[Any, DataPass] = WeakKeyDictionary()
        """Those of the iterators of DataLoaders."""
        self._latest: tuple[ref[Any] | None, DataPass] = None, DataPass(Loader())
        """The iterator that was asked for last, and its pass."""
        self._loaders: WeakKeyDictionary[Any, Loader] = WeakKeyDictionary()
        """Those of the samplers of DataLoaders, or of their datasets where these are of no class of Python."""
        self._waiting: list[BatchStretch] = []
        self.trained = self.drawing = False
        """Whether a DataLoader trains; whether one is waited for, which may itself draw from others."""
        self.tells = False
        """Whether the samples are those of DataLoaders: if one trains, and is still drawn from."""
        self.doubtful = False
        """Whether it is uncertain what the samples of a batch for training are."""
        self._decisions = 0
        self._doubted: Loader | None = None
        self._undecided: list[DataPass] = []
        """Those whose batches may be drawn ahead, or two for each update."""
        self._settled = 0
        """The backward passes since the last update."""
        self._between = False
        """Whether a pass over data for training has ended, and no module has been called since."""
        self._inside = 0
        """The successive decisions about a batch that trains before which the modules were in evaluation mode."""
        self._datasets: WeakSet[Any] = WeakSet()
        """Those of the DataLoaders that have trained."""
        self._training: ref[Any] | None = None
        """The iterator of the last batch that trains."""
        self._undrawn = 0
        """The updates since the last one that had a batch."""
        self._counting: dict[int, tuple[str, int]] = {}
        """How the samples of the loaders that train are counted, by the identity of the loader."""

    # What a DataLoader does.

    def begin_pass(self, iterator: Any) -> None:
        """Notes that an iterator begins a pass over its data, also one that has made a pass before."""
        self._latest = ref(iterator), self._begin_pass(iterator)

    def index(self, iterator: Any, found: Any) -> None:
        """Notes the indices of a batch, which may arrive later."""
        self.pass_of(iterator).sizes.append(_length(found, collated=iterator._auto_collation))

    def begin(self, data_pass: DataPass, began: int, *, evaluates: bool) -> bool:
        """Notes that a batch of a pass is drawn from now on. Returns whether its time is worth marks of its own.

        `began` is the number of marks so far. A long evaluation has no further marks, which would take memory.
        """
        self.drawing = True
        last = self._waiting[-1] if self._waiting else None
        if last or data_pass.within:
            self._nest(data_pass, last)
        if last is None or last.data_pass is not data_pass or last.evaluates != evaluates or last.over:
            self._waiting.append(BatchStretch(data_pass, evaluates, began))
            return True
        last.left, last.failed = -1, 0
        if data_pass.drawn == 1 and data_pass.loader.ahead is not False and not last.called:
            data_pass.ahead = True
            if data_pass.loader.ahead is None:
                self._undecided.append(data_pass)
        if data_pass.trains:
            return True
        if evaluates and self.trained and not data_pass.loader.trains:
            return False
        return not last.without or last.forward >= 0

    def take(self, data_pass: DataPass, size: int, *, counts: bool) -> None:
        """Notes a batch of so many samples that has arrived; without `counts` its samples are known already."""
        data_pass.drawn += 1
        if data_pass.ahead:
            size, data_pass.held = data_pass.held, size
        if self._waiting and counts:
            self._waiting[-1].samples += size
            self._waiting[-1].latest = size

    def is_known_to_train(self, iterator: Any) -> bool:
        """Tells whether the DataLoader of an iterator is known to train."""
        return self.pass_of(iterator).loader.trains

    def expected(self, iterator: Any) -> int | None:
        """Returns the number of indices that were drawn for the next batch to arrive; None if that is unknown."""
        sizes = self.pass_of(iterator).sizes
        return sizes[0] if sizes else None

    def expect(self, iterator: Any, size: int | None) -> None:
        """Notes that the next batch has as many samples, and that none arrives that was asked for before."""
        sizes = self.pass_of(iterator).sizes
        sizes.clear()
        sizes.append(size)

    def end_pass(self) -> None:
        """Notes that a pass over the data has ended instead of giving another batch."""
        last = self._waiting[-1]
        last.drained, last.over = True, last.called
        last.samples += last.data_pass.held
        last.data_pass.held = 0
        if not last.samples:
            self._waiting.pop()
        self._between = last.data_pass.trains and not self._waiting

    # What else the program does.

    def called(self, marks: int, *, trains: bool) -> None:
        """Notes that an outermost module is called: `trains` with gradients, in training mode."""
        if not self._waiting and self._between and not trains:
            self._waiting.append(BatchStretch(DataPass(Loader()), evaluates=True, began=marks - 1))
        self._between = False
        if not self._waiting:
            return
        last = self._waiting[-1]
        if not trains:
            last.left = -1
        elif last.failed:
            last.samples += last.failed
            last.latest, last.failed = last.failed, 0
        if last.over:
            if trains and last.resumed < 0:
                last.resumed = marks
        elif not trains:
            last.without = True
        elif last.forward < 0:
            last.forward = marks

    def failed(self) -> None:
        """Notes that such a call has raised an error. Its batch trains only if a later call does not."""
        if self._waiting:
            last = self._waiting[-1]
            last.samples -= last.latest
            last.latest, last.failed = 0, last.failed + last.latest

    @property
    def may_evaluate(self) -> bool:
        """Whether what runs now may be an evaluation that `leave` ends."""
        last = self._waiting[-1] if self._waiting else None
        return last is not None and last.left < 0 and (last.evaluates or last.without)

    def leave(self, marks: int) -> None:
        """Notes that an evaluation, if one has run, is over: modules train again, or a checkpoint is saved."""
        self._waiting[-1].left = marks

    def settle(self, part: LoopPart) -> bool:
        """Decides about the batches so far, which a backward pass or an update follows now.

        Returns whether those that were drawn last train.
        """
        self._settled += 1
        waiting = self._waiting
        if not waiting:
            return False
        self._waiting = []
        self._decisions += 1
        closest = waiting[-1].data_pass
        if closest.trains and len(waiting) == 1 and not waiting[0].evaluates:
            return self._settle_regular(waiting[0], part)
        known = closest.loader.trains
        verdicts = []
        for stretch in waiting:
            data_pass = stretch.data_pass
            if data_pass.seen != self._decisions:
                data_pass.row = data_pass.row + 1 if data_pass.seen == self._decisions - 1 else 1
                data_pass.seen = self._decisions
            verdicts.append(self._trains(stretch, last=stretch is waiting[-1], known=known))
        self._doubted = None if verdicts[-1] or waiting[-1].over else closest.loader
        for number, (stretch, trains) in enumerate(zip(waiting, verdicts)):
            if trains:
                self._count(stretch, part)
            until = waiting[number + 1].began if stretch is not waiting[-1] else len(part.marks)
            if not trains and (known or stretch.data_pass.drawn or closest.loader.again):
                ends = (stretch.resumed, stretch.left, stretch.forward if stretch.evaluates else -1)
                part.evaluate(stretch.began, min((each for each in ends if 0 <= each < until), default=until))
            elif stretch.evaluates:
                part.evaluate_not(stretch.began, until)
        if verdicts[-1]:
            self._look_inside(part, waiting[-1].began)
        return verdicts[-1]

    def _settle_regular(self, stretch: BatchStretch, part: LoopPart) -> bool:
        """Decides as `settle` does about the batches of a pass that trains, without any others: they train too."""
        data_pass = stretch.data_pass
        data_pass.row = data_pass.row + 1 if data_pass.seen == self._decisions - 1 else 1
        data_pass.seen = self._decisions
        self._doubted = None
        self._count(stretch, part)
        if part.evaluates:
            self._look_inside(part, stretch.began)
        else:
            self._inside = 0
        return True

    def _look_inside(self, part: LoopPart, began: int) -> None:
        """Treats evaluation mode that each batch has before its update, as an attack may have, as training."""
        evaluates = part.evaluates and any(phase == EVALUATION for phase, _ in part.marks[began:])
        self._inside = self._inside + 1 if evaluates else 0
        if self._inside >= REGULAR:
            part.evaluate_not(began, len(part.marks))

    def update(self, part: LoopPart, *, draws: bool = False) -> None:
        """Decides about the batches so far, which an update follows now.

        `draws` means that the iterator of the last batch for training was there at the update, which is told later.
        """
        passes, self._settled = self._settled, 0
        if self._waiting:
            self.settle(part)
            self._settled = 0
        if self._undecided:
            self._undecided = [data_pass for data_pass in self._undecided if not self._decide(data_pass, passes, part)]
        if self._doubted:
            self._doubted.doubts = 0 if part.drawn else self._doubted.doubts + 1
            self._doubted.trains = self._doubted.trains if part.drawn else self._doubted.doubts >= DOUBTS
            self._doubted = None
        if part.drawn:
            self._undrawn = 0
        else:
            self._undrawn += 1
            drawing = draws or (self._training is not None and self._training() is not None)
            self.tells = self.trained and drawing and self._undrawn < UNDRAWN
        part.undrawn = not self.tells

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to decide about the batches so far."""
        return not (self._waiting or self._undecided or self._doubted)

    def forget(self) -> None:
        """Forgets the batches about which nothing is decided yet."""
        self._waiting = []

    def may_train(self, iterator: Any) -> bool:
        """Tells whether the last batch of an iterator was drawn for training, as far as that is known."""
        return self.pass_of(iterator).loader.trains or not (self._waiting and self._waiting[-1].evaluates)

    @property
    def found(self) -> list[tuple[str, int]]:
        """How the samples of each DataLoader that trains are counted, with the identity of its sampler."""
        return list(self._counting.values())

    # Decisions.

    def _trains(self, stretch: BatchStretch, *, last: bool, known: bool) -> bool:
        """Tells whether batches train.

        `last` says that none were drawn after them, and `known` that those drawn last certainly train. A batch that
        waits was followed by other batches of the same pass, if at all, and by the calls that it knows of.
        """
        data_pass, loader = stretch.data_pass, stretch.data_pass.loader
        if data_pass.trains:
            return True
        alone = loader.trains or not self.trained
        if stretch.evaluates:  # a batch for training may be drawn before the evaluation mode is left
            return alone and (not stretch.over if last else not stretch.called and not stretch.drained)
        if not stretch.called:  # a pass that ended before others began only looked at the data
            return last or not stretch.drained
        if data_pass.row >= REGULAR and not stretch.over:  # such as unlabelled batches, which get pseudo-labels first
            return True
        if stretch.forward < 0:
            return last and not stretch.over
        if last:
            return alone or not stretch.over or stretch.resumed < 0
        return loader.trains or not (stretch.over or known)

    def _decide(self, data_pass: DataPass, passes: int, part: LoopPart) -> bool:
        """Decides after an update whether the batches of a pass are drawn ahead, and returns whether it could.

        If they are, the first part draws one more than those after it. Others, such as the micro-batches of an
        update that are drawn together, are given back to the part that drew them, or to the next one.
        """
        drawn, data_pass.before = data_pass.drawn - data_pass.before, data_pass.drawn
        if not data_pass.trains:
            return True
        if not drawn:
            return False
        if not data_pass.first and passes < drawn:
            data_pass.first = drawn
            return False
        data_pass.ahead = data_pass.loader.ahead = drawn < data_pass.first
        if not data_pass.ahead:
            part.drawn += data_pass.held
            data_pass.held = 0
        return True

    def _nest(self, data_pass: DataPass, last: BatchStretch | None) -> None:
        """Notes that a batch is drawn, perhaps for a batch of another DataLoader, such as a task or a client."""
        if not data_pass.drawn and last and last.samples and last.data_pass is not data_pass and not last.called:
            data_pass.within = last.data_pass, last.data_pass.drawn
        elif data_pass.drawn and data_pass.within:
            outer, drawn = data_pass.within
            outer.loader.nests += data_pass.trains and outer.drawn == drawn
            data_pass.within = None

    def _count(self, stretch: BatchStretch, part: LoopPart) -> None:
        data_pass = stretch.data_pass
        loader = data_pass.loader
        if not data_pass.trains:
            if not loader.trains and loader.dataset and (dataset := loader.dataset()) is not None:
                self._datasets.add(dataset)
            self.trained = loader.trains = data_pass.trains = True
        self.tells, self._training = True, data_pass.iterator
        if loader.nests >= NESTS:
            self._counting.pop(id(loader), None)
            return
        part.drawn += stretch.samples
        self.doubtful = self.doubtful or loader.doubtful
        if stretch.samples and id(loader) not in self._counting:
            self._counting[id(loader)] = loader.counted, loader.sampler

    # The DataLoaders.

    def pass_of(self, iterator: Any) -> DataPass:
        """Returns the pass that an iterator makes."""
        latest, found = self._latest
        if latest is None or latest() is not iterator:
            known = self._passes_by_iterator.get(iterator)
            found = self._begin_pass(iterator) if known is None else known
            self._latest = ref(iterator), found
        return found

    def _begin_pass(self, iterator: Any) -> DataPass:
        found = self._passes_by_iterator[iterator] = DataPass(self._loader_of(iterator), ref(iterator))
        return found

    def _loader_of(self, iterator: Any) -> Loader:
        sampler = iterator._index_sampler
        for key in (sampler, iterator._dataset):  # fastai's DataLoaders share one sampler, of no class of Python
            try:
                found = self._loaders.get(key)
                if found is None:
                    found = self._loaders[key] = self._new_loader(sampler, iterator._dataset)
                return found
            except TypeError:
                continue
        return self._new_loader(sampler, iterator._dataset)

    def _new_loader(self, sampler: Any, dataset: Any) -> Loader:
        found = Loader(sampler=id(sampler))
        with suppress(TypeError):  # a dataset that is a list, or is not to be hashed
            found.dataset, found.again = ref(dataset), dataset in self._datasets
        return found


def samples_of_next(data_pass: DataPass, iterator: Any, batch: Any) -> int:
    """Returns the number of samples in the next batch of a pass, and keeps how they are counted."""
    known = data_pass.sizes.popleft() if data_pass.sizes else None
    rows = _rows(batch) if known == 1 and data_pass.loader.rows is not None else 0
    if rows and _makes_batches(data_pass, rows):
        size, data_pass.loader.counted = rows, ROWS
    elif iterator._dataset_kind == _DatasetKind.Iterable and known is not None:
        size, data_pass.loader.counted = _agreeing(batch, known), CONSTANT
    elif known is not None:
        size, data_pass.loader.counted = known, INDICES
    elif not iterator._auto_collation and is_vector(_first_of(batch)):  # as one sample may be
        size, data_pass.loader.counted = 1, INDICES
    else:
        size, data_pass.loader.counted = size_of(batch), DIMENSION
        data_pass.loader.doubtful = data_pass.loader.doubtful or _disagree(batch)
    return size


def _first_of(batch: Any) -> torch.Tensor | None:
    try:
        return first_tensor(batch)
    except Exception:  # the batch is the program's own class
        return None


def in_words(found: Sequence[tuple[str, str]]) -> str:
    """Returns what the samples are. `found` has for each DataLoader what they are, and the line that makes it."""
    named = [f"{how} the DataLoader{f' at {place}' if place else ''}" for how, place in dict.fromkeys(found)]
    return " and ".join(filter(None, (", ".join(named[:-1]), *named[-1:]))) + (", added" if len(named) > 1 else "")


def _length(found: Any, *, collated: bool) -> int | None:
    """Returns the number of indices of a batch; None if that is unknown.

    Without a batch size, an index may stand for a whole batch.
    """
    if not collated and not isinstance(found, (list, range)) and not getattr(found, "ndim", 0):
        return None
    try:
        return len(found)
    except TypeError:
        return None


def size_of(batch: Any) -> int:
    """Returns the number of samples in a batch; 0 without a tensor.

    It is the first dimension that most of its parts have, or that of the first tensor if none is the most common.
    """
    try:
        sizes = list(_sizes(batch))
        return max(sizes, key=sizes.count) if sizes else 0
    except Exception:  # the batch is the program's own class, or a tensor without a shape, as a nested one
        return 0


def _disagree(batch: Any) -> bool:
    try:
        sizes = list(_sizes(batch))
    except Exception:  # the batch is the program's own class
        return False
    return len(sizes) > 1 and len(set(sizes)) == len(sizes)


def _makes_batches(data_pass: DataPass, rows: int) -> bool:
    """Tells whether an index stands for a batch of as many samples as there are rows.

    Such batches have equal numbers of rows, except for one batch of a pass.
    """
    loader = data_pass.loader
    if loader.rows and rows != loader.rows:
        loader.rows = None if data_pass.uneven else max(rows, loader.rows)
        data_pass.uneven = True
    else:
        loader.rows = rows
    return loader.rows is not None


def _rows(batch: Any) -> int:
    """Returns the rows of a batch that one index was drawn for; 0 if nothing shows that they are samples.

    The first tensor must have them, and another one too if there are others. One of the class of a program may be a
    graph. What has a single entry is one sample, and a vector is one sequence.
    """
    if not isinstance(batch, (tuple, list, Mapping, torch.Tensor)):
        return 0
    try:
        tensor = first_tensor(batch)
        sizes = list(_sizes(batch))
        rows = int(tensor.size(0)) if tensor is not None and tensor.dim() > 1 else 0
    except Exception:  # the batch has parts of the program's own classes
        return 0
    listed = isinstance(batch, (tuple, list)) and (
        (_is_single(batch) and not isinstance(batch[0], torch.Tensor)) or all(map(_is_single, batch))
    )
    return rows if not listed and 1 not in sizes and (len(sizes) == 1 or sizes.count(rows) > 1) else 0


def _is_single(part: Any) -> bool:
    """Tells whether a part of a batch lists what a single sample has, such as one picture."""
    return isinstance(part, (tuple, list)) and len(part) == 1


def _agreeing(batch: Any, most: int) -> int:
    """Returns the number of samples in a batch that should have `most` of them, unless it is the last one.

    It is `most` if a part of the batch has as many, and otherwise what the first part has that has fewer.
    """
    try:
        sizes = list(_sizes(batch))
    except Exception:  # the batch is the program's own class
        return most
    return most if most in sizes else next((size for size in sizes if 0 < size < most), most)


def _sizes(batch: Any, depth: int = 3) -> Iterator[int]:
    if isinstance(batch, torch.Tensor):
        if batch.dim():
            yield int(batch.size(0))
    elif depth and not isinstance(batch, (str, bytes)):
        values = getattr(batch, "values", None)
        parts: Sequence[Any] = batch if isinstance(batch, (tuple, list)) else list(values()) if callable(values) else ()
        for part in parts:
            yield from _sizes(part, depth - 1)
        if isinstance(batch, list) and batch and not isinstance(batch[0], torch.Tensor):
            yield len(batch)
