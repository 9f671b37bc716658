"""A thread that takes a delta to the master and comes back with the next version, while its worker
trains on (`local_sgd.overlap`)."""

import threading
from collections.abc import Callable


class Courier:
    """Runs `deliver()`, then `fetch()`; as a context manager it ends when both have."""

    def __init__(self, deliver: Callable[[], None], fetch: Callable[[], object]):
        self._deliver, self._fetch = deliver, fetch
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="courier")
        self.brought: object = None

    @property
    def is_back(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        """Is it back, within that time?"""
        self._thread.join(timeout_s)
        return self.is_back

    def __enter__(self) -> "Courier":
        self._thread.start()
        return self

    def __exit__(self, kind, *_exc_info) -> None:
        if kind is None:
            self._thread.join()
            if self._error:
                raise self._error

    def _run(self) -> None:
        try:
            self._deliver()
            self.brought = self._fetch()
        except BaseException as error:  # raised where the worker waits for it
            self._error = error
