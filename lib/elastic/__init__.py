"""Training on preemptible Slurm partitions without losing work.

What a user's own loop may want: `elastic.LocalSGD`, and what keeps ranks alive
(health.py, slurm_info.py, resumable.py). All is resolved on first use, so that `import
elastic` (and with it `elastic-status` and the cron pass) never loads torch.
"""

import importlib

__version__ = "0.1.0"
HOMES = {
    "elastic.local.worker.local_sgd": "LocalSGD",
    "elastic.jobs.slurm_info": "SLURMInfo get_slurm_info log_job_info",
    "elastic.sync.resumable": "resolve_resume_path",
    "elastic.train.health": "ShutdownHandler NaNDetector HangDetector check_nccl_health "
                            "check_gpu_health shield_workers",
}


def __getattr__(name: str):
    for module, names in HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'elastic' has no attribute {name!r}")
