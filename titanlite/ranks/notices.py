"""Notices: one rank of each machine prints why its ranks end."""

import contextlib
import os
import re
import socket
import sys
from typing import Any

from titanlite.errors import TitanliteError
from titanlite.ranks.launch import Place


class Notices:
    """What a rank prints about the end of a run; `store` is that of the watchdogs.

    A launcher of titanlite's own (`is_launched`) prints this itself, so its ranks do not.
    """

    def __init__(self, place: Place, store: Any, *, is_launched: bool) -> None:
        self._rank, self._store, self._is_launched = place.rank, store, is_launched
        # torchrun numbers the ranks of a machine in sequence.
        self._first_here = place.rank - place.local_rank
        self._here = range(self._first_here, self._first_here + place.local_world_size)
        self._lost_notice: socket.socket | None = None

    def settle_who_tells(self, error: BaseException) -> None:
        """Let the first rank that fails print its error.

        So an error that all ranks raise is printed once on each machine, and so is the error of a
        single rank.
        """
        if not self._is_launched and isinstance(error, TitanliteError):
            with contextlib.suppress(RuntimeError):
                if error.is_printed_here is None:
                    error.is_printed_here = self._is_first_to_print()

    def tell(self, where: int, headline: str) -> None:
        """Print one line on this machine, unless rank `where`, which is here, tells it all."""
        if not self._is_launched and where not in self._here and self._is_first_to_print():
            self.say(f"the run has stopped: {headline}")

    def tell_lost(self, error: BaseException) -> None:
        """Print on this machine that its ranks have lost the others.

        Without the store, the ranks of a machine agree who prints by a name that the system gives
        to one of them: that of a socket without a file, which is free again when the rank ends.
        """
        if self._is_launched:
            return
        is_first = self._rank == self._first_here
        if sys.platform == "linux":
            self._lost_notice = self._lost_notice or socket.socket(socket.AF_UNIX)
            try:
                self._lost_notice.bind(f"\0titanlite-lost-{os.getppid()}-{self._first_here}")
                is_first = True
            except OSError:
                is_first = False
        if is_first:
            # gloo begins with the place in its own source.
            text = re.sub(r"^\[[^\]]*\] ", "", str(error))
            cause = f"{type(error).__name__}: {text}".splitlines()[0]
            self.say(f"lost the connection to rank 0, which hosts the store ({cause})")

    def say(self, text: str) -> None:
        """Print a line of this rank."""
        print(f"rank {self._rank}: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Free the name of the socket."""
        if self._lost_notice is not None:
            self._lost_notice.close()

    def _is_first_to_print(self) -> bool:
        """Whether no other rank of this machine has printed why the run ends."""
        return self._store.add(f"printed/{self._first_here}", 1) == 1
