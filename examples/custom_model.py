"""A custom model with its own batches and loss: a network that ranks products of a shop.

gpubench train-bench --model custom_model:build
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

USERS, PRODUCTS, WIDTH = 10_000, 50_000, 64

Batch = dict[str, Tensor]


class Ranking(nn.Module):
    """Logit that a user clicks on a product: an embedding of each, and a small network on top of both."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH)
        self.products = nn.Embedding(PRODUCTS, WIDTH)
        self.head = nn.Sequential(nn.Linear(2 * WIDTH, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, user: Tensor, product: Tensor) -> Tensor:
        logit: Tensor = self.head(torch.cat([self.users(user), self.products(product)], dim=1))
        return logit.squeeze(1)


def build() -> tuple[nn.Module, object, object]:
    return Ranking(), make_batch, loss


def make_batch(size: int) -> Batch:
    """Random tensors on the CPU; gpubench copies them to the device."""
    return {
        "user": torch.randint(USERS, (size,)),
        "product": torch.randint(PRODUCTS, (size,)),
        "clicked": torch.randint(2, (size,)).float(),
    }


def loss(module: nn.Module, batch: Batch) -> Tensor:
    """Uses the module that it is given, which may be wrapped (DDP, FSDP2) or compiled."""
    return functional.binary_cross_entropy_with_logits(module(batch["user"], batch["product"]), batch["clicked"])
