"""A program whose data has a cost of known size in each stage, for data_cost.py. It trains on what its loader makes.

    python planted_data.py CASE FOLDER [--bare BATCHES] [--reuse]

CASE is a JSON object with the fields of `Case`. Each process that makes samples leaves in FOLDER what it has timed by
its own clock, while gpubench draws batches in the repeat that is not recorded: the seconds by stage, for each batch.
With `--bare` it does not train: it prints how many samples it draws in a second. With `--reuse` it trains on its first
batches again and again.
"""

import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from planted_truth import Case, Truth
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

SAMPLES, BATCH = 4096, 4
CHUNK = 256 * 1024
FILES = 4
WARMUP, KEPT = 4, 8
"""The batches that are not timed, and those that are used again."""
TRAINING = 3e-3
"""The seconds that an update takes, if not its data is what is measured."""


CASE, FOLDER = Case(**json.loads(sys.argv[1])), Path(sys.argv[2])
TRUTH, DRAWN = (Truth(FOLDER, CASE) for _ in range(2))
"""Of what makes samples, and of what draws their indices."""


class Blur:
    def __call__(self, sample: Any) -> Any:
        TRUTH.spend("transform")
        return sample


def sharpen(sample: Any) -> Any:
    TRUTH.spend("function")
    return sample


class First:
    def __call__(self, sample: Any) -> Any:
        TRUTH.spend("first")
        return sample


class Second:
    def __call__(self, sample: Any) -> Any:
        TRUTH.spend("second")
        return sample


class Both:
    def __init__(self, transforms: list[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, sample: Any) -> Any:
        for each in self.transforms:
            sample = each(sample)
        return sample


def prepare(sample: Any) -> Any:
    TRUTH.spend("helper")
    return sample


class Making:
    """Makes the samples of both styles of datasets."""

    def __init__(self) -> None:
        self.blur = Blur()
        self.transform = sharpen
        self.both = Both([First(), Second()])
        self.packed = zlib.compress(np.random.default_rng(0).integers(0, 8, 1_500_000, dtype=np.uint8).tobytes())
        self.picture = b""
        if CASE.stage == "picture":
            from PIL import Image

            kept = BytesIO()
            pixels = np.random.default_rng(0).integers(0, 255, (96, 96, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((1920, 1280)).save(kept, "JPEG")
            self.picture = kept.getvalue()

    def load(self, index: int) -> torch.Tensor:
        TRUTH.spend("method")
        return torch.full((8,), float(index))

    def make(self, index: int) -> Any:
        with TRUTH.of("getitem"):
            TRUTH.spend("getitem")
            sample = self.load(index)
            if CASE.stage == "read":
                path = FOLDER / f"{index % FILES}.bin"
                with TRUTH.of("read"), path.open("rb", buffering=0) as file:  # to open a file is a part of reading it
                    while file.read(CHUNK):
                        pass
            elif CASE.stage == "packed":
                with TRUTH.of("packed"):
                    zlib.decompress(self.packed)
            elif CASE.stage == "picture":
                from PIL import Image

                with TRUTH.of("picture"):
                    picture = Image.open(BytesIO(self.picture))
                    picture.load()
            return self.both(self.transform(self.blur(prepare(sample))))


class Photos(Dataset[Any], Making):
    def __len__(self) -> int:
        return SAMPLES

    __getitem__ = Making.make


class Stream(IterableDataset[Any], Making):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for index in range(info.id if info else 0, SAMPLES, info.num_workers if info else 1):
            yield self.make(index)


class Batch:
    """A batch for which pickling has a cost."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getstate__(self) -> dict[str, Any]:
        TRUTH.spend("transfer", BATCH)
        return {"tensor": self.tensor}


def collate(samples: list[torch.Tensor]) -> Any:
    with TRUTH.of("collate"):
        TRUTH.spend("collate", len(samples))
        batch = torch.stack(samples)
    TRUTH.end_batch("made")
    return Batch(batch) if CASE.stage == "transfer" else batch


class Collate:
    def __call__(self, samples: list[torch.Tensor]) -> Any:
        with TRUTH.of("collator"):
            TRUTH.spend("collator", len(samples))
            batch = torch.stack(samples)
        TRUTH.end_batch("made")
        return batch


class InTurn(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        for index in range(SAMPLES):
            DRAWN.spend("index")
            if index % BATCH == BATCH - 1:
                DRAWN.end_batch("drawn")
            yield index

    def __len__(self) -> int:
        return SAMPLES


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if CASE.stage == "read":
        for number in range(FILES):
            path = FOLDER / f"{number}.bin"
            if not path.exists():
                path.write_bytes(bytes(24 * 2**20))
    dataset: Any = Photos() if CASE.style == "map" else Stream()
    data: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=BATCH,
        sampler=InTurn() if CASE.style == "map" else None,
        num_workers=CASE.workers,
        multiprocessing_context=CASE.start or None,
        collate_fn=Collate() if CASE.stage == "collator" else collate,
    )
    if "--bare" in sys.argv:
        print(bare(data, int(sys.argv[-1])))
        return
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for batch in reused(data) if "--reuse" in sys.argv else data:
        optimizer.zero_grad()
        model(getattr(batch, "tensor", batch)).square().mean().backward()
        time.sleep(TRAINING)
        optimizer.step()


def bare(data: DataLoader[Any], number: int) -> float:
    """Return the samples that are drawn in a second."""
    began = 0.0
    for drawn, _ in enumerate(data):
        if drawn == WARMUP:
            began = time.perf_counter()
        elif drawn == WARMUP + number:
            break
    return BATCH * number / (time.perf_counter() - began)


def reused(data: DataLoader[Any]) -> Iterator[Any]:
    """Yield the first batches, and then the same ones until the end of the pass."""
    kept: list[Any] = []
    for batch in data:
        kept.append(batch)
        yield batch
        if len(kept) == KEPT:
            break
    for number in range(KEPT, len(data)):
        yield kept[number % KEPT]


if __name__ == "__main__":
    main()
