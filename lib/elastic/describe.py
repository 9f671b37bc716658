"""What a run's model is, as JSON: `python -m elastic.describe CONFIG KEY=VALUE...`.

A process of its own, because it needs torch and the user's code, and `elastic-submit --dry-run` is
to say what it can without either. Nothing is allocated: the model is made on the meta device.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from elastic import config as configuration
from elastic.codec import codec
from elastic.errors import ElasticError
from elastic.estimate import Model
from elastic.layout import Layout
from elastic.replica import shapes
from elastic.tasks import load_task


def describe(config) -> Model:
    """Raises ElasticError for what the user's code does."""
    task = load_task(config.run.task, config.task, Path(config.run.folder))
    with torch.device("meta"):
        model = task.model()
    layout = Layout.of(shapes(model), config.local_sgd.fragment_bytes)
    chosen = codec(config.local_sgd.compression)
    sizes = [chosen.size_bytes(fragment) for fragment in layout.fragments]
    return Model(
        numel=sum(layout.numels), delta_bytes=sum(sizes), fragments=len(sizes),
        largest_bytes=max(sizes), has_feedback=bool(chosen.feedback),
        tokens_per_sample=getattr(getattr(task, "shape", None), "context", 0),
    )  # fmt: skip


def main() -> int:
    path, *settings = sys.argv[1:]
    try:
        print(json.dumps(asdict(describe(configuration.load(Path(path), settings)))))
    except ElasticError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
