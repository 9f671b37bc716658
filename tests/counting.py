"""A program of nobody's: counts steps, saves every so many, and once more when it is told to go.

counting.py FOLDER PACE_FILE [RESUME]
"""

import os
import signal
import sys
import time
from pathlib import Path

EVERY = 40
folder, pace = Path(sys.argv[1]), Path(sys.argv[2])
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(True))
step = int(Path(sys.argv[3]).stem.partition("_")[2]) if len(sys.argv) > 3 else 0
with (folder.parent / "steps.log").open("a") as log:
    while not told:
        step += 1
        print(step, file=log, flush=True)
        time.sleep(float(pace.read_text()))
        if told or step % EVERY == 0:
            (folder / "tmp").write_text("state")
            os.replace(folder / "tmp", folder / f"step_{step}.pt")
