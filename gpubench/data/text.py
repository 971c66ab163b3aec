"""Text as training samples: consecutive windows over files that are memory-mapped, never read whole."""

import logging
import os
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from gpubench.errors import DataError
from gpubench.sources import text_files
from gpubench.tasks import MASKED_FRACTION

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BLOCK = 1 << 16  # characters tokenised at once; a word cut at the border costs a token or two in some 16,000
BLOCKS = 16  # blocks tokenised side by side

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Vocabulary:
    """Tokens are 0 to `size` - 1; `mask_token` stands for a hidden one, and is None where the tokenizer has none."""

    size: int
    mask_token: int | None


BYTES = Vocabulary(256, mask_token=256)  # one token per byte, and behind them one that no text holds


class TokenFiles:
    """One long row of tokens: the contents of `files`, one after the other, as plain numbers of type `dtype`."""

    def __init__(self, files: Sequence[str], dtype: npt.DTypeLike) -> None:
        self.files = files
        self.dtype = np.dtype(dtype)
        self.ends = list(accumulate(Path(name).stat().st_size // self.dtype.itemsize for name in files))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens `start` to `stop`, across as many files as they take."""
        tokens = np.empty(stop - start, np.int64)
        position = start
        for file in range(bisect_right(self.ends, start), len(self.files)):
            if position == stop:
                break
            first = self.ends[file - 1] if file else 0
            end = min(stop, self.ends[file])
            mapped = _map(self.files[file], self.dtype, self.ends[file] - first)
            tokens[position - start : end - start] = mapped[position - first : end - first]
            position = end
        return tokens


@lru_cache(maxsize=64)  # a mapping holds a file descriptor, and a folder can hold more files than a process may open
def _map(name: str, dtype: np.dtype[Any], length: int) -> npt.NDArray[Any]:
    return np.memmap(name, dtype, mode="r", shape=(length,)).view(np.ndarray)


def read_bytes(path: Path) -> TokenFiles:
    """The file or folder `path` with one token per byte."""
    return TokenFiles(list(text_files(path)), np.uint8)


def load_tokenizer(folder: Path) -> "Tokenizer":
    """The tokenizer in `folder`/tokenizer.json; raises DataError if it cannot be read."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises bare Exception
        hint = "give the folder that save_pretrained() wrote"
        raise DataError(f"data.tokenizer {folder} cannot be read: {error}", hint) from error


def vocabulary_of(tokenizer: "Tokenizer") -> Vocabulary:
    """All tokens that `tokenizer` can give."""
    known = (tokenizer.token_to_id(name) for name in ("[MASK]", "<mask>"))
    mask_token = next((token for token in known if token is not None), None)
    return Vocabulary(max(tokenizer.get_vocab().values(), default=-1) + 1, mask_token)


def tokenize(path: Path, tokenizer: "Tokenizer") -> TokenFiles:
    """The file or folder `path` in tokens, without special ones.

    The tokens go to a temporary file that is removed with the result, or as the process ends. Raises DataError if the
    text is not UTF-8.
    """
    dtype = np.uint16 if vocabulary_of(tokenizer).size <= 1 << 16 else np.uint32
    handle, name = tempfile.mkstemp(prefix="gpubench-tokens-")
    log.info("tokenising %s into %s", path, name)
    try:
        with os.fdopen(handle, "wb") as out:
            for blocks in _blocks(path):
                for encoding in tokenizer.encode_batch(blocks, add_special_tokens=False):
                    np.asarray(encoding.ids, dtype).tofile(out)
        tokens = TokenFiles([name], dtype)
    except BaseException:
        Path(name).unlink()
        raise
    weakref.finalize(tokens, Path(name).unlink, missing_ok=True)
    return tokens


def _blocks(path: Path) -> Iterator[list[str]]:
    for name in text_files(path):
        try:
            with open(name, encoding="utf-8") as file:  # noqa: PTH123
                while text := file.read(BLOCK * BLOCKS):
                    yield [text[start : start + BLOCK] for start in range(0, len(text), BLOCK)]
        except UnicodeDecodeError as error:
            hint = "leave data.tokenizer out to take one token per byte"
            raise DataError(f"{name} is not UTF-8 text: {error}", hint) from error


class CausalWindows(Dataset[dict[str, torch.Tensor]]):
    """Samples {"input_ids": int64 [length]}: consecutive windows of `length` tokens; a shorter last one is dropped."""

    def __init__(self, tokens: TokenFiles, length: int) -> None:
        self.tokens = tokens
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.length
        return {"input_ids": torch.from_numpy(self.tokens.read(start, start + self.length))}


class MaskedWindows(Dataset[dict[str, torch.Tensor]]):
    """The same windows with tokens hidden: {"input_ids": int64 [length], "labels": int64 [length]}.

    Labels are -100 but at the hidden 15 %, of which 80 % are replaced by the mask token, 10 % by a random token, and
    10 % stay (Devlin et al. 2018, arXiv:1810.04805, section 3.1). The number hidden is the same in every sample, so
    that every step does the same work. Each visit hides others, by torch's generator.
    """

    def __init__(self, tokens: TokenFiles, length: int, vocabulary_size: int, mask_token: int) -> None:
        self.windows = CausalWindows(tokens, length)
        self.vocabulary_size = vocabulary_size
        self.mask_token = mask_token

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.windows[index]["input_ids"]
        hidden = torch.randperm(len(tokens))[: max(1, round(MASKED_FRACTION * len(tokens)))]
        labels = torch.full_like(tokens, -100)
        labels[hidden] = tokens[hidden]
        how = torch.rand(len(hidden))
        tokens[hidden[how < 0.8]] = self.mask_token
        random = hidden[how >= 0.9]
        tokens[random] = torch.randint(self.vocabulary_size, (len(random),))
        return {"input_ids": tokens, "labels": labels}
