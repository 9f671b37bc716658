"""Both ends of the wire in one: what a test says as a worker, and then reads as the master."""

from elastic.local.store import MasterStore, WorkerStore, reaches_redis


@reaches_redis
class BothSides(WorkerStore, MasterStore):
    """Connects as the master, who may do all that a worker may."""

    role = "master"

    def announce(self, wake: str) -> None:
        """To everybody, without a change of anything."""
        self._redis.publish(self._key("ctl"), wake)


class Anybody(BothSides):
    """On a server that knows one password, and no roles."""

    role = "default"


def who_says_it_all(role: str) -> type[BothSides]:
    """One that connects as `role`, and says what the others do, too."""
    return type(role, (BothSides,), {"role": role})
