"""Installs the probe in a process that has imported torch, and measures its training loop.

The process becomes a rank of the run with the first update of an optimizer, or once it has had several backward passes
and has made no optimizer. Until then, and in processes that never train, such as torchrun and the workers of a
DataLoader, the probe only sets marks. The outermost modules are looked for in the step after the first one of an
optimizer, so that a model is usually compiled before any of its classes is changed.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
from collections import Counter
from collections.abc import Hashable
from collections.abc import Iterator as IteratorType
from contextlib import contextmanager, suppress
from itertools import count, islice
from multiprocessing.util import Finalize
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, NoReturn
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary, ref

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import optimizer as optimizers
from torch.utils.data import dataloader
from torch.utils.data._utils import worker

from . import SAMPLED_VARIABLE
from .batches import OF_LOSS, OF_MODEL, DrawnBatches, in_words, samples_of_next
from .cached import CachedBatches
from .cost import cost
from .counted import BY_HAND, PASSES_WITHOUT_OPTIMIZER, ByHand, Counted, elements_of, shape_of
from .device import Loss, loss_of
from .facts import facts, open_store, peak_rss, place
from .given import GivenSamples
from .gpus import used_gpus
from .graphs import GRAPH_CAPTURE, GRAPH_REPLAY, Captured, Computed, Graphs
from .host import Host, tell
from .length import MOST_WARMUP, OVERRUN, Length, fitting, shortened, usual
from .lines import CallLines
from .measured import MeasuredStep
from .modules import first_parameter, parameters_of
from .observed import SourcePlaces, autocast_of, first_tensor, of_loader, of_optimizers, of_process, samples_in
from .own_optimizers import own_optimizers
from .recording import ProbeRecording, is_profiled
from .sampling import StackSampler, sample_worker
from .spot_checks import SpotChecks
from .timeline import EVALUATION, LONGEST_PERIOD, OTHER, LoopPart, Regions, Timeline, WatchedTimeline
from .treatments import (
    CACHED,
    Treatments,
    compiled_graphs,
    is_compiling,
    is_traced,
    keep_from_compilation,
    stand_in,
    timed,
    unwrapped,
)

if TYPE_CHECKING:
    from .following import Following

DATA_WAIT, FORWARD, BACKWARD, OPTIMIZER, ZERO_GRAD = "data_wait", "forward", "backward", "optimizer", "zero_grad"
WORKER_START = "worker_start"
MOST_LOADERS = 64
"""The largest number of DataLoaders of which it is noted how they were made."""
LONGEST_SETUP = 4096
"""Marks without an update after which what they measure counts as set-up and not as the first step."""
WITHOUT_OPTIMIZER = "the program uses no optimizer of torch.optim, so that each backward pass counts as a step"
FIRST = "the first steps, {} so far"
LOOKING = "looking for the updates that make a step, {} so far"
UNCERTAIN = (
    "the number of samples in a step is uncertain, because no sampler tells it: {}; set --samples-per-step N if it is "
    "another one"
)
IN_EVALUATION_MODE = (
    "evaluation is the time in which the model is in evaluation mode, {:.0%} of the steps: if the updates use its "
    "results, as those of rollouts, that time is training"
)
MUCH_EVALUATION = 0.25
"""That is said if a program without a DataLoader evaluates for more than this share of the time."""
DIFFERENT = "the tensors in a batch all have another first dimension"
SHARED = "several optimizers update in a step, and its samples are those of the optimizer with the most"
NO_RHYTHM = (
    "the {} optimizers of the program update in no rhythm, so that each update counts as a step; the throughput counts "
    "all samples, but the time of a step is that of any optimizer"
)
ONE_OF_SEVERAL = (
    "only one of the {} optimizers of the program has updated in the time of a repeat, so that each of its updates "
    "counts as a step"
)
CHANGED = (
    "the optimizers of the program changed their rhythm after step {}, so that the steps before and after it have "
    "different updates"
)
WITHOUT_THOSE = "; set --training.warmup_steps to {} or more, if the steps before it are not to be measured"
AHEAD_SECONDS = 2.0
"""The time in which the host tells all ranks how many steps rank 0 has decided on."""
LONG_SECONDS = 1e-3
"""The time of a step from which on steps are measured as they end: all of them together at a flush would make one step
in some dozens seem slow. Of shorter ones a flush is in fewer than one in a hundred, and they take less time together.
"""
AFTER_EACH = 2
"""The long steps that are measured after an update at most: one more than it ends, to catch up with the device."""
HELD_SECONDS = 1.0
"""The time after which the host is told again what steps the updates that are held back would make: a program that is
killed while it is unknown which updates make a step keeps these."""
MOST_UNKEPT = 100
"""The steps after which batches that are to be given again are no longer waited for."""
SPREAD_STEPS = 50
"""The steps to measure on several machines where the user sets no number."""
SPREAD_SAMPLED = 20
"""The steps whose code is sampled on several machines, not all of whose hosts know how long a step takes."""
SECONDS_TO_END = 30.0
"""The seconds in which a program has to end once the host is gone."""


ALL_MEASURED = "gpubench has measured all steps that it was to measure, and ends the program here"
HOST_GONE = "gpubench has ended before the program, and ends it here"


class End(SystemExit):
    """Ends the program. A program that prints what ends it, as a notebook does, prints the reason."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code)
        self._reason = reason

    def __str__(self) -> str:
        return self._reason


class Probe:
    """The measurement of this process. Its hooks do nothing outside of the thread that trains."""

    def __init__(self, address: str, treatments: dict[str, Any], *, follows: bool = False) -> None:
        """`treatments` are values by dot-key; `follows` means that the memory is recorded instead of the time."""
        self._address = address
        self._treatments = Treatments(treatments)
        self._loaders: dict[int, tuple[dict[str, Any], str | None]] = {}
        """How each DataLoader runs, by dot-key, and the line that makes it, by the identity of its sampler."""
        self._autocast: torch.dtype | None = None
        """The type in which autocast computes calls of modules; None if it computes none, as far as the calls show."""
        self._inner_autocast: torch.dtype | None = None
        """That of a context inside of a module, or of code that torch.compile has compiled."""
        self._places = SourcePlaces()
        self._lines = CallLines(self._places)
        self._made: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()
        """Where the program makes its optimizers."""
        self._found: dict[str, str] = {}
        """Where the program does what the treatments change; see `gpubench.settings.field.Place`."""
        self._roots: WeakValueDictionary[int, torch.nn.Module] = WeakValueDictionary()
        """The outermost modules that are called in training, by identity."""
        self._following: Following | None = None
        if follows:
            from .following import Following

            self._following = Following(self._roots)
        self._drawn = DrawnBatches()
        self._mode_tells = True
        """Whether evaluation mode means evaluation. It does not once the program has trained in it, until it is set."""
        self._trains_in_evaluation_mode = False
        """Whether the modules were in evaluation mode in the last update."""
        self._first_with_gradients: tuple[int, int] | None = None
        """The part, and the marks before it, of the first call in evaluation mode with gradients since one without."""
        self._again = False
        """Whether an optimizer evaluates its closure once more, for samples that count already."""
        self._cached = CachedBatches() if self._treatments.keeps_batches else None
        """What gives batches of training again; None where all are made."""
        self._unkept: int | None = None
        """The steps until batches were given again; None before that."""
        self._length: Length | None = None
        """The length of the repeat, as far as it is known, without those."""
        self._timeline = self._new_timeline()
        self._regions = Regions(self._timeline_here)
        self._graphs_of_cuda = Graphs(self._begin_capture, self._end_capture, self._replay)
        self._captured: Captured | None = None
        """What is being captured in a CUDA graph."""
        self._thread = 0
        self._choosing = threading.Lock()
        """Held while the thread to measure is chosen; `_chosen` says that it has been."""
        self._chosen = self._others_reported = False
        self._others = 0
        """The updates in other threads than the one that is measured."""
        self._over = False
        self._forked = False
        """Whether this process is a fork of a rank, of which the host is told if it trains too."""
        self._models: WeakValueDictionary[int, torch.nn.Module] = WeakValueDictionary()
        """The unwrapped outermost modules: a wrapper may stay in training mode while its model is evaluated."""
        self._most_roots = 0
        """The largest number of them that the host knows of."""
        self._optimizers: WeakSet[Any] = WeakSet()
        """The optimizers whose modules have been looked for."""
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """The numbers of the optimizers that update. One that is made anew has that of the one that it replaces."""
        self._updating: dict[int, int] = {}
        """The phases that were open when the update of an optimizer began, by the identity of the optimizer."""
        self._frozen: WeakValueDictionary[int, torch.nn.Module] = WeakValueDictionary()
        """The modules that no other one calls and that are not trained, such as a teacher, as far as they were seen."""
        self._frozen_classes: set[type] = set()
        """The classes of modules whose calls are wrapped for these alone."""
        self._wrapped: set[type] = set()
        """The classes of modules whose calls are wrapped."""
        self._switched: set[type] = set()
        """The classes of modules whose changes of mode are seen."""
        self._module_call: Any = None
        """The original `torch.nn.Module.__call__` while the outermost modules are looked for."""
        self._known: int | None = None
        """The number of outermost modules before a search for more; None in the search after a first update."""
        self._looks = float(LONGEST_PERIOD)
        """The number of parts in which searches for more may still find nothing. One that calls a known module takes a
        small share of it, as that of a critic before the generator is called again."""
        self._is_settled = False
        """Whether no outermost module is looked for, and none has been found since the last part of the loop."""
        self._settled_for: Callable[[], Any] = nothing
        """Returns the optimizer of that part."""
        self._scaled: dict[int, tuple[ref[torch.Tensor], torch.Tensor]] = {}
        """The losses that a gradient scaler has scaled: the result and the loss, by the identity of the result."""
        self._given = GivenSamples(self._roots)
        self._undrawn = 0
        """The steps whose samples are not those of DataLoaders."""
        self._shared = 0
        """The steps in which several optimizers have updated with samples of their own."""
        self._started: tuple[int, int, int] | None = None
        """Of the iterator whose workers have started and have made no batch yet: its identity, and the numbers of parts
        and of marks before that.
        """
        self._updates = 0
        self._counted = Counted()
        self._checks = SpotChecks()
        self._reads_values = False
        """Whether the values of some parameters have been read before the update that runs."""
        self._passes = 0
        """The backward passes until the last update."""
        self._own: dict[int, ByHand] | None = None
        """What stands for the optimizers of no class of torch.optim, by identity; None until they are looked for."""
        self._without_own = 0
        """After so many backward passes without an update by such an optimizer, each backward pass is a step."""
        self._sample_shape = ""
        self._needs_shape = True
        """Whether the host does not know the shape of a sample yet."""
        self._noted_loader: Callable[[], Any] = nothing
        """Returns the iterator of a DataLoader that was noted last; None if it has gone."""
        self._latest_root: Callable[[], Any] = nothing
        self._latest_model: Callable[[], Any] = nothing
        """Return the outermost module that was called last, and an unwrapped one that has been in training mode."""
        self._latest_optimizer: tuple[Callable[[], Any], int] = nothing, 0
        """Returns the optimizer that has updated last; its number."""
        self._host: Host | None = None
        self._repeat = self._sent = 0
        self._held_at = 0.0
        """When the steps were sent last that the updates held back would make."""
        self._graphs = compiled_graphs()
        self._compiled: list[int] = []
        """The steps in which torch.compile compiled code."""
        self._recording: ProbeRecording | None = None
        self._recorded = 0
        """The number of complete steps that the recording knows of."""
        self._profiler_reported = self._model_reported = False
        self._wanted: int | None = None
        """The number of steps after which the program ends; None if it ends by itself, or while that is unknown."""
        self._warmup: int | None = None
        """The warm-up that the user has set."""
        self._seconds: float | None = None
        """The time for the steps, from which their number follows; None if it is known, or not wanted."""
        self._late: tuple[float, Length] | None = None
        """When the repeat takes too long, on the monotonic clock, and its length that the first steps have decided.

        None where that may not be changed, as other ranks count on it, or the user has set it."""
        self._durations: list[float] = []
        """Those of the steps so far, while their number is unknown."""
        self._told_at, self._told = 0.0, 0
        """When the host was to be told of the last part, on the monotonic clock, and the number of parts until then."""
        self._measured: list[str] = []
        """The measured steps that are not yet sent, in JSON."""
        self._token: tuple[int, int] | None = None
        """The last of them that ended after another token of the host was read, and the number of the token."""
        self._time = self._elapsed = self._evaluated = 0
        """When the next step begins, in nanoseconds since the epoch, and the time of the steps and in evaluation."""
        self._samples: int | None = None
        """The samples of each step, where the user has set them."""

    def install(self) -> None:
        self._treatments.install()
        if self._following:
            self._following.install()
            stand_in(torch.nn.Module, "__call__", self._find)
            atexit.register(self._leave)
        os.register_at_fork(after_in_child=self._begin_in_fork)
        stand_in(dataloader.DataLoader, "__init__", self._make_loader)
        if self._cached:  # inside of the hook of the next batch, so that one that is given again counts as any other
            stand_in(dataloader._BaseDataLoaderIter, "__next__", self._give_batch)
            stand_in(dataloader.DataLoader, "_get_iterator", self._get_iterator)
        stand_in(dataloader._BaseDataLoaderIter, "__next__", self._next_batch)
        stand_in(dataloader._BaseDataLoaderIter, "_next_index", self._next_index)
        stand_in(dataloader._BaseDataLoaderIter, "_reset", self._begin_pass)
        stand_in(DistributedDataParallel, "__init__", self._make_ddp)
        stand_in(torch.autograd, "backward", self._backward)
        stand_in(torch, "save", self._save)
        if not self._following:
            self._look_at_code()
            stand_in(torch.autograd, "grad", self._compute_gradients)
            stand_in(dataloader._MultiProcessingDataLoaderIter, "__init__", self._start_workers)
            self._regions.install()
        self._graphs_of_cuda.install()
        stand_in(torch.autocast, "__enter__", self._enter_autocast)
        stand_in(optimizers.Optimizer, "__init__", self._make_optimizer)
        stand_in(optimizers.Optimizer, "zero_grad", self._zero_gradients)
        scaler = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
        stand_in(scaler, "scale", self._scale)
        stand_in(scaler, "step", self._scaler_step)
        optimizers.register_optimizer_step_pre_hook(timed(self._before_update))
        optimizers.register_optimizer_step_post_hook(timed(self._after_update))

    def _look_at_code(self) -> None:
        """Samples the code of the workers of DataLoaders, and finds lines, in a repeat that is recorded."""
        if SAMPLED_VARIABLE not in os.environ:
            return
        self._lines.install()
        folder = os.path.dirname(self._address)
        if os.access(folder, os.W_OK):
            stand_in(worker, "_worker_loop", functools.partial(sample_worker, folder))

    # What stands in for the functions of torch; `call` is the original.

    def _make_loader(self, call: Callable[..., Any], loader: Any, *args: Any, **kwargs: Any) -> None:
        call(loader, *args, **kwargs)
        sampler = getattr(loader, "_index_sampler", None)
        if sampler is not None:
            self._places.remember(id(sampler), id(getattr(loader, "dataset", None)))

    def _make_ddp(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if place := self._places.here():
            self._found.setdefault("ddp", place)
        call(*args, **kwargs)

    def _make_optimizer(self, call: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        call(optimizer, *args, **kwargs)
        self._timeline.timing.expect(each for group in optimizer.param_groups for each in group["params"])
        if isinstance(optimizer, Hashable):
            self._made[optimizer] = self._places.here()

    def _start_workers(self, call: Callable[..., Any], iterator: Any, *args: Any, **kwargs: Any) -> None:
        if not self._watches() or self._drawn.drawing or self._evaluates():
            call(iterator, *args, **kwargs)
            return
        self._forget_set_up()
        began = self._timeline.ended, len(self._timeline.part.marks)
        with self._timeline.phase(WORKER_START):
            call(iterator, *args, **kwargs)
        self._started = id(iterator), *began

    def _next_batch(self, call: Callable[..., Any], iterator: Any) -> Any:
        if not self._watches() or self._drawn.drawing:
            return call(iterator)
        if self._host is None:
            self._forget_set_up()
        timeline, drawn = self._timeline, self._drawn
        phase, began = DATA_WAIT, len(timeline.part.marks)
        if self._started is not None:
            (starting, part, before), self._started = self._started, None
            if starting == id(iterator):
                phase, began = WORKER_START, before if part == timeline.ended else began
        evaluates = self._evaluates() or not torch.is_grad_enabled()
        data_pass = drawn.pass_of(iterator)
        timed = drawn.begin(data_pass, began, evaluates=evaluates)
        try:
            if timed:
                if self._following:
                    self._following.draws(iterator._dataset)
                timeline.enter(phase, on_host=True)
                try:
                    batch = call(iterator)
                finally:
                    timeline.leave()
            else:
                batch = call(iterator)
        except StopIteration:
            drawn.end_pass()
            raise
        finally:
            drawn.drawing = False
        drawn.take(data_pass, samples_of_next(data_pass, iterator, batch), counts=not self._again)
        self._counted.batches += timed and not evaluates
        if timed and self._noted_loader() is not iterator and drawn.may_train(iterator):
            self._note_loader(iterator)
            self._noted_loader = ref(iterator)
        if self._needs_shape:
            self._sample_shape = self._sample_shape or samples_in(batch)[1]
        return batch

    def _give_batch(self, call: Callable[..., Any], iterator: Any) -> Any:
        """Makes the next batch, or gives one again that was kept."""
        if not self._is_here() or self._cached is None:
            return call(iterator)
        batch, kept = self._cached.next(iterator, lambda: call(iterator), self._drawn)
        if kept:
            self._treatments.note(CACHED)
        return batch

    def _get_iterator(self, call: Callable[..., Any], loader: Any) -> Any:
        """Makes an iterator without workers of a DataLoader whose batches are kept."""
        ready = self._cached.ready(loader) if self._cached and self._is_here() else None
        return call(loader) if ready is None else ready

    def _next_index(self, call: Callable[..., Any], iterator: Any) -> Any:
        found = call(iterator)
        self._drawn.index(iterator, found)
        return found

    def _begin_pass(self, call: Callable[..., Any], iterator: Any, *args: Any, **kwargs: Any) -> None:
        self._drawn.begin_pass(iterator)
        if self._cached:
            self._cached.begin_pass(iterator)
        call(iterator, *args, **kwargs)

    def _call_module(self, call: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self._watches():
            return call(module, *args, **kwargs)
        timeline = self._timeline
        inner = FORWARD in timeline.open or BACKWARD in timeline.open
        if self._module_call or self._following:
            self._look_at(module, args, kwargs, inner=inner)
        if inner:  # also where a backward pass computes activations again that a checkpoint has not kept
            return call(module, *args, **kwargs)
        drawn = self._drawn
        if self._latest_root() is not module and not self._is_root(module):
            return self._call_untrained(call, module, args, kwargs)
        trains = self._call_trains()
        drawn.called(len(timeline.part.marks), trains=trains)
        if not trains:
            return self._note_result(call(module, *args, **kwargs))
        looks = self._checks.looks and not (self._captured or self._following)
        samples = self._count(module, (args, kwargs), looks=looks)
        timeline.enter(FORWARD)
        try:
            if self._following:
                self._following.called(module, (args, kwargs))
            changes = self._treatments.changes_calls
            result = self._treatments.call(call, module, args, kwargs) if changes else call(module, *args, **kwargs)
        except BaseException:
            drawn.failed()
            self._discount(module, samples)
            raise
        finally:
            timeline.leave()
        if looks:
            self._checks.returned(result)
        return result if drawn.tells else self._note_result(result)

    def _call_untrained(self, call: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Calls an outermost module that is not trained, which is a part of the forward pass if it is a teacher."""
        if type(module) not in self._frozen_classes and not (module.training and torch.is_grad_enabled()):
            self._drawn.called(len(self._timeline.part.marks), trains=False)
        searches, draws = self._module_call is not None, DATA_WAIT in self._timeline.open
        if id(module) not in self._frozen or searches or draws or self._evaluates():
            return call(module, *args, **kwargs)
        with self._timeline.phase(FORWARD):
            return call(module, *args, **kwargs)

    def _call_trains(self) -> bool:
        """Tells whether the call of an outermost module that begins is for training, as far as that is known.

        Gradients are on in some evaluations too. Only an update shows that a program trains in evaluation mode, and
        from then on such calls count as training.
        """
        timeline = self._timeline
        if not self._evaluates():
            return torch.is_grad_enabled()
        if not torch.is_grad_enabled():
            self._first_with_gradients = None
            return False
        if self._trains_in_evaluation_mode:
            self._mode_tells = False
            timeline.rebase(OTHER)
            return True
        if self._first_with_gradients is None or self._first_with_gradients[0] != timeline.ended:
            self._first_with_gradients = timeline.ended, timeline.divide()
        return False

    def _updated_in_evaluation_mode(self, part: LoopPart) -> None:
        """Makes training of the calls with gradients before an update in evaluation mode, which means no evaluation."""
        timeline = self._timeline
        self._mode_tells = False
        if self._first_with_gradients is not None and self._first_with_gradients[0] == timeline.ended:
            part.evaluate_not(self._first_with_gradients[1], len(part.marks))
        timeline.base = OTHER  # the mark at which the part ends is the first of the next one

    def _is_root(self, module: torch.nn.Module) -> bool:
        """Tells whether a module that no other one calls is an outermost one, and remembers it as the latest."""
        found = id(module) in self._roots or self._adopt(module)
        if found:
            self._latest_root = ref(module)
        return found

    def _count(self, module: torch.nn.Module, given: Any, *, looks: bool) -> int:
        """Counts the samples of a call in training, and returns those that count as forwarded.

        `looks` means that the step is one of those that are looked at closely.
        """
        part, identity, samples = self._timeline.part, id(module), 0
        if part.first in (0, identity):  # others get the same samples, as an actor and its critic do
            part.first = identity
            samples = self._size(module, given)
            tensor = first_of_call(*given)
            self._counted.give(samples, elements_of(tensor), shape_of(tensor) if looks else "")
            if looks:
                self._checks.give(tensor)
            if not self._again:
                part.forwarded += samples
        if not self._drawn.tells and not self._again:
            self._given.call(module, given)
        return samples

    def _discount(self, module: torch.nn.Module, samples: int) -> None:
        """Takes back the samples of a call that has raised an error, which the program may catch."""
        self._counted.forwarded -= samples
        if not self._again:
            self._timeline.part.forwarded -= samples
            self._given.fail(module)

    def _note_result(self, result: Any) -> Any:
        if not self._drawn.tells:
            self._given.returned(result)
        return result

    def _adopt(self, module: torch.nn.Module) -> bool:
        """Treats a module of the class of an outermost one as one itself, such as a copy that an inner loop trains."""
        adopts = type(module) in self._wrapped - self._frozen_classes and not self._following
        if adopts and module.training and torch.is_grad_enabled():
            first = first_parameter(module)
            if first is not None and first.requires_grad:
                self._add_root(module)
                return True
        return False

    def _change_mode(self, call: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        changed = call(module, *args, **kwargs)
        self._mode_tells = True
        self._changed_mode()
        return changed

    def _changed_mode(self) -> None:
        if self._watches() and not self._evaluates():
            self._end_evaluation()

    def _save(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A checkpoint is not part of the evaluation before it, although the model may still be in evaluation mode."""
        if self._watches():
            self._timeline.rebase(OTHER)
            self._end_evaluation()
        return call(*args, **kwargs)

    def _end_evaluation(self) -> None:
        if self._drawn.may_evaluate:
            self._drawn.leave(self._timeline.divide())

    def _backward(self, call: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._watches() or BACKWARD in self._timeline.open:
            return call(tensors, *args, **kwargs)
        if self._host is None:
            self._forget_set_up()
        timeline = self._timeline
        if type(tensors) is torch.Tensor:
            losses = [tensors]
        else:
            tensors = tuple(tensors) if isinstance(tensors, IteratorType) else tensors  # it works only once
            losses = _listed(tensors)
        timeline.part.losses += self._known_of(losses)
        self._counted.passes += 1
        self._given.settle(losses)
        if self._drawn.settle(timeline.part) and timeline.base != OTHER:
            self._mode_tells = self._mode_tells and timeline.base != EVALUATION
            timeline.rebase(OTHER)
        timeline.enter(BACKWARD)
        try:
            result = call(tensors, *args, **kwargs)
        finally:
            timeline.leave()
        if not self._updates:
            self._end_pass()
        return result

    def _compute_gradients(self, call: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Measures `torch.autograd.grad`. It is a backward pass of training if it differentiates a loss by parameters.

        That of a penalty or of an inner loop, which keeps the graph to be differentiated again, is none.
        """
        if not self._watches() or BACKWARD in self._timeline.open or FORWARD in self._timeline.open:
            return call(outputs, *args, **kwargs)
        self._forget_set_up()
        inputs, *more = args or (kwargs.pop("inputs", ()),)
        inputs = tuple(inputs) if isinstance(inputs, IteratorType) else inputs  # it works only once
        again = kwargs.get("create_graph", more[2:3] == [True])
        parameters = any(isinstance(each, torch.nn.Parameter) for each in _listed(inputs))
        trains = parameters and not again
        outputs = tuple(outputs) if isinstance(outputs, IteratorType) else outputs
        if trains:
            losses = _listed(outputs)
            self._timeline.part.losses += self._known_of(losses)
            self._counted.passes += 1
            self._given.settle(losses)
        elif again and (parameters or any(getattr(each, "grad_fn", None) is not None for each in _listed(inputs))):
            self._given.settle_inner(_listed(outputs))
        elif not again and not kwargs.get("retain_graph", more[1:2] == [True]):
            self._given.reject()
        with self._timeline.phase(BACKWARD):
            result = call(outputs, inputs, *more, **kwargs)
        if trains:
            self._end_pass()
        return result

    def _end_pass(self) -> None:
        """Ends a part of the loop with a backward pass, if the program updates its parameters itself."""
        known = self._updates or self._made or self._following or FORWARD in self._timeline.open
        if known or self._captured:
            return
        self._timeline.end_pass()
        if not self._counted.by_hand:
            return
        if self._own is None:
            self._own = {}
            self._look_for_own_optimizers()
        if self._counted.passes >= self._without_own:
            self._end_part(BY_HAND)
            if self._timeline.ended == 1:
                self._timeline.divide_first(1)

    def _look_for_own_optimizers(self) -> None:
        """Measures the optimizers that are of no class of torch.optim, and gives them time to update once."""
        for cls in own_optimizers():
            with suppress(TypeError):  # a class of an extension module, which cannot be changed
                stand_in(cls, "step", self._own_step)
                if "zero_grad" in vars(cls):
                    stand_in(cls, "zero_grad", self._zero_gradients)
                self._without_own = self._counted.passes + PASSES_WITHOUT_OPTIMIZER

    def _own_step(self, call: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self._own is None or self._made or not self._watches() or OPTIMIZER in self._timeline.open:
            return call(optimizer, *args, **kwargs)
        with self._timeline.phase(OPTIMIZER):
            result = call(optimizer, *args, **kwargs)
        passes = self._counted.passes - self._passes
        if passes > 0 and not self._captured:
            self._updates += 1
            self._end_part(self._own.setdefault(id(optimizer), ByHand()))
            if self._updates == 2 and len(self._own) == 1:  # from the first to the second update are those of a step
                self._timeline.divide_first(passes)
        return result

    def _enter_autocast(self, call: Callable[..., Any], context: Any) -> Any:
        """Notes autocast inside of a module. Compiled code enters it while it is compiled, and then no more."""
        if context._enabled and self._records() and (FORWARD in self._timeline.open or is_traced()):
            self._inner_autocast = context.fast_dtype
        return call(context)

    def _records(self) -> bool:
        """Tells whether what runs now can be a part of what is measured, and not of a teacher or of evaluation."""
        return torch.is_grad_enabled()

    def _zero_gradients(self, call: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._watches():
            return call(optimizer, *args, **kwargs)
        if self._host is None:
            self._forget_set_up()
        timeline = self._timeline
        if OPTIMIZER in timeline.open or ZERO_GRAD in timeline.open:
            return call(optimizer, *args, **kwargs)
        self._counted.clear()
        frees = args[0] if args else kwargs.get("set_to_none", True)
        timeline.enter(ZERO_GRAD if self._following else OPTIMIZER, on_host=frees)
        try:
            return call(optimizer, *args, **kwargs)
        finally:
            timeline.leave(on_host=frees)

    def _scale(self, call: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        scaled = call(scaler, outputs)
        if type(outputs) is torch.Tensor and scaled is not outputs and self._watches():
            self._scaled[id(scaled)] = ref(scaled), outputs.detach()
        return scaled

    def _scaler_step(self, call: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._watches() or not scaler.is_enabled():
            return call(scaler, optimizer, *args, **kwargs)
        updates = self._updates
        with self._timeline.phase(OPTIMIZER):
            found = call(scaler, optimizer, *args, **kwargs)
        # Without an update the gradients have infinities, so that the optimizer was not called.
        if self._updates == updates and not self._captured:
            self._end_part(optimizer, skipped=True)
        return found

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not self._watches():
            if is_compiling():
                return None
            if self._forked:
                self._tell_of_fork()
            elif not self._over:
                self._take_over()
            if not self._watches():
                return None
        self._chosen = True
        timeline = self._timeline
        if self._following:
            self._following.updating(optimizer)
        if self._updating and (left_open := self._updating.get(id(optimizer))) is not None:  # it has raised an error
            timeline.leave_all_but(left_open)
        self._updating[id(optimizer)] = len(timeline.open)
        self._read_values(optimizer)
        timeline.enter_after(OPTIMIZER)
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._counting_once(args[1]), *args[2:]), kwargs
        if kwargs and callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._counting_once(kwargs["closure"])}
        return None

    def _read_values(self, optimizer: Any) -> None:
        """Reads the values of some parameters before an update that is counted."""
        self._reads_values = not (self._captured or self._following) and self._counted.is_due(optimizer)
        if self._reads_values:
            with suppress(Exception):  # an optimizer, or tensors, of the program's own class
                self._checks.before_update(optimizer)

    def _counting_once(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the closure of an optimizer, whose samples count in its first evaluation in an update."""
        evaluations = 0

        @functools.wraps(closure)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            nonlocal evaluations
            evaluations += 1
            before, self._again = self._again, evaluations > 1 or self._timeline.part.forwarded > 0
            try:
                return closure(*args, **kwargs)
            finally:
                self._again = before

        return evaluate

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._watches():
            self._updating.pop(id(optimizer), None)
            if self._following:
                self._following.updated(optimizer)
            self._timeline.leave()
            if self._captured:
                self._capture(self._captured, optimizer)
                return
            self._timeline.part.infinities = getattr(optimizer, "found_inf", None)
            if self._reads_values:
                with suppress(Exception):
                    self._checks.after_update()
            self._update(optimizer)

    def _update(self, optimizer: Any) -> None:
        self._updates += 1
        self._counted.last = self._wanted is not None and self._timeline.complete + 1 >= self._wanted
        self._counted.update(optimizer)
        self._end_part(optimizer)

    # The CUDA graphs of the program.

    def _begin_capture(self) -> Captured | None:
        """Sets aside what the program has done until a capture."""
        if not self._watches() or self._captured or self._following:
            return None
        timeline = self._timeline
        depth = len(timeline.open)
        timeline.enter(GRAPH_CAPTURE)
        self._captured = Captured(timeline.replace(LoopPart([])), self._drawn, self._counted, depth)
        self._drawn, self._counted = DrawnBatches(), Counted()
        return self._captured

    def _end_capture(self, captured: Captured) -> None:
        self._timeline.leave_all_but(captured.depth + 1)
        assert captured.aside
        part, self._drawn, counted = captured.aside
        captured.rest = Computed(None, self._timeline.replace(part), self._counted)
        self._counted, captured.aside, self._captured = counted, None, None
        self._timeline.leave()

    def _capture(self, captured: Captured, owner: Any) -> None:
        """Notes an update that is captured, or a call of inference."""
        part = self._timeline.replace(LoopPart([]))
        self._given.update(part, id(owner), getattr(owner, "param_groups", None))
        captured.updates.append(Computed(owner, part, self._counted))
        self._counted = Counted()

    def _replay(self, captured: Captured, call: Callable[[], Any]) -> Any:
        """Replays a graph. Its updates are those of as many steps, each with an equal share of the time."""
        timeline = self._timeline
        if not self._watches() or self._following or FORWARD in timeline.open or BACKWARD in timeline.open:
            return call()
        self._forget_set_up()
        with timeline.phase(self._phase_of_replays):
            result = call()
        whole = timeline.part
        whole.updates = max(1, len(captured.updates))
        for computed in captured.updates:
            if timeline.part is not whole:
                timeline.part.whole = whole
            self._take_up(captured, computed)
            self._replayed(computed.owner)
        if captured.rest and captured.rest.counted.passes:
            self._take_up(captured, captured.rest)
            self._end_pass()
        return result

    _phase_of_replays = GRAPH_REPLAY

    def _replayed(self, optimizer: Any) -> None:
        """Notes an update by a replay."""
        self._update(optimizer)

    def _take_up(self, captured: Captured, computed: Computed) -> None:
        """Adds what a replay has computed for an update."""
        part, done = self._timeline.part, computed.part
        if computed.counted.passes and self._drawn.settle(part):
            self._mode_tells = self._mode_tells and self._timeline.base != EVALUATION
            self._timeline.rebase(OTHER)
        self._counted.add(computed.counted)
        part.first = part.first or done.first
        part.forwarded += done.forwarded if part.first == done.first else 0
        part.losses += done.losses
        part.replay = captured, captured.replays

    # What they share.

    def _watches(self) -> bool:
        """Tells whether the calling thread is the one to measure: the one that trains, or else the first one seen."""
        if is_compiling() or self._over:
            return False
        here = get_ident()
        if self._thread:
            return self._thread == here
        self._thread = here
        return True

    _is_here = _watches
    """The same where a hook takes nothing up that concerns the time of the loop."""

    def _take_over(self) -> None:
        """Measures the calling thread, which updates parameters, from now on, unless another one is measured that does.

        A thread that was seen first need not train; one that has ended will not train again.
        """
        with self._choosing:
            if not self._chosen:
                self._thread, self._timeline = threading.get_ident(), self._new_timeline()
                self._chosen = True
            elif self._thread not in sys._current_frames():
                self._end_phases()
                self._thread = threading.get_ident()
            else:
                self._others += 1

    def _end_phases(self) -> None:
        """Ends the phases that a thread has left open with its end."""
        self._timeline.leave_all_but(0)

    def _timeline_here(self) -> Timeline | None:
        """Returns the timeline of the calling thread; None if it is not measured."""
        if not self._watches():
            return None
        self._forget_set_up()
        return self._timeline

    def _begin_in_fork(self) -> None:
        """Measures a forked process on its own. That of a rank, such as a worker of a DataLoader, is not measured."""
        cost.stop()
        if self._following and self._following.training:
            self._over = True
            self._following.close()
        if self._host:
            self._forked = not self._over
            self._over = True
            self._host.close()  # otherwise the host would not learn that the rank has ended
        else:
            self._thread, self._timeline, self._chosen = 0, self._new_timeline(), False
            self._choosing = threading.Lock()  # another thread may have held it

    def _tell_of_fork(self) -> None:
        """Tells the host, once, that this fork of a rank trains or infers as well, and is not measured."""
        self._forked = False
        tell(self._address, "trained")

    def _new_timeline(self) -> Timeline:
        self._drawn.forget()
        return WatchedTimeline(self._following.enter) if self._following else Timeline()

    def _forget_set_up(self) -> None:
        """Forgets what came long before the first update, or everything in a process that never updates."""
        if not self._host and len(self._timeline.part.marks) > LONGEST_SETUP:
            self._timeline = self._new_timeline()

    def _evaluates(self) -> bool:
        """Tells whether the outermost modules are in evaluation mode, and gives that time its own phase."""
        if not self._mode_tells:
            return False
        model = self._latest_model()
        evaluates = model is None or not model.training
        if evaluates:
            evaluates = False
            for each in self._models.valuerefs():
                model = each()
                if model is not None:
                    evaluates = not model.training
                    if not evaluates:
                        self._latest_model = each
                        break
        base = EVALUATION if evaluates else OTHER
        if base != self._timeline.base:
            self._timeline.rebase(base)
        return evaluates

    def _size(self, module: torch.nn.Module, given: Any) -> int:
        """Returns the number of samples that a module is given, and notes their shape."""
        if self._needs_shape:
            self._sample_shape = self._sample_shape or samples_in(given)[1]
        return self._given.size(module, given)

    def _note_loader(self, iterator: Any) -> None:
        """Notes that the program draws from a DataLoader, and how and where it was made."""
        sampler = id(iterator._index_sampler)
        if len(self._loaders) < MOST_LOADERS or sampler in self._loaders:
            self._loaders[sampler] = of_loader(iterator), self._places.remembered.get(sampler)
        self._treatments.draw(sampler)

    def _known_of(self, losses: list[Any]) -> list[Loss]:
        """Returns what is known of those that are scalars, and notes their device."""
        found: list[Loss] = []
        for loss in losses:
            if isinstance(loss, torch.Tensor):
                self._timeline.timing.result(None if loss.is_cpu else loss.device)
            if self._following:  # it would find its own reference among what the program keeps
                continue
            if self._scaled:
                result, unscaled = self._scaled.pop(id(loss), (None, None))
                if result and result() is loss:
                    loss = unscaled
            if type(loss) is not torch.Tensor and isinstance(loss, torch.Tensor) and _is_plain(type(loss)):
                with torch._C.DisableTorchFunction():
                    loss = loss.as_subclass(torch.Tensor)
            if type(loss) is torch.Tensor and loss.numel() == 1:
                found.append(loss_of(loss))
        return found

    def _number_of(self, optimizer: Any) -> int:
        """Returns the number of an optimizer: the smallest one that no other optimizer has."""
        latest, latest_number = self._latest_optimizer
        if latest() is optimizer:
            return latest_number
        if not isinstance(optimizer, Hashable):
            return -id(optimizer)
        number = self._numbers.get(optimizer)
        if number is None:
            used = set(self._numbers.values())
            number = next(each for each in count() if each not in used)
            self._numbers[optimizer] = number
        self._latest_optimizer = ref(optimizer), number
        return number

    def _end_part(self, optimizer: Any, *, skipped: bool = False) -> None:
        """Ends a part of the loop with an update of the optimizer."""
        timeline = self._timeline
        if self._scaled:
            self._scaled.clear()
        if timeline.open:
            self._regions.cut(timeline)
        part = timeline.part
        part.graphs = compiled_graphs()
        self._counted.end_part()
        self._checks.end_step()
        self._drawn.update(part)
        if timeline.base == EVALUATION:
            self._updated_in_evaluation_mode(part)
        self._trains_in_evaluation_mode = not self._mode_tells
        self._given.update(part, id(optimizer), getattr(optimizer, "param_groups", None))
        timeline.end_part(self._number_of(optimizer), skipped=skipped, alone=len(self._made) + len(self._own or ()) < 2)
        if self._following:
            with self._unbroken():
                if self._host is None:
                    self._join()
                self._follow(self._following, optimizer)
            return
        self._look_for_modules(optimizer, called=part.first != 0)
        with cost:
            self._advance()

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Leaves the run if an exception ends this block, as a signal handler may raise one anywhere.

        What has been sent until then may end in the middle of a line, after which nothing more can be sent.
        """
        try:
            yield
        except BaseException:
            self._break_off()
            raise

    def _break_off(self) -> None:
        if not self._over and self._host:
            self._over = True
            cost.stop()
            if self._recording:
                self._recording.leave()
            self._host.close()

    def _advance(self) -> None:
        """Tells the host about the parts so far, and ends the program after the last one to measure."""
        try:  # as in `_unbroken`, whose context would take longer in every part
            if self._host is None:
                self._join()
            if self._recording:
                self._record(self._recording, self._timeline.complete)
            else:
                self._count_cost(self._timeline)
            if self._cached and self._host:
                self._skip_kept(self._host)
            if self._wanted:
                self._end_if_complete()
            now = monotonic()
            if self._host:
                self._tell(self._host, now)
            if self._host and not self._recording and (self._seconds or self._late):
                self._fit(self._host, now)
        except BaseException:
            self._break_off()
            raise

    def _count_cost(self, timeline: Timeline) -> None:
        """Counts a part of the loop whose cost is known, as those after the warm-up."""
        cost.end_part()
        warmup = self._length.warmup if self._length else self._warmup
        if timeline.complete >= (MOST_WARMUP if warmup is None else warmup):
            cost.begin(timeline.ended, timeline.complete)

    def _tell(self, host: Host, now: float) -> None:
        """Measures long steps, and sends the measured ones from time to time."""
        ended = self._timeline.ended
        if now - self._told_at > LONG_SECONDS:
            self._measure_steps(AFTER_EACH * (ended - self._told))
        self._told_at, self._told = now, ended
        if ended <= MOST_WARMUP or host.due(now):
            self._send_steps()
            if host.gone:
                self._end_without_host()

    def _fit(self, host: Host, now: float) -> None:
        """Finds the number of steps to measure, or reduces it where they take longer than the first ones."""
        if self._seconds:
            self._decide(host, self._seconds)
        elif self._late and now > self._late[0]:
            length = shortened(self._late[1], self._timeline.complete)
            self._late = None
            self._plan(host, length)
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        """Ends the program after the last step to measure."""
        if self._wanted and self._timeline.complete >= self._wanted:
            self._timeline.keep(self._wanted)
            self._finish()
            raise End(0, ALL_MEASURED)

    def _decide(self, host: Host, seconds: float) -> None:
        """Finds the number of steps that fit into the time, once it can be told.

        Rank 0 decides for all, because ranks that end after different steps would wait for each other. The host tells
        the others, which may be a few steps ahead by then: they end no earlier than AHEAD_SECONDS later.
        """
        if host.rank:
            if told := host.told_length():
                self._plan(host, Length(*told))
            return
        taken, alone = self._timeline.complete, self._timeline.rhythm.is_alone
        durations = self._durations
        if alone:  # more updates are held back to find a rhythm, unless the time is over with the next one
            taken, durations = self._timeline.ended, self._timeline.held()
        length = fitting(seconds, durations, self._warmup)
        if length and not (alone and length.steps > taken + 1):
            ahead = 2 + int(AHEAD_SECONDS / usual(durations)) if host.world_size > 1 else int(alone)
            length = Length(length.warmup, max(length.steps, taken + ahead), alone)
            if host.world_size == 1 and not alone:
                self._late = monotonic() + OVERRUN * seconds - sum(durations[1:]), length
            self._plan(host, length)

    def _skip_kept(self, host: Host) -> None:
        """Leaves out of the measurement the steps whose batches were made, once batches are given again."""
        complete = self._timeline.complete
        if self._unkept is not None or self._cached is None:
            return
        if not self._cached.is_ready and complete < (MOST_UNKEPT if self._drawn.trained else MOST_WARMUP):
            return
        self._unkept = complete + 1  # the batch of the next step may have been made too
        self._durations.clear()
        if self._length:
            self._plan(host, self._length)

    def _plan(self, host: Host, length: Length) -> None:
        self._length = length
        if self._cached and self._unkept is None:
            self._seconds = None
            return
        if self._unkept is not None and length.warmup < self._unkept:
            more = self._unkept - length.warmup
            length = length._replace(warmup=self._unkept, steps=length.steps + more)
        self._wanted, self._seconds = length.steps, None
        if length.each_update:
            self._timeline.rhythm.longest = length.steps
        host.put("planned", repeat=self._repeat, **length._asdict())
        host.flush()

    def _follow(self, following: Following, optimizer: Any) -> None:
        """Tells the host about an update of a program whose memory is followed, and ends it after the last one."""
        if not self._host or not self._wanted:
            return
        if not self._model_reported:
            self._model_reported = True
            self._report_model(optimizer)
        self._host.put("heartbeat", doing="a step", step=following.updates)
        self._host.flush()
        if self._host.gone:
            self._end_without_host()
        if following.updates >= self._wanted:
            self._finish()
            raise End(0, ALL_MEASURED)

    def _record(self, recording: ProbeRecording, complete: int) -> None:
        """Starts the recording with the first complete step, and advances it with every further one."""
        if complete and not self._recorded:
            if self._module_call:  # the recording wraps the same function, and the last one must be undone first
                return
            recording.start(list(self._roots.values()))
            self._wanted = complete + recording.steps  # on all ranks, so that they end together
        elif complete > self._recorded:
            recording.advance()
            assert self._wanted
            self._wanted += complete - self._recorded - 1  # several that were decided at once are one to the profiler
        self._recorded = complete

    # The outermost modules.

    def _look_for_modules(self, optimizer: Any, *, called: bool) -> None:
        """Looks for the outermost modules after the first update of an optimizer, in the next part of the loop.

        After that part it wraps the calls of their classes. Hooks on the modules would be copied and saved with them,
        and global hooks make compiled modules warn. If later a part has a backward pass and none of the modules was
        `called`, it looks for more. Where the memory is followed, it looks from the start, as nothing is compiled.
        """
        if self._is_settled and (called or self._counted.passes == self._passes) and self._settled_for() is optimizer:
            self._passes = self._counted.passes
            return
        found = self._known is None or len(self._roots) > self._known
        unknown = self._counted.passes > self._passes and not called
        self._looks -= 0 if found else 1 if unknown else 1 / LONGEST_PERIOD
        ended = (found or self._looks <= 0) and self._end_search()
        if ended or (self._most_roots and len(self._roots) > self._most_roots):
            self._most_roots = len(self._roots)
            trained = {type(root) for root in self._roots.values()}
            self._frozen_classes = {type(module) for module in self._frozen.values()} - trained
            for cls in (trained | self._frozen_classes) - self._wrapped:
                stand_in(cls, "__call__", self._call_module)
                self._wrapped.add(cls)
            for cls in {type(model) for model in self._models.values()} - self._switched:
                stand_in(cls, "train", self._change_mode)
                self._switched.add(cls)
            if self._models and not any(model.training for model in self._models.values()):
                self._mode_tells, self._trains_in_evaluation_mode = False, True
            self._treatments.apply_to(list(self._roots.values()))
            self._report_model(optimizer)
        is_new = optimizer not in self._optimizers
        self._passes = self._counted.passes
        if is_new:
            self._optimizers.add(optimizer)
            self._treatments.apply_again()
        if (is_new or (unknown and self._looks > 0)) and not self._recorded and not self._module_call:
            self._known = None if is_new else len(self._roots)
            self._begin_search()  # not while the steps are recorded, which wraps the same function
        self._is_settled = self._module_call is None
        self._settled_for = ref(optimizer)

    def _begin_search(self) -> None:
        """Wraps the call of every module, to find the outermost ones."""
        self._module_call = torch.nn.Module.__call__
        stand_in(torch.nn.Module, "__call__", self._find)

    def _end_search(self) -> bool:
        """Takes the wrapper away. Returns whether there was one."""
        if self._module_call is None:
            return False
        torch.nn.Module.__call__ = self._module_call  # type: ignore[method-assign]
        self._module_call = self._known = None
        return True

    def _find(self, call: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._call_module(call, module, *args, **kwargs)

    def _look_at(self, module: torch.nn.Module, args: Any, kwargs: Any, *, inner: bool) -> None:
        """Notes a module that is called while the outermost ones are looked for; `inner` if another module calls it."""
        if not torch.is_grad_enabled() or not (module.training or self._is_updated(module)):
            if not inner and id(module) not in self._frozen and _is_model(module):
                self._frozen[id(module)] = module
                if self._following and id(module) not in self._roots:
                    self._following.untrained(module)
            return
        if inner and not self._drawn.tells:
            self._given.layer(module, args, kwargs)
        first = first_parameter(module)
        if first is not None:
            self._autocast = autocast_of(first) or self._autocast
        if not inner and any(parameter.requires_grad for parameter in parameters_of(module)):
            if self._following and id(module) not in self._roots:  # a timed program gets it later
                self._treatments.apply_to([module], updated=False)
            if id(module) not in self._roots or "model" not in self._found:
                self._places.model(self._found)
            self._add_root(module)

    def _is_updated(self, module: torch.nn.Module) -> bool:
        """Tells whether an optimizer has a parameter of a module, which a teacher in evaluation mode lacks."""
        first = next((parameter for parameter in parameters_of(module) if parameter.requires_grad), None)
        groups = (group for optimizer in self._made for group in optimizer.param_groups)
        return first is not None and any(each is first for group in groups for each in group["params"])

    def _add_root(self, module: torch.nn.Module) -> None:
        model = unwrapped(module)
        self._roots[id(module)], self._models[id(model)] = module, model
        self._is_settled = False

    # What the host is told.

    def _join(self) -> None:
        """Makes this process a rank of the run. One that the host refuses runs on, unmeasured."""
        keep_from_compilation()
        self._chosen = True
        try:
            self._host = host = Host(self._address, *place(), open_store)
        except ConnectionRefusedError:
            self._end_without_host()
        except (OSError, ValueError, KeyError):
            self._over = True
            return
        settings, (self._repeat, *_) = host.job["settings"], host.job["repeats"]
        if self._following:
            self._wanted = settings["memory"]["steps"]
        else:
            atexit.register(self._leave)
        self._time = round(1e9 * host.unix(self._timeline.began))
        Finalize(None, self._leave, exitpriority=0)  # processes that multiprocessing forks run no exit handlers
        if host.rank == 0:
            host.put("environmentcaptured", environment=facts())
            if self._counted.by_hand and not (self._updates or self._made or self._repeat):
                host.warn(WITHOUT_OPTIMIZER)
        if self._repeat == host.job["profiled"]:
            self._begin_recording(host, settings["profiling"])
        if not self._following:
            self._begin_steps(host, settings["training"])
        elif self._wanted:
            host.put("planned", repeat=self._repeat, steps=self._wanted)
        host.flush()

    def _begin_recording(self, host: Host, profiling: dict[str, Any]) -> None:
        """Prepares what records the steps of a repeat that is not measured."""
        sampled = SPREAD_SAMPLED if host.is_spread else host.job.get("sampled") or 0
        sampler = StackSampler(self._thread, self._places, self._phase_now)
        self._recording = ProbeRecording(profiling, host, self._repeat, sampler, self._lines, sampled)
        os.register_at_fork(before=self._recording.pause)

    def _phase_now(self) -> str:
        return self._timeline.current

    def _begin_steps(self, host: Host, training: dict[str, Any]) -> None:
        """Finds how many steps to measure, as far as that is known before the first one."""
        self._warmup, steps = training["warmup_steps"], training["steps"]
        self._samples = training.get("samples_per_step")
        warmup = MOST_WARMUP if self._warmup is None else self._warmup
        if steps is None and host.job["length"]:
            self._plan(host, Length(*host.job["length"]))
        elif steps is None and host.is_spread:  # no host can tell the ranks of other machines
            self._plan(host, Length(warmup, warmup + SPREAD_STEPS))
        elif steps is None:
            self._seconds = host.job["seconds"]
        elif steps != "all":
            self._plan(host, Length(warmup, warmup + steps))

    def _report_model(self, optimizer: Any) -> None:
        if self._host:
            self._needs_shape = False
            found = {id(each): each for root in self._roots.values() for each in parameters_of(root)}
            parameters = [each for each in found.values() if not is_lazy(each)]
            updated = [each for group in getattr(optimizer, "param_groups", ()) for each in group["params"]]
            loaders = self._training_loaders()
            lines = enumerate(dict.fromkeys(place for _, place in loaders if place), 1)
            made = {f"loader {number}" if number > 1 else "loader": place for number, place in lines}
            self._host.put(
                "modelbuilt",
                repeat=self._repeat,
                parameters=sum(each.numel() for each in parameters),
                trainable_parameters=sum(each.numel() for each in parameters if each.requires_grad),
                sample_shape=self._sample_shape,
                tokens_per_sample=None,
                seconds=None,
                device=next((each.device.type for each in [*parameters, *updated]), None),
                settings={
                    **next((facts for facts, _ in loaders if facts), {}),
                    **of_process(list(self._roots.values()), optimizer, self._autocast or self._inner_autocast),
                    "training.grad_accumulation": max(1, self._counted.passes - self._passes),
                },
                places={**self._found, **made},
                optimizers=of_optimizers(self._made),
            )

    def _training_loaders(self) -> list[tuple[dict[str, Any], str | None]]:
        """Returns how and where the DataLoaders that train were made; without any, the first one."""
        known = [self._loaders[sampler] for _, sampler in self._drawn.found if sampler in self._loaders]
        return known or list(self._loaders.values())[:1]

    def _measure_steps(self, most: int | None = None, *, ended: bool = False) -> None:
        """Measures the next steps that the device has finished, at most so many; `ended` after the last one."""
        self._measured += [self._step(parts).json() for parts in islice(self._timeline.steps(ended=ended), most)]

    def _send_steps(self, *, ended: bool = False) -> None:
        """Sends the measured steps; `ended` with all that are left, after the last one."""
        assert self._host
        if not self._profiler_reported and not self._recording and is_profiled():
            self._profiler_reported = True
            self._host.warn("the program runs a profiler of its own, which slows it down")
        if self._others and not self._others_reported:
            self._others_reported = True
            self._host.warn(
                "several threads of the program update parameters; the updates of the one that began are measured, and "
                "those of the others are not counted"
            )
        self._measure_steps(ended=ended)
        steps, self._measured = self._measured, []
        if steps:
            timing = self._timeline.timing
            self._host.put_encoded("stepsmeasured", "steps", steps, token=self._token, anew=timing.is_new)
            self._token, timing.is_new = None, False
        elif not ended and self._timeline.rhythm.is_looking:  # its updates show that the program goes on
            doing = LOOKING if len(self._made) > 1 else FIRST
            self._host.put("heartbeat", doing=doing.format(self._timeline.ended), step=None)
            if not self._recording and monotonic() - self._held_at > HELD_SECONDS:
                self._held_at = monotonic()
                self._host.put_encoded("stepsheld", "steps", self._held_steps())
        self._host.flush()
        if (token := self._host.take_token()) is not None:
            self._timeline.part.token = token

    def _step(self, parts: list[LoopPart]) -> MeasuredStep:
        """Returns the next step to send."""
        step = self._described(parts, self._sent, self._time)
        if parts[-1].graphs > self._graphs:
            self._compiled.append(self._sent)
        self._graphs = parts[-1].graphs  # fewer where the program has reset the counters
        for part in parts:
            # A share of the time of several updates may end before the token, which was read with or after all of them.
            if part.token is not None and part.whole is None and part.updates == 1:
                self._token = self._sent, part.token
        total = step.total
        if self._seconds:
            self._durations.append(total / 1e9)
        self._sent += 1
        self._time += total
        self._elapsed += total
        self._evaluated += step.phases.get(EVALUATION, 0)
        self._undrawn += parts[-1].undrawn
        return step

    def _held_steps(self) -> Iterator[str]:
        """Yields the steps that the updates that are held back would make if they were the last ones, in JSON."""
        number, time = self._sent, self._time
        for parts in self._timeline.pending():
            step = self._described(parts, number, time, held=True)
            number, time = number + 1, time + step.total
            yield step.json()

    def _described(self, parts: list[LoopPart], number: int, time: int, *, held: bool = False) -> MeasuredStep:
        assert self._host
        phases, loss, skipped = self._timeline.measure(parts, held=held)
        first, last = parts[0], parts[-1]
        return MeasuredStep(
            self._repeat,
            self._host.rank,
            number,
            time,
            sum(phases.values()),
            phases,
            last.ended - first.began,
            self._samples_of(parts),
            loss,
            first.device_idle,
            skipped,
        )

    def _samples_of(self, parts: list[LoopPart]) -> int:
        """Returns the samples of a step."""
        if self._samples is not None:
            return self._samples
        if self._drawn.trained and not parts[-1].undrawn:
            return parts[0].drawn if len(parts) == 1 else sum(part.drawn for part in parts)
        if len(parts) == 1:
            return parts[0].forwarded
        found: Counter[int] = Counter()
        for part in parts:
            found[part.optimizer] += part.forwarded
        self._shared += sum(samples > 0 for samples in found.values()) > 1
        return max(found.values())

    @property
    def _has_loaders(self) -> bool:
        """Whether the samples of most steps are those of DataLoaders."""
        return self._drawn.trained and 2 * self._undrawn <= self._sent

    def _samples_from(self) -> str:
        """Returns what the samples are, as a part of a sentence; empty if they are unknown."""
        if self._samples is not None:
            return "set by --samples-per-step"
        if self._has_loaders:
            return in_words([(how, self._places.remembered.get(sampler, "")) for how, sampler in self._drawn.found])
        given = self._given
        return (OF_LOSS if given.by_rows else OF_MODEL).format(given.model) if given.model else ""

    def _finish(self) -> None:
        """Sends what is left and leaves the run. It waits for the device, whose last step has been issued."""
        self._over = True
        assert self._host
        if missed := self._treatments.missed():
            self._host.put("treatmentsmissed", repeat=self._repeat, missed=missed)
        if self._following:
            self._following.send(self._host, self._repeat, self._wanted or 0)
        else:
            wall = self._timeline.end()
            self._send_steps(ended=True)
            self._report_rhythm(self._host)
            self._report_doubt(self._host)
            if self._compiled:
                self._host.put("graphscompiled", repeat=self._repeat, steps=self._compiled)
            if self._recording:
                self._recording.close(self._places)
            self._host.put(
                "repeatdone",
                repeat=self._repeat,
                wall=wall,
                work=self._work(),
                samples_from=self._samples_from()[:1000],
                peak_rss=peak_rss(),
                gpus=used_gpus(),
                partial_first=self._timeline.partial_first,
                probe_time=cost.end(self._timeline.ended, self._timeline.complete),
                **self._timeline.timing.facts(),
            )
        self._host.put("done")
        self._host.flush()

    def _work(self) -> dict[str, Any] | None:
        """Returns the counted work as the fields of `gpubench.events.WorkCounted`; None if nothing was updated."""
        counted = self._counted.found(self._timeline.complete)
        return counted and {**counted, **self._checks.found()}

    def _report_rhythm(self, host: Host) -> None:
        """Says that it is uncertain which updates make a step, or that it has changed."""
        rhythm = self._timeline.rhythm
        if host.rank:
            return
        if rhythm.uncertain:
            host.warn(NO_RHYTHM.format(rhythm.optimizers))
        elif not self._repeat and rhythm.longest == rhythm.complete and rhythm.optimizers == 1 < len(self._made):
            host.warn(ONE_OF_SEVERAL.format(len(self._made)))
        elif rhythm.changed and rhythm.changed < rhythm.complete:
            enough = 2 * rhythm.changed < rhythm.complete  # are left after it
            host.warn(CHANGED.format(rhythm.changed) + (WITHOUT_THOSE.format(rhythm.changed) if enough else ""))

    def _report_doubt(self, host: Host) -> None:
        """Says that the number of samples in a step is uncertain, or what evaluation is, and why."""
        if host.rank or self._repeat:
            return
        if not self._has_loaders and self._evaluated > MUCH_EVALUATION * self._elapsed:
            host.warn(IN_EVALUATION_MODE.format(self._evaluated / self._elapsed))
        if self._has_loaders:
            doubt = DIFFERENT if self._drawn.doubtful else ""
        else:
            doubt = self._given.doubt() or (SHARED if 2 * self._shared > self._sent else "")
        if doubt and self._samples is None:
            host.warn(UNCERTAIN.format(doubt))

    def _end_without_host(self) -> NoReturn:
        """Ends a program whose host was killed, as the host would have ended it."""
        self._over = True
        last_resort = threading.Timer(SECONDS_TO_END, os._exit, [1])  # it may catch SystemExit, or wait for a rank
        last_resort.daemon = True
        last_resort.start()
        raise End(1, HOST_GONE)  # not 0, so that a launcher ends the other ranks

    def _leave(self) -> None:
        """Leaves the run at the end of a program that ends before all steps were measured."""
        if not self._over and not self._host and self._following and self._following.training:
            self._join()  # it has ended before its first update, perhaps for lack of memory
        if not self._over and self._host:
            self._finish()


def nothing() -> None:
    """Stands for a weak reference to nothing."""


def _is_model(module: torch.nn.Module) -> bool:
    """Tells whether a module has layers with parameters, unlike a layer by itself, whose class others may share."""
    return next(module.children(), None) is not None and first_parameter(module) is not None


def first_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the first tensor of a call of a module; None if there is none, or what it is given hides it."""
    if args and type(args[0]) is torch.Tensor:
        return args[0]
    try:
        return first_tensor((args, kwargs))
    except Exception:  # what it is given is of the program's own class
        return None


def _is_plain(kind: type) -> bool:
    """Tells whether tensors of a class hold their values themselves, unlike those that are made of other tensors."""
    return getattr(kind, "__torch_dispatch__", None) is getattr(torch.Tensor, "__torch_dispatch__", None)


def _listed(tensors: Any) -> list[Any]:
    """Returns the tensors in an argument of a function of torch.autograd."""
    if isinstance(tensors, Mapping):
        return list(tensors.values())
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
