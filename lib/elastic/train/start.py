"""A process that uses torch: `python -m elastic.train.start PROGRAM ARGUMENTS`, with
PROGRAM one of the names below.

To import torch takes seconds, so two things come first. A notice ends the process as soon
as Python has its turn (not while C code waits for other ranks), until its program has
something to lose (`notice.exit_code = None`). And the garbage collector is off: what
imports make stays, and to look at it over and over takes a sixth of the start. Afterwards
it is frozen: never looked at again, and shared with forked children.
"""

import faulthandler
import gc
import importlib
import sys
import traceback

from elastic.base.durable import log_what_fits
from elastic.base.errors import ElasticError, Exit, Fenced
from elastic.base.signals import install

PROGRAMS = {
    "describe": "elastic.people.describe",
    "master": "elastic.local.master.master",
    "trainer": "elastic.sync.trainer",
    "trial": "elastic.train.trial",
    "worker": "elastic.local.worker.worker",
}


def main() -> int:
    """Run the program; its errors become a message and an exit status."""
    name, notice = sys.argv.pop(1), install(Exit.TRY_AGAIN)
    log_what_fits()
    faulthandler.enable()  # whoever finds it hung asks for its stacks
    gc.disable()
    program = importlib.import_module(PROGRAMS[name])
    gc.freeze()
    # Python's 700 took 4 of the 5 seconds in which rank 0 reads what 256 ranks plan for a
    # checkpoint, beside its training.
    gc.set_threshold(100_000)
    gc.enable()
    try:
        return program.run(notice)
    except Fenced as error:
        print(f"{name}  {error}", file=sys.stderr, flush=True)
        return error.code
    except ElasticError as error:
        print(f"{name}  error: {error}", file=sys.stderr, flush=True)
        code = error.code
    except Exception:
        traceback.print_exc()
        code = Exit.ERROR
    # What fails while everything is being ended has failed because of that.
    return Exit.TRY_AGAIN if notice else code


if __name__ == "__main__":
    status = main()
    from elastic.train.device import leave

    leave(status)
