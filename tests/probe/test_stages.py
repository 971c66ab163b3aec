"""The stages of making batches: what is found in a dataset, how it is named, and that nothing of it changes."""

import functools
import io
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher

from gpubench.probe import stages as stages_module
from gpubench.probe.observed import SourcePlaces
from gpubench.probe.stages import MOST_CALLS, Fetching, OneIn, StageFinder, Stages

Record = dict[str, Any]
PACKED = zlib.compress(bytes(1000))


class Clock:
    """A clock that goes on by hand, for both the time and the CPU time."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def tick(self) -> None:
        self.now += 1000

    def spend(self, milliseconds: int) -> None:
        self.now += milliseconds * 1_000_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(stages_module, "perf_counter_ns", made)
    monkeypatch.setattr(stages_module, "thread_time_ns", made)
    return made


@pytest.fixture(autouse=True)
def _known_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no test leave stopwatches in the functions of modules and in classes."""

    def restored(finder: StageFinder, owner: Any, name: str, value: Any) -> None:
        with suppress(Exception):
            monkeypatch.setattr(owner, name, value)

    monkeypatch.setattr(StageFinder, "_set", restored)
    monkeypatch.setattr(zlib, "decompress", zlib.decompress)
    for name, functions in stages_module.KNOWN.items():
        for path in functions:
            owner: Any = sys.modules.get(name)
            *classes, last = path.split(".")
            for each in classes:
                owner = getattr(owner, each, None)
            if owner is not None and hasattr(owner, last):
                monkeypatch.setattr(owner, last, getattr(owner, last))


@pytest.fixture
def program(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Makes modules of a program; `spend` in them takes a number of milliseconds, and is no code of the program."""

    def make(source: str, name: str = "program") -> Any:
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        module = ModuleType(name)
        module.__file__ = str(path)
        vars(module).update(spend=clock.spend, torch=torch, nn=nn, Dataset=Dataset, functools=functools, zlib=zlib)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(source, str(path), "exec"), vars(module))
        return module

    return make


def fetch(dataset: Any, *, batches: int = 2, size: int = 2, collate: Any = list) -> list[Record]:
    """Makes batches of a dataset, and returns what was recorded of them."""
    found: list[Record] = []
    stages = Stages()
    if isinstance(dataset, IterableDataset):
        fetcher: Any = _IterableDatasetFetcher(dataset, True, collate, False)
    else:
        fetcher = _MapDatasetFetcher(dataset, True, collate, False)
    StageFinder(stages, SourcePlaces()).look_at(dataset, collate)
    Fetching(fetcher, stages, lambda record: found.append({**record, "places": stages.places}))
    for number in range(batches):
        fetcher.fetch(list(range(number * size, (number + 1) * size)))
    return found


def spent(record: Record) -> dict[str, float]:
    """The milliseconds of the stages that took any time."""
    return {stage: wall / 1e6 for stage, (wall, _, _) in record["stages"].items() if wall}


IN_GETITEM = """
class Photos(Dataset):
    def __getitem__(self, index):
        spend(1)
        {}
        return index
"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def blur(x): spend(5)\nclass Photos(Dataset):\n    def __getitem__(self, i): blur(i)", {"dataset blur": 10}),
        (
            "def blur(x): spend(5)\nclass Photos(Dataset):\n    def __getitem__(self, i): [blur(x) for x in (1, 2)]",
            {"dataset blur": 20},
        ),
        (
            "def load(x): spend(1); decode(x)\ndef decode(x): spend(2)\n"
            "class Photos(Dataset):\n    def __getitem__(self, i): load(i)",
            {"dataset load": 2, "dataset decode": 4},
        ),
        (
            "class Photos(Dataset):\n    def load(self, i): spend(3)\n    def __getitem__(self, i): self.load(i)",
            {"dataset Photos.load": 6},
        ),
        (
            "class Photos(Dataset):\n    @staticmethod\n    def load(i): spend(3)\n"
            "    @property\n    def size(self): spend(1)\n"
            "    def __getitem__(self, i): self.load(i); self.size",
            {"dataset Photos.load": 6, "dataset Photos.size": 2},
        ),
        (
            "class Reader:\n    def read(self, i): spend(3)\nreader = Reader()\n"
            "class Photos(Dataset):\n    def __getitem__(self, i): reader.read(i)",
            {"dataset Reader.read": 6},
        ),
        (
            "class Parser:\n    def parse(self, i): spend(3)\n"
            "class Photos(Dataset):\n    def __getitem__(self, i): Parser().parse(i)",
            {"dataset Parser.parse": 6},
        ),
        (
            "class Blur:\n    def __call__(self, x): spend(4)\nblur = Blur()\n"
            "class Photos(Dataset):\n    def __getitem__(self, i): blur(i)",
            {"transform Blur": 8},
        ),
        (
            "class Blur:\n    def __call__(self, x): spend(4)\n"
            "class Photos(Dataset):\n    both = [Blur(), Blur()]\n"
            "    def __getitem__(self, i): [each(i) for each in self.both]",
            {"transform Blur": 16},
        ),
        (
            "def augment(x): spend(5)\nclass Photos(Dataset):\n    def __getitem__(self, i): augment(i)",
            {"transform augment": 10},
        ),
        (
            "def make(transform):\n    class Photos(Dataset):\n        def __getitem__(self, i): transform(i)\n"
            "    return Photos\nPhotos = make(lambda x: spend(2))",
            {"transform lambda": 4},
        ),
        (
            "class Apply:\n    def __call__(self, x): self.apply(x)\n"
            "class Blur(Apply):\n    def apply(self, x): spend(1)\n"
            "class Turn(Apply):\n    def apply(self, x): spend(2)\n"
            "class Photos(Dataset):\n    def __init__(self): self.all = [Blur(), Turn()]\n"
            "    def __getitem__(self, i): [each(i) for each in self.all]",
            {"transform Blur": 2, "transform Turn": 4},
        ),
        (
            "class Blur:\n    def __call__(self, x): spend(1)\nclass Turn(Blur): pass\n"
            "class Photos(Dataset):\n    def __init__(self): self.all = (Blur(), Turn())\n"
            "    def __getitem__(self, i): [each(i) for each in self.all]",
            {"transform Blur": 2, "transform Turn": 2},
        ),
        (
            "class Photos(Dataset):\n    def __init__(self):\n        self.all = (lambda x: spend(1),\n"
            "            lambda x: spend(2))\n"
            "    def __getitem__(self, i): [each(i) for each in self.all]",
            {"transform lambda": 2, "transform lambda (program.py:4)": 4},
        ),
        (
            "def turn(x, by): spend(by)\n"
            "class Photos(Dataset):\n    def __init__(self): self.transform = functools.partial(turn, by=3)\n"
            "    def __getitem__(self, i): self.transform(i)",
            {"transform turn": 6},
        ),
        (
            "class Turn(nn.Module):\n    def forward(self, x): spend(2); return x\n"
            "class Photos(Dataset):\n    def __init__(self): self.transform = nn.Sequential(Turn(), Turn())\n"
            "    def __getitem__(self, i): self.transform(i)",
            {"transform Turn": 8},
        ),
        (
            "def timed(call):\n    @functools.wraps(call)\n    def inner(*a): return call(*a)\n    return inner\n"
            "@timed\ndef load(x): spend(3)\nclass Photos(Dataset):\n    def __getitem__(self, i): load(i)",
            {"dataset load": 6},
        ),
        (
            "class Photos(Dataset):\n    def parts(self, i):\n"
            "        for _ in range(2):\n            spend(2)\n            yield 1\n"
            "    def __getitem__(self, i): return sum(self.parts(i))",
            {"dataset Photos.parts": 8},
        ),
    ],
)
def test_each_way_to_call_a_function_is_a_stage_under_its_name(
    program: Callable[[str], Any], source: str, expected: dict[str, float]
) -> None:
    assert spent(fetch(program(source).Photos())[-1]) == expected


def test_what_is_held_in_slots_is_found_and_stays_there(program: Callable[..., Any]) -> None:
    made = program("""
from dataclasses import dataclass

@dataclass(slots=True)
class Compose:
    transforms: list
    transform: object

    def __call__(self, sample):
        for each in self.transforms:
            sample = each(sample)
        return self.transform(sample)

class Blur:
    __slots__ = ()

    def __call__(self, sample):
        spend(2)
        return sample

class Photos(Dataset):
    __slots__ = ("transform", "unset")

    def __init__(self, mix):
        self.transform = Compose([Blur()], mix)

    def __getitem__(self, index):
        return self.transform(index)
""")
    elsewhere = program("def mix(sample):\n    spend(3)\n    return sample", "elsewhere")
    _, record = fetch(made.Photos(elsewhere.mix))
    assert spent(record) == {"transform Blur": 4, "transform mix": 6}


def test_functions_of_another_module_of_the_program_are_stages(program: Callable[..., Any]) -> None:
    program("def load(x): spend(3)", "reading")
    source = "import reading\nclass Photos(Dataset):\n    def __getitem__(self, i): reading.load(i)"
    assert spent(fetch(program(source).Photos())[-1]) == {"dataset load": 6}


def test_a_function_that_a_transform_calls_too_does_not_hide_it(program: Callable[[str], Any]) -> None:
    source = (
        "def work(x): spend(2)\nclass Blur:\n    def __call__(self, x): work(x)\n"
        "class Photos(Dataset):\n    def __init__(self): self.transform = Blur()\n"
        "    def __getitem__(self, i): work(i); self.transform(i)"
    )
    assert spent(fetch(program(source).Photos())[-1]) == {"dataset": 4, "transform Blur": 4}


@pytest.mark.parametrize("call", ["zlib.decompress(PACKED)", "unpack(PACKED)"])
def test_known_functions_are_stages_however_they_are_imported(program: Callable[[str], Any], call: str) -> None:
    module = program("from zlib import decompress as unpack\n" + IN_GETITEM.format(call))
    module.PACKED = PACKED
    assert fetch(module.Photos())[-1]["stages"]["decode zlib.decompress"][2] == 2


def test_formats_of_pillow_that_load_in_their_own_way_are_decoded_too(program: Callable[[str], Any]) -> None:
    image = pytest.importorskip("PIL.Image")
    kept = io.BytesIO()
    image.new("RGB", (8, 8)).save(kept, "GIF")
    module = program(IN_GETITEM.format("Image.open(io.BytesIO(DATA)).convert('RGB')"))
    vars(module).update(Image=image, io=io, DATA=kept.getvalue())
    stages = fetch(module.Photos())[-1]["stages"]
    assert [stage for stage in stages if stage.startswith("decode")] == ["decode PIL"]


def test_shares_of_a_batch_sum_to_its_time(program: Callable[[str], Any]) -> None:
    source = (
        "class Blur:\n    def __call__(self, x): spend(4); return x\n"
        "class Photos(Dataset):\n    def __init__(self): self.transform = Blur()\n"
        "    def load(self, i): spend(2); return i\n"
        "    def __getitem__(self, i): spend(1); return self.transform(self.load(i))\n"
        "def collate(rows): spend(3); return rows"
    )
    module = program(source)
    record = fetch(module.Photos(), collate=module.collate)[-1]
    assert spent(record) == {"dataset": 2, "dataset Photos.load": 4, "transform Blur": 8, "collate": 3}
    assert sum(wall for wall, _, _ in record["stages"].values()) == record["wall"]


def test_a_function_object_for_batches_is_no_transform(program: Callable[[str], Any]) -> None:
    source = (
        "class Photos(Dataset):\n    def __getitem__(self, i): spend(1)\n"
        "class Collator:\n    def __call__(self, rows): spend(3); return rows\n"
    )
    module = program(source)
    assert spent(fetch(module.Photos(), collate=module.Collator())[-1]) == {"dataset": 2, "collate": 3}


def test_what_is_looked_at_twice_is_timed_once(program: Callable[[str], Any]) -> None:
    source = (
        "class Blur:\n    def __call__(self, x): spend(1)\ndef load(x): spend(1)\n"
        "class Photos(Dataset):\n    def __init__(self): self.all = [Blur(), Blur(), lambda x: spend(1)]\n"
        "    def part(self, x): load(x)\n"
        "    def __getitem__(self, i): self.part(i); [each(i) for each in self.all]\n"
    )
    module = program(source)
    photos = module.Photos()
    finder = StageFinder(Stages(), SourcePlaces())
    for _ in range(2):
        finder.look_at(photos, list)
    for call in (module.Blur.__call__, module.load, module.Photos.part, photos.all[2]):
        assert not hasattr(call.__wrapped__, "__wrapped__")


def test_a_stream_is_timed_step_by_step(program: Callable[[str], Any]) -> None:
    source = (
        "from torch.utils.data import IterableDataset\n"
        "class Lines(IterableDataset):\n"
        "    def raw(self):\n        while True:\n            spend(2)\n            yield 1\n"
        "    def __iter__(self):\n        for each in self.raw():\n            spend(1)\n            yield each\n"
    )
    record = fetch(program(source).Lines())[-1]
    assert spent(record) == {"dataset": 2, "dataset Lines.raw": 4}
    assert [wall for _, wall in record["samples"]] == [3_000_000, 3_000_000]


def test_a_generator_of_the_program_can_be_sent_values_and_closed(program: Callable[[str], Any]) -> None:
    source = (
        "ended = []\ndef echo():\n    got = 'begun'\n    try:\n        while True:\n"
        "            try:\n                got = yield got\n"
        "            except ValueError:\n                got = 'caught'\n"
        "    finally:\n        ended.append(1)\n" + IN_GETITEM.format("echo")
    )
    module = program(source)
    fetch(module.Photos())
    made = module.echo()
    assert [next(made), made.send("sent"), made.throw(ValueError())] == ["begun", "sent", "caught"]
    made.close()
    assert module.ended == [1]


def test_small_functions_are_given_up_for_good_and_large_ones_are_not(
    program: Callable[[str], Any], clock: Clock
) -> None:
    many = MOST_CALLS + 1
    source = (
        f"def small(x): tick()\ndef large(x): spend(1)\nclass Photos(Dataset):\n    def __getitem__(self, i):\n"
        f"        for _ in range({many}):\n            small(i)\n            large(i)\n"
    )
    module = program(source)
    module.tick = clock.tick
    records = fetch(module.Photos(), batches=6)
    assert ["dataset small" in record["stages"] for record in records] == [True] + [False] * 5
    assert all(record["stages"]["dataset large"][2] == 2 * many for record in records)


def test_cpu_time_of_batches_that_do_not_ask_for_it_follows_from_those_that_do(
    program: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = Clock()
    monkeypatch.setattr(stages_module, "thread_time_ns", cpu)
    module = program("def load(x): spend(4); compute(1)\n" + IN_GETITEM.format("load(index)"))
    module.compute = cpu.spend
    records = fetch(module.Photos(), batches=9)
    assert {tuple(record["stages"]["dataset load"]) for record in records} == {(8_000_000, 2_000_000, 2)}


def test_two_functions_of_one_name_are_two_stages(program: Callable[..., Any]) -> None:
    program("def load(x): spend(1)", "first")
    program("def load(x): spend(2)", "second")
    source = "import first, second\nclass Photos(Dataset):\n    def __getitem__(self, i): first.load(i); second.load(i)"
    assert sorted(spent(fetch(program(source).Photos())[-1]).values()) == [2, 4]


class Whole(Dataset[int]):
    """A dataset that makes the samples of a batch together."""

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return list(indices)


class Plain(Dataset[int]):
    def __init__(self) -> None:
        self.asked: list[int] = []

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        return 10 * index


@pytest.mark.parametrize(
    ("dataset", "timed"),
    [
        (Plain(), 2),
        (Subset(Plain(), [3, 2, 1, 0]), 2),
        (Subset(Subset(Plain(), [3, 2, 1, 0]), [1, 0, 2, 3]), 2),
        (Whole(), 0),
        (Subset(Whole(), [3, 2, 1, 0]), 0),
        (ConcatDataset([Subset(Plain(), [0, 1])]), 2),
    ],
)
def test_samples_are_counted_and_the_same_however_they_are_made(dataset: Any, timed: int) -> None:
    if isinstance(dataset, ConcatDataset):
        dataset.cumulative_sizes = [2]
    plain = _MapDatasetFetcher(dataset, True, list, False).fetch([1, 0])
    got: list[Any] = []
    (record,) = fetch_one(dataset, [1, 0], got)
    assert got == [plain]
    assert record["made"] == 2
    assert len(record["samples"]) == timed


def fetch_one(dataset: Any, indices: Any, got: list[Any]) -> list[Record]:
    found: list[Record] = []
    fetcher = _MapDatasetFetcher(dataset, True, list, False)
    Fetching(fetcher, Stages(), found.append)
    got.append(fetcher.fetch(indices))
    return found


def test_a_batch_that_is_one_item_of_the_dataset_counts_its_indices() -> None:
    class Rows(Dataset[list[int]]):
        def __getitem__(self, index: Any) -> list[int]:
            return list(index)

    found: list[Record] = []
    fetcher = _MapDatasetFetcher(Rows(), False, list, False)
    Fetching(fetcher, Stages(), found.append)
    assert fetcher.fetch([5, 6, 7]) == [5, 6, 7]
    assert found[0]["made"] == 3
    assert found[0]["samples"] == []


def test_an_error_of_the_dataset_leaves_no_stage_open(program: Callable[[str], Any]) -> None:
    module = program("def load(x):\n    if x == 1: raise KeyError(x)\n" + IN_GETITEM.format("load(index)"))
    stages = Stages()
    fetcher = _MapDatasetFetcher(module.Photos(), True, list, False)
    StageFinder(stages, SourcePlaces()).look_at(fetcher.dataset, list)
    found: list[Record] = []
    Fetching(fetcher, stages, found.append)
    with pytest.raises(KeyError):
        fetcher.fetch([0, 1])
    assert stages.current == ""
    fetcher.fetch([2, 3])
    assert found[0]["stages"]["dataset load"][2] == 2


def test_functions_keep_what_the_program_reads_of_them(program: Callable[[str], Any]) -> None:
    source = (
        "def load(x):\n    'Loads.'\n    load.calls += 1\nload.calls = 0\n"
        "Pair = namedtuple('Pair', 'one two')\n"
        "class Photos(Dataset):\n    def __init__(self):\n        self.pair = Pair(lambda x: x, lambda x: -x)\n"
        "    def __getitem__(self, i):\n        load(i)\n        return self.pair.one(i) + self.pair.two(i)"
    )
    module = program("from collections import namedtuple\n" + source)
    photos = module.Photos()
    fetch(photos)
    assert (module.load.calls, module.load.__name__, module.load.__doc__) == (4, "load", "Loads.")
    assert type(photos.pair) is module.Pair


def test_a_function_that_a_package_holds_is_a_transform(program: Callable[[str], Any], monkeypatch: Any) -> None:
    class Mapped:
        """Stands for a class of a package, which holds a function of the program under a name of its own."""

        __module__ = "apackage.pipes"

        def __init__(self, function: Callable[[Any], Any]) -> None:
            self.function = function

        def __call__(self, x: Any) -> Any:
            return self.function(x)

    module = program("def tokens(x): spend(2)\n" + IN_GETITEM.format("self.pipe(index)"))
    photos = module.Photos()
    photos.pipe = Mapped(module.tokens)
    assert spent(fetch(photos)[-1]) == {"dataset": 2, "transform tokens": 4}


def test_a_function_that_is_timed_stays_the_object_that_it_is(program: Callable[..., Any]) -> None:
    made = program("""
import inspect, pickle

def mix(sample, *, amount=1):
    "Mixes."
    spend(3)
    return sample

def maker(number):
    def scale(sample):
        spend(2)
        return sample * number
    return scale

CHOSEN = {mix: 3}

class Photos(Dataset):
    def __init__(self):
        self.mix, self.scale, self.part = mix, maker(2), functools.partial(mix, amount=2)

    def __getitem__(self, index):
        assert self.mix is mix and CHOSEN[self.mix] == 3 and pickle.loads(pickle.dumps(mix)) is mix
        assert isinstance(self.part, functools.partial) and self.part.func is mix
        assert list(inspect.signature(self.mix).parameters) == ["sample", "amount"] and mix.__doc__ == "Mixes."
        assert inspect.getsource(mix).startswith("def mix(sample")
        return self.part(self.mix(self.scale(index), amount=1))
""")
    dataset = made.Photos()
    held = dict(vars(dataset))
    _, record = fetch(dataset)
    assert spent(record) == {"dataset mix": 12, "dataset scale": 4}
    assert vars(dataset) == held


def test_a_batch_that_waits_is_known_to_wait_also_if_no_stage_of_it_was_asked(
    program: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = Clock()
    monkeypatch.setattr(stages_module, "thread_time_ns", cpu)
    source = "def load(x): spend(4); compute(4)\n" + IN_GETITEM.format("load(index); spend(60 * (index == 9))")
    module = program(source)
    module.compute = cpu.spend
    monkeypatch.setattr(stages_module.OneIn, "__call__", lambda self: False)
    waiting = fetch(module.Photos(), batches=9)[4]["stages"]  # of the samples 8 and 9
    assert waiting["dataset load"][:2] == [8_000_000, 8_000_000]
    assert waiting["dataset"][:2] == [62_000_000, 0]


def test_one_in_so_many_is_chosen_at_no_fixed_distance() -> None:
    choose = OneIn(8)
    chosen = [number for number in range(800) if choose()]
    assert [number // 8 for number in chosen] == list(range(100))
    assert len({number % 8 for number in chosen}) == 8


def test_a_function_that_an_attribute_names_a_transform_is_one(program: Callable[..., Any]) -> None:
    made = program("""
def sharpen(sample):
    spend(3)
    return sample

class Photos(Dataset):
    def __init__(self):
        self.transform = sharpen

    def __getitem__(self, index):
        return self.transform(index) if self.transform is sharpen else None
""")
    assert spent(fetch(made.Photos())[-1]) == {"transform sharpen": 6}
