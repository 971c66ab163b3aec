"""A folder of images as training samples: the usual ImageNet augmentation, decoded by Pillow."""

import math
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from gpubench.errors import DataError
from gpubench.sources import image_files
from gpubench.tasks import alpha_bar

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)  # of ImageNet's pixels, per channel, in 0..1
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

ALPHA_BAR = alpha_bar()

AREA = (0.08, 1.0)  # of the crop, as a share of the image
RATIO = (3 / 4, 4 / 3)  # width / height of the crop


class LabelledImages(Dataset[tuple[torch.Tensor, int]]):
    """Samples (image float32 [3, size, size], label): every image file below `folder`.

    The label is the index of the file's own folder among `classes`, the sorted folders that hold images. Each visit
    takes a new random crop and flip from torch's generator. Raises DataError naming a file that cannot be decoded.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.size = size
        self.files = list(image_files(folder))
        parents = [name.rpartition(os.sep)[0] for name in self.files]
        self.classes = sorted(set(parents))
        index = {name: label for label, name in enumerate(self.classes)}
        self.labels = [index[parent] for parent in parents]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return random_view(self.files[index], self.size).sub_(MEAN).div_(STD), self.labels[index]


class NoisyImages(Dataset[dict[str, torch.Tensor]]):
    """Samples of image denoising, float32: {"clean", "noise": [3, size, size], "timesteps": int64 [], "alpha_bar": []}.

    `clean` is in -1..1; `alpha_bar` is its share of the noisy image's variance at the drawn timestep, as in
    `tasks.alpha_bar`. Files, crops and errors are as in LabelledImages.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.size = size
        self.files = list(image_files(folder))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        clean = random_view(self.files[index], self.size).mul_(2).sub_(1)
        timestep = torch.randint(len(ALPHA_BAR), ())
        noise = torch.randn_like(clean)
        return {"clean": clean, "noise": noise, "timesteps": timestep, "alpha_bar": ALPHA_BAR[timestep]}


def random_view(name: str, size: int) -> torch.Tensor:
    """A random crop of the image in file `name`, flipped half of the time: float32 [3, size, size] in 0..1."""
    image = random_resized_crop(decode(name), size)
    if torch.rand(()) < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div_(255)


def decode(name: str) -> Image.Image:
    """The image in file `name` as RGB; raises DataError naming the file."""
    try:
        with Image.open(name) as image:
            return image.convert("RGB")
    except Exception as error:  # decoders raise whatever they stumble over: OSError, SyntaxError, struct.error, ...
        raise DataError(
            f"image {name} cannot be read: {error}", "replace the file or take it out of the folder"
        ) from error


def random_resized_crop(image: Image.Image, size: int) -> Image.Image:
    """A random part of `image`, stretched to size x size pixels with bilinear filtering.

    Area and shape are drawn as in Szegedy et al. 2015 (arXiv:1409.4842), section 6, and torchvision's
    RandomResizedCrop: ten attempts, then the largest centred crop of an allowed shape.
    """
    left, top, width, height = _random_box(image.width, image.height)
    # Cropped first: resize(box=...) would let the filter see pixels outside the box.
    part = image.crop((left, top, left + width, top + height))
    return part.resize((size, size), Image.Resampling.BILINEAR)


def _random_box(width: int, height: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = width * height * _uniform(*AREA)
        ratio = math.exp(_uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left = int(torch.randint(width - w + 1, ()))
            top = int(torch.randint(height - h + 1, ()))
            return left, top, w, h
    w, h = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    return (width - w) // 2, (height - h) // 2, w, h


def _uniform(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(()))
