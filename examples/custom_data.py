"""A custom dataset: any torch Dataset, read by a DataLoader with worker processes.

gpubench train-bench --model resnet18 --data custom_data:photos --data.workers=2
gpubench train-bench --model resnet18 --data custom_data:loader --batch-size 16
gpubench profile --model resnet18 --data custom_data:photos    # does the step wait for data?
"""

import io
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SIZE = 64  # pixels
CLASSES = 10


class Photos(Dataset[tuple[Tensor, int]]):
    """Samples (image float32 [3, SIZE, SIZE] in 0..1, label), decoded from JPEG on each access."""

    def __init__(self, files: list[bytes]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(io.BytesIO(self.files[index])) as image:
            pixels = bytearray(image.convert("RGB").resize((SIZE, SIZE)).tobytes())
        image_ = torch.frombuffer(pixels, dtype=torch.uint8).view(SIZE, SIZE, 3)
        return image_.permute(2, 0, 1).float() / 255, index % CLASSES


def photos() -> Photos:
    """Returns the JPEG files of the directory photos, or random images if there are none. Called once in each rank."""
    files = [path.read_bytes() for path in sorted(Path("photos").glob("*.jpg"))]
    return Photos(files or [_photo(seed) for seed in range(200)])


def loader() -> DataLoader[tuple[Tensor, int]]:
    """Returns a DataLoader, which gpubench uses as it is. A DistributedSampler divides the data among several ranks."""
    data = photos()
    sampler: DistributedSampler[tuple[Tensor, int]] | None = (
        DistributedSampler(data) if torch.distributed.is_initialized() else None
    )
    return DataLoader(data, batch_size=16, shuffle=sampler is None, sampler=sampler, num_workers=2, drop_last=True)


def _photo(seed: int) -> bytes:
    noise = torch.randint(256, (160, 120, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    file = io.BytesIO()
    Image.frombytes("RGB", (120, 160), noise.numpy().tobytes()).save(file, "JPEG")
    return file.getvalue()
