"""A thread that takes a delta to the master and comes back with the next version, while
its worker trains on (`local_sgd.overlap`)."""

import threading
from collections.abc import Callable
from concurrent.futures import Future


def send(deliver: Callable[[], None], fetch: Callable[[], object]) -> Future:
    """Does `deliver()`, then `fetch()`, whose result is what the courier brings. Nobody
    waits for its thread where the worker dies."""
    courier: Future = Future()

    def run() -> None:
        try:
            deliver()
            courier.set_result(fetch())
        except BaseException as error:  # raised where the worker asks for the result
            courier.set_exception(error)

    threading.Thread(target=run, daemon=True, name="courier").start()
    return courier
