"""Training on preemptible Slurm partitions without losing work.

A user's own loop needs one name from here: `elastic.LocalSGD`. It is resolved on first use, so that
`import elastic` (and with it `elastic-status` and the cron pass) never loads torch.
"""

__version__ = "0.1.0"


def __getattr__(name: str):
    if name == "LocalSGD":
        from elastic.local_sgd import LocalSGD

        return LocalSGD
    raise AttributeError(f"module 'elastic' has no attribute {name!r}")
