"""Measures a loop that goes on as it did, with as little as possible in each of its steps.

Once nothing about the loop is left to find out, a hook of a usual step only reads the clock, and notes what it sees.
What follows from it is found out later, for many short steps at once: code that runs after each operator of PyTorch
takes several times as long, because neither is in the caches of the CPU when it is its turn. Whatever is not usual
ends this: first what has been noted is taken up, and then the hooks of `Probe` do all the rest of that step.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any, Callable, Mapping
from weakref import ref

import torch

from . import ADDRESS_VARIABLE, FOLLOW_VARIABLE, TREATMENTS_VARIABLE
from .batches import INDICES, DataPass, Loader, samples_of_next
from .cost import cost
from .counted import elements_of, shape_of
from .given import ModuleCall
from .hooks import BACKWARD, DATA_WAIT, FORWARD, LONG_SECONDS, OPTIMIZER, ZERO_GRAD, Probe, first_of_call, nothing
from .length import MOST_WARMUP
from .modules import first_parameter
from .timeline import OTHER
from .treatments import compiled_graphs

DREW, GIVEN, ENDED, UPDATED = "drew", "given", "ended", "updated"
"""What is noted besides the phases that begin."""
PHASES = {ZERO_GRAD: OPTIMIZER}
"""The phases whose name is another one than that of what is noted."""
LONG = round(1e9 * LONG_SECONDS)
"""The time in nanoseconds from which on a step is long."""
LATER = 250_000
"""Of long steps so many nanoseconds are noted for each one that is taken up at once, which is then a small part of the
step in which that is done. Of short ones all are that fit between two flushes: fewer than one in a hundred has to wait.
"""
MOST_WAITS = 64
"""The largest number of steps in a row that are not noted, as something in each of them seems to be not usual."""


def install(variables: Mapping[str, str]) -> None:
    """Installs the hooks and the treatments that the environment variables name."""
    treatments = json.loads(variables.get(TREATMENTS_VARIABLE, "{}"))
    SteadyProbe(variables[ADDRESS_VARIABLE], treatments, follows=FOLLOW_VARIABLE in variables).install()


class Notes:
    """What the hooks of usual steps read and note, close to each other in memory."""

    __slots__ = (
        "at", "by_indices", "called", "changes", "drawn", "draws", "entries", "given", "iterator", "left",
        "looks_after", "mark", "model", "optimizer", "parameter", "root", "running", "shape", "sizes", "skipped",
        "steady", "took", "until",
    )  # fmt: skip

    def __init__(self) -> None:
        self.steady = False
        """Whether the hooks only note what they see."""
        self.running = ""
        """The phase that is running, of those that are noted."""
        self.entries: list[Any] = []
        """What they have noted, in threes: what has happened, when, and what is to be known of it."""
        self.mark: Callable[[], int] = int
        """The clock."""
        self.draws = False
        """Whether each step draws a batch. If not, its samples are those that the module is given."""
        self.drawn = self.called = False
        """Whether a batch was drawn in the current step, and the module called."""
        self.iterator: Callable[[], Any] = nothing
        self.model: Callable[[], Any] = nothing
        self.root: Callable[[], Any] = nothing
        self.parameter: Callable[[], Any] = nothing
        self.optimizer: Callable[[], Any] = nothing
        """Return that of the DataLoader, the model, the outermost module, which may wrap it, its first parameter, and
        the optimizer."""
        self.sizes: deque[int | None] = deque()
        """The numbers of indices of the batches that have not arrived yet."""
        self.by_indices = False
        """Whether these are their samples."""
        self.shape: Any = None
        """The shape of the first tensor that the module was given last; `given` are its samples and elements."""
        self.given: tuple[Any, ...] = (0, 0)
        self.changes = False
        """Whether a treatment changes the calls of the module."""
        self.skipped = 0
        """The steps since the last one that was looked at closely, of which the checks have not been told."""
        self.looks_after = self.left = 0
        """The steps before the next one to look at closely, and those that may still be noted."""
        self.took = self.at = self.until = 0
        """The time of the last step in nanoseconds, when it ended, and when they are taken up at the latest, by
        `time.monotonic_ns`."""


class SteadyProbe(Probe):
    """The measurement of a process that trains."""

    def __init__(self, address: str, treatments: dict[str, Any], *, follows: bool = False) -> None:
        super().__init__(address, treatments, follows=follows)
        self._notes = Notes()
        self._pass = DataPass(Loader())
        """The pass over the data."""
        self._root = self._owner = self._number = 0
        """The identities of the outermost module and of the optimizer, and the number of the latter."""
        self._catches_up = False
        """Whether what was noted is being taken up. What a signal handler does then is not measured."""
        self._waits = self._rests = 0
        """The steps that are not noted after one that was not usual, and those of them that are left."""
        self._methods: dict[str, Callable[[int, Any], None]] = {
            DATA_WAIT: self._began_draw,
            DREW: self._drew,
            FORWARD: self._began_call,
            GIVEN: self._began_call_with,
            BACKWARD: self._began_backward,
            ZERO_GRAD: self._began_clearing,
            OPTIMIZER: self._began_update,
            ENDED: self._ended,
            UPDATED: self._updated,
        }
        """What takes up what has happened."""

    # What stands in for the functions of torch.

    def _next_index(self, call: Callable[..., Any], iterator: Any) -> Any:
        notes = self._notes
        if not notes.steady or notes.running != DATA_WAIT:
            return super()._next_index(call, iterator)
        found = call(iterator)
        if type(found) is list and notes.iterator() is iterator:
            notes.sizes.append(len(found))
        else:
            self._drawn.index(iterator, found)
        return found

    def _next_batch(self, call: Callable[..., Any], iterator: Any) -> Any:
        notes = self._notes
        if not self._is_here() or notes.running == DATA_WAIT:  # a DataLoader may draw from another one
            return call(iterator)
        if not notes.steady or notes.running or notes.iterator() is not iterator or not self._trains_now():
            return super()._next_batch(call, iterator)
        mark = notes.mark()
        if not notes.steady:
            return super()._next_batch(call, iterator)
        notes.running = DATA_WAIT
        notes.entries += (DATA_WAIT, mark, None)
        try:
            batch = call(iterator)
            mark, sizes = notes.mark(), notes.sizes
            size = (sizes[0] if notes.by_indices and sizes else None) or 0
            if size > 1:
                sizes.popleft()
            else:
                size = samples_of_next(self._pass, iterator, batch)
        except BaseException as error:
            self._end()
            self._catch_up()
            self._drawn.drawing = False
            if isinstance(error, StopIteration):
                self._drawn.end_pass()
            raise
        if notes.running:
            notes.running, notes.drawn = "", True
            notes.entries += (DREW, mark, size)
        else:  # what was noted has been taken up since it began
            self._timeline.leave()
            self._take(size)
        return batch

    def _begin_pass(self, call: Callable[..., Any], iterator: Any, *args: Any, **kwargs: Any) -> None:
        if self._notes.steady and self._is_here():
            self._catch_up()
        super()._begin_pass(call, iterator, *args, **kwargs)

    def _call_module(self, call: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        notes = self._notes
        if not self._is_here() or notes.running in (FORWARD, BACKWARD):  # inside of another one, or computed again
            return call(module, *args, **kwargs)
        if not notes.steady or notes.running or notes.root() is not module or not self._trains_now():
            return super()._call_module(call, module, *args, **kwargs)
        if not notes.draws and not self._is_given_a_batch(args):
            return super()._call_module(call, module, *args, **kwargs)
        sizes, looks = notes.given, not notes.looks_after
        if looks or not args or not _has_shape(args[0]) or args[0].shape != notes.shape:
            sizes = self._look_at_call(module, args, kwargs, looks=looks)
        what, facts = FORWARD, sizes
        if not notes.draws:
            version = getattr(notes.parameter(), "_version", 0)
            what, facts = GIVEN, (sizes, ModuleCall(sizes[0], ref(args[0]), version), args[0].shape)
        mark = notes.mark()
        if not notes.steady:
            return super()._call_module(call, module, *args, **kwargs)
        notes.running, notes.called = FORWARD, True
        notes.entries += (what, mark, facts)
        try:
            if notes.changes:
                result = self._treatments.call(call, module, args, kwargs)
            else:
                result = call(module, *args, **kwargs)
        except BaseException:
            self._end()
            self._catch_up()
            self._drawn.failed()
            self._discount(module, sizes[0])
            raise
        self._end()
        if looks:
            self._checks.returned(result)
        return result if notes.draws else self._note_result(result)

    def _is_given_a_batch(self, args: tuple[Any, ...]) -> bool:
        """Tells whether a call is the only one so far in a step without a DataLoader, and with a new tensor."""
        usual = not self._notes.called and args and _has_shape(args[0]) and args[0].shape
        return bool(usual) and not self._given.is_made(args[0])

    def _look_at_call(self, module: torch.nn.Module, args: Any, kwargs: Any, *, looks: bool) -> tuple[Any, ...]:
        """Returns the samples and the elements of a call, and its shape in words if the step is looked at closely."""
        tensor, notes = first_of_call(args, kwargs), self._notes
        found = self._size(module, (args, kwargs)), elements_of(tensor)
        has_rows = args and tensor is args[0] and _has_shape(tensor) and tensor.dim() > 1  # others count by their type
        notes.shape = tensor.shape if has_rows else None
        notes.given = found
        if not looks:
            return found
        self._checks.give(tensor)
        return *found, shape_of(tensor)

    def _backward(self, call: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        notes = self._notes
        if not self._is_here() or notes.running == BACKWARD:
            return call(tensors, *args, **kwargs)
        if not notes.steady or notes.running or type(tensors) is not torch.Tensor:
            return super()._backward(call, tensors, *args, **kwargs)
        losses = self._known_of([tensors])
        mark = notes.mark()
        if not notes.steady:
            return super()._backward(call, tensors, *args, **kwargs)
        notes.running = BACKWARD
        notes.entries += (BACKWARD, mark, losses)
        try:
            return call(tensors, *args, **kwargs)
        finally:
            self._end()

    def _zero_gradients(self, call: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_here():
            return call(optimizer, *args, **kwargs)
        notes = self._notes
        if not notes.steady or notes.running:
            return super()._zero_gradients(call, optimizer, *args, **kwargs)
        mark = notes.mark()
        if not notes.steady:
            return super()._zero_gradients(call, optimizer, *args, **kwargs)
        notes.running = ZERO_GRAD
        notes.entries += (ZERO_GRAD, mark, None)
        try:
            return call(optimizer, *args, **kwargs)
        finally:
            self._end()

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        notes = self._notes
        usual = self._is_here() and notes.steady and not notes.running and notes.called
        usual = usual and notes.drawn == notes.draws and notes.optimizer() is optimizer
        usual = usual and (not notes.draws or notes.iterator() is not None)  # a program may leave the pass before
        usual = usual and len(args) < 2 and not kwargs and getattr(optimizer, "found_inf", None) is None
        mark = notes.mark()
        if not usual or not notes.steady:
            return super()._before_update(optimizer, args, kwargs)
        notes.running = OPTIMIZER
        notes.entries += (OPTIMIZER, mark, None)
        return None

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        notes = self._notes
        here, graphs, mark = self._is_here(), compiled_graphs(), notes.mark()
        if not here or notes.running != OPTIMIZER:
            super()._after_update(optimizer, args, kwargs)
            return
        notes.took, notes.at = mark - notes.at, mark
        notes.running, notes.drawn, notes.called = "", False, False
        notes.entries += (UPDATED, mark, graphs)
        notes.left -= 1
        if notes.looks_after:
            notes.looks_after -= 1
            notes.skipped += 1
        else:
            self._look()
        if not notes.left or mark > notes.until:
            self._catch_up()
            with cost:
                self._advance()
        else:
            cost.end_part()

    def _look(self) -> None:
        """Ends a step that was looked at closely."""
        notes, checks = self._notes, self._checks
        skipped, notes.skipped = notes.skipped, 0
        checks.skip(skipped)
        checks.end_step()
        notes.looks_after = checks.until_next

    def _enter_autocast(self, call: Callable[..., Any], context: Any) -> Any:
        if self._notes.running == FORWARD and self._inner_autocast is None and self._is_here():
            self._catch_up()
        return super()._enter_autocast(call, context)

    def _changed_mode(self) -> None:
        notes = self._notes
        if not self._is_here() or not notes.steady or notes.running or not self._trains_now():
            super()._changed_mode()

    # What they share.

    def _watches(self) -> bool:
        watches = super()._watches() and not self._catches_up
        if watches and self._notes.steady:
            self._catch_up()
        return watches

    def _end_phases(self) -> None:
        self._catch_up()
        super()._end_phases()

    def _trains_now(self) -> bool:
        model = self._notes.model()
        return model is not None and model.training and torch.is_grad_enabled()

    def _end(self) -> None:
        """Ends the phase that is running."""
        notes = self._notes
        mark = notes.mark()
        if notes.running:
            notes.running = ""
            notes.entries += (ENDED, mark, None)
        else:  # what was noted has been taken up since it began
            self._timeline.leave()

    # What follows from what they have noted.

    def _catch_up(self) -> None:
        """Takes up what has been noted. From here on the hooks do all that they do in a step that is not usual."""
        notes = self._notes
        if not notes.steady:
            return
        # Nothing is called before these are set: a signal handler that runs after a call would take up the same notes.
        noted, running, skipped = notes.entries, notes.running, notes.skipped
        notes.steady, notes.running, notes.entries, notes.skipped = False, "", [], 0
        self._catches_up = True
        methods, updates = self._methods, self._updates
        try:
            with cost:
                entries = iter(noted)
                for what, when, facts in zip(entries, entries, entries):
                    methods[what](when, facts)
            self._counted.skip(self._owner, self._updates - updates)
            self._checks.skip(skipped)
            self._waits = 0 if self._updates > updates else min(2 * self._waits or 1, MOST_WAITS)
            self._rests = self._waits
            if running:
                self._timeline.open.append(PHASES.get(running, running))
                if running == OPTIMIZER:
                    self._updating[self._owner], self._reads_values = 0, False
        except BaseException:
            self._break_off()
            raise
        finally:
            self._catches_up = False

    def _began_draw(self, mark: int, _: None) -> None:
        marks = self._timeline.part.marks
        self._drawn.begin(self._pass, len(marks), evaluates=False)
        marks.append((DATA_WAIT, mark))

    def _drew(self, mark: int, size: int) -> None:
        self._timeline.part.marks.append((OTHER, mark))
        self._take(size)

    def _take(self, size: int) -> None:
        self._drawn.drawing = False
        self._drawn.take(self._pass, size, counts=True)
        self._counted.batches += 1

    def _began_call(self, mark: int, sizes: tuple[Any, ...]) -> None:
        part = self._timeline.part
        self._drawn.called(len(part.marks), trains=True)
        part.first = self._root
        part.forwarded += sizes[0]
        self._counted.give(*sizes)
        part.marks.append((FORWARD, mark))

    def _began_call_with(self, mark: int, facts: tuple[Any, ...]) -> None:
        sizes, call, shape = facts
        self._began_call(mark, sizes)
        self._given.note(self._root, call, shape)

    def _began_backward(self, mark: int, losses: list[Any]) -> None:
        part = self._timeline.part
        part.losses += losses
        self._counted.passes += 1
        self._given.settle([])
        self._drawn.settle(part)
        part.marks.append((BACKWARD, mark))

    def _began_clearing(self, mark: int, _: None) -> None:
        self._counted.clear()
        self._timeline.part.marks.append((OPTIMIZER, mark))

    def _began_update(self, mark: int, _: None) -> None:
        self._timeline.part.marks.append((OPTIMIZER, mark))

    def _ended(self, mark: int, _: None) -> None:
        self._timeline.part.marks.append((OTHER, mark))

    def _updated(self, mark: int, graphs: int) -> None:
        timeline = self._timeline
        part = timeline.part
        part.marks.append((OTHER, mark))
        part.graphs = graphs
        self._updates += 1
        self._counted.end_part()
        self._drawn.update(part, draws=self._notes.draws)
        self._given.update(part, self._owner, None)
        timeline.end_part(self._number)
        self._passes = self._counted.passes

    # When the hooks only note what they see.

    def _advance(self) -> None:
        super()._advance()
        notes, ended = self._notes, self._timeline.part.began
        if notes.at != ended:  # the last step was not noted
            notes.took, notes.at = ended - notes.at, ended
        if self._rests:
            self._rests -= 1
        elif self._goes_on():
            self._begin_notes()

    def _goes_on(self) -> bool:
        """Tells whether nothing is left to find out about the loop."""
        timeline, drawn = self._timeline, self._drawn
        if not (self._is_settled and timeline.timing.is_on_cpu and timeline.ended > MOST_WARMUP and self._host):
            return False
        if self._recording or self._seconds or self._scaled or self._captured or self._started or self._needs_shape:
            return False
        if not (self._mode_tells and drawn.is_settled and timeline.rhythm.is_single):
            return False
        if self._settled_for() is not self._latest_optimizer[0]():
            return False
        if timeline.open or timeline.base != OTHER or (self._cached and self._unkept is None):
            return False
        if not drawn.tells:
            return self._given.is_settled
        iterator = self._noted_loader()
        return iterator is not None and drawn.is_known_to_train(iterator)

    def _begin_notes(self) -> None:
        """Begins to note the steps, until one is not usual."""
        notes, timeline, host = self._notes, self._timeline, self._host
        assert host
        optimizer, number = self._latest_optimizer
        owner = optimizer()
        self._owner, self._number, self._root = id(owner), number, id(self._latest_root())
        notes.left = self._counted.until_due(self._owner)
        if self._wanted is not None:
            notes.left = min(notes.left, self._wanted - timeline.complete - 1)
        if notes.took > LONG:
            notes.left = min(notes.left, notes.took // LATER)
        if notes.left < 1:
            return
        notes.draws, notes.iterator = self._drawn.tells, nothing
        if notes.draws:
            self._pass, notes.iterator = self._drawn.pass_of(self._noted_loader()), self._noted_loader
            notes.sizes, notes.by_indices = self._pass.sizes, self._pass.loader.counted == INDICES
        notes.model, notes.root = self._latest_model, self._latest_root
        notes.parameter = nothing if (first := first_parameter(self._latest_root())) is None else ref(first)
        notes.optimizer, notes.changes = optimizer, self._treatments.changes_calls
        notes.until = round(1e9 * (host.flush_at if self._late is None else min(host.flush_at, self._late[0])))
        notes.mark = timeline.timing.now
        notes.looks_after = self._checks.until_next
        notes.shape, notes.drawn, notes.called = None, False, False
        notes.steady = True

    def _leave(self) -> None:
        if not self._over:
            self._catch_up()
        super()._leave()

    def _begin_in_fork(self) -> None:
        self._notes = Notes()
        super()._begin_in_fork()


def _has_shape(tensor: Any) -> bool:
    """Tells whether a tensor has a shape, from which the samples of a call follow. A nested one has none."""
    return type(tensor) is torch.Tensor and not tensor.is_nested
