"""A limit on the time of what the main thread does."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ..config import require


class TimeIsUpError(BaseException):
    """The time of `time_limit` is up; no `except Exception` on the way takes it for a failure."""


def check_minutes(minutes: float | None) -> None:
    """Raise `OptionError` unless this is a limit, or None."""
    most = threading.TIMEOUT_MAX / 60
    fits = minutes is None or 0 < minutes <= most
    require("limit_minutes", minutes, fits, f"a number of minutes above 0 and at most {most:.2g}")


@contextmanager
def time_limit(minutes: float | None) -> Iterator[None]:
    """Raise `TimeIsUpError` in the main thread once that many minutes have passed; None: never.

    The operation that runs at that moment ends first. Ctrl-C does what it did before.

    >>> import time
    >>> with time_limit(None):
    ...     time.sleep(0)
    """
    check_minutes(minutes)
    if minutes is None:
        yield
        return
    up, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: FrameType | None) -> None:
        if up.is_set():
            raise TimeIsUpError
        if callable(before):
            before(number, frame)

    def ring() -> None:
        up.set()
        _thread.interrupt_main()

    timer = threading.Timer(60 * minutes, ring)
    timer.daemon = True
    signal.signal(signal.SIGINT, stop)
    try:
        timer.start()
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)
