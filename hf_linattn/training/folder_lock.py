"""The lock of a folder that one run at a time may write to."""

from __future__ import annotations

from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout

from hf_linattn.errors import OptionError

LOCK = ".lock"  # of the process that writes to the folder; kept, as deleting a lock would let two have it
LOCK_SECONDS = 10.0  # after a run was killed its loaders live on, and hold what it held, for five


def take_folder(name: str, folder: str | Path) -> AcquireReturnProxy:
    """Make a folder and take it for this process, until the end of a `with` block or of the process, however that is.

    Args:
        name: of the option that gives the folder, for the message.

    Raises:
        OptionError: another process has it.
        OSError: it cannot be made or written to.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(Path(folder) / LOCK, timeout=LOCK_SECONDS).acquire()
    except Timeout:
        raise OptionError(
            f"{name}={str(folder)!r} is written to by another process that runs a recipe; wait for its end, or give"
            f" another {name}"
        ) from None
