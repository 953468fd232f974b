"""One run a folder at a time: two that write into each other's report would leave a verdict of neither."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

UNABLE: Final = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)
"""How a file system says that it has no locks; then nobody is kept out."""


class FolderTaken(ValueError):
    """Another run is writing to the folder."""


class Claim:
    """A lock on a folder that is held until `release`, or until this process ends, however it ends.

    Raises `FolderTaken` where another run holds it, `OSError` where the folder cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        # On the folder itself, so that no lock file can be left behind; not inherited by programs that are started.
        self._descriptor: int | None = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in UNABLE:
                return
            self.release()
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise FolderTaken(
                    f"{folder}: another run is writing its report there; wait for it, or choose another folder"
                ) from None
            raise

    def release(self) -> None:
        """Let the folder go; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
