"""What both ends of the link between two ranks share: hand-overs leave by an Outbox and arrive in an Inbox.

Each has a thread of its own, so that hand-overs are received ahead of their use and sent while the next evaluations
run. Both hold a bounded number: a rank that is behind makes the ranks before it wait.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import torch

from gpubench.events import Handoff
from gpubench.pipeline.wire import Header, Route

Clock = Callable[[], float]  # seconds since the epoch
Tell = Callable[[Handoff], None]  # called from the thread of an Inbox or Outbox


class Sizes(Protocol):
    """The bytes of a hand-over; see `gpubench.pipeline.handover`."""

    @property
    def latent_bytes(self) -> int: ...
    @property
    def state_bytes(self) -> int: ...
    @property
    def generator_bytes(self) -> int: ...


def handoff(
    route: Route,
    direction: Literal["send", "recv"],
    header: Header,
    framed: int,
    sizes: Sizes,
    time: float,
    total: float,
    waited: float,
) -> Handoff:
    """`framed` are the bytes of the frames before the payload."""
    parts = sizes.latent_bytes + sizes.state_bytes + sizes.generator_bytes
    here, peer = (route.source, route.destination) if direction == "send" else (route.destination, route.source)
    return Handoff(
        repeat=route.repeat,
        rank=here,
        peer=peer,
        direction=direction,
        sample=header.sample,
        step=header.done,
        sequence=header.sequence,
        time=time,
        total=total,
        waited=waited,
        header_bytes=framed + header.payload_bytes - parts,  # generators travel among the frames, on a GPU states may
        latent_bytes=sizes.latent_bytes,
        state_bytes=sizes.state_bytes,
        generator_bytes=sizes.generator_bytes,
    )


def computing_on(device: torch.device) -> AbstractContextManager[object]:
    """A thread begins with GPU 0 as its own, whatever the thread that started it had chosen."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
