"""What Ctrl-C and the signals of a batch system do while gpubench measures, and while it writes what it measured."""

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


def end_the_run() -> AbstractContextManager[None]:
    """SIGTERM and SIGHUP, which batch systems send, raise KeyboardInterrupt as Ctrl-C does."""
    return _on_signals(_interrupt, signal.SIGTERM, signal.SIGHUP)


def ignored() -> AbstractContextManager[None]:
    """Nothing interrupts what is done here. It has to end soon by itself."""
    return _on_signals(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def _on_signals(handler: Callable[..., None] | signal.Handlers, *numbers: signal.Signals) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
