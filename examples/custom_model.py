"""A custom model with its own batches and loss: a network that ranks products of a shop.

gpubench train-bench --model custom_model:build
gpubench train-bench --model custom_model:build --vs model.arguments.width=128
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

USERS, PRODUCTS = 10_000, 50_000

Batch = dict[str, Tensor]


class Ranking(nn.Module):
    """Logit that a user clicks on a product: an embedding of each, and a small network on top of both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, width)
        self.products = nn.Embedding(PRODUCTS, width)
        self.head = nn.Sequential(nn.Linear(2 * width, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, user: Tensor, product: Tensor) -> Tensor:
        logit: Tensor = self.head(torch.cat([self.users(user), self.products(product)], dim=1))
        return logit.squeeze(1)


def build(width: int = 64) -> tuple[nn.Module, object, object]:
    """`width` is the size of an embedding, and the setting model.arguments.width."""
    return Ranking(width), make_batch, loss


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
