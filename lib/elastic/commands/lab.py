"""The commands of the laboratory: to try Elastic out, and to prove what it does.

Each of them is a program, too, and may be called without `lab`.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from elastic.base.environment import elastic_home
from elastic.base.errors import Exit, UsageError
from elastic.base.keys import NAME, TIME, parse
from elastic.commands import shared
from elastic.commands.shared import SETTINGS, Ordered, flag, show, warn
from elastic.lab.sandbox import Sandbox, Shape, default_folder
from elastic.run import rundir

command = functools.partial(shared.command, of="elastic lab")


@command("demo", "demo --slurm")
@flag("--slurm", help="On a private Slurm of several nodes.")
def demo(slurm: bool):
    """Train for a minute while the workers are killed.

    All files are below ./build/demo, and nothing goes on when it ends.
    """
    program = str(elastic_home() / "bin" / "elastic-demo")
    os.execv(program, [program, *["--slurm"] * slurm])


@command("plan 7b.toml --trace spot.csv", "plan 7b.toml --trace spot.csv --set plan.step=4s")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--trace", required=True, help="When nodes came and went: a CSV file.",
              type=click.Path(path_type=Path, exists=True, dir_okay=False))
@shared.overrides_option
@shared.json_option
def plan(config: Path, trace: Path, overrides: tuple[str, ...], as_json: bool):
    """Forecast how CONFIG would fare with preemptions.

    Plays a trace to plain --requeue, sync mode and local mode, and says which
    to take. What things cost is in section [plan].
    A line of a CSV file is MILLISECONDS,add|remove,NODE.
    """
    from elastic.lab.trace import advise
    from elastic.people import views

    with views.busy("playing the trace"):
        found = advise(config, overrides, trace, warn)
    show(as_json, found, views.plan_view)


@command("validate etc/demo.toml", "validate 7b.toml --arms int8,int4 --seeds 5")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--arms", default="int8", metavar="A,B",
              help="Compressions of local mode to try; K and overlap are CONFIG's.")
@click.option("--seeds", default=3, type=click.IntRange(1, 10),
              help="Runs of each; the noise is judged by them.")
@click.option("--margin", default=0.02, help="Additional loss that counts as equal.")
@click.option("--metric", default="", show_default="the first that says loss",
              help="A number that validate() returns.")
@shared.overrides_option
@shared.json_option
def validate(config: Path, arms: str, as_json: bool, **given):
    """Compare local mode with sync mode at equal tokens.

    Trains CONFIG in both, with the same samples and seeds on elastic.max
    GPUs, and says how much loss local mode costs, with its noise. Goes on
    where it was if it is started again. Exits 1 unless every arm is ok.
    """
    from elastic.lab.validation import compare
    from elastic.people import views

    data, curves, is_ok = compare(config, arms=arms.split(","), **given)
    show(as_json, data, functools.partial(views.validation_view, curves=curves))
    sys.exit(Exit.OK if is_ok else Exit.ERROR)


def seconds(_ctx: click.Context, _option: click.Parameter, text: str) -> float:
    """What an option that takes a duration says."""
    try:
        return parse(TIME, text)
    except UsageError as error:
        raise click.BadParameter(error.what) from None


duration = functools.partial(click.option, callback=seconds)


@command("chaos demo --every 29s --for 30m", "chaos demo --faults kill-worker,preempt --seed 7")
@shared.run_argument()
@duration("--every", "every_s", default="29s", help="Mean time between two faults.")
@duration("--for", "for_s", default="10m", help="How long.")
@duration("--before", "before_s", default="0s", help="Watch the undisturbed run for so long first.")
@click.option("--seed", default=0, help="The same faults in the same order.")
@click.option("--faults", "kinds", default="", show_default="all", metavar="A,B,...",
              help="The kinds of faults.")
@shared.json_option
def chaos(run: str, as_json: bool, **plan):
    """Do real faults to RUN, in local mode, and report what they cost.

    Kills and stops the run's own processes and jobs. Nothing that is
    committed can be lost by it.
    """
    from elastic.lab.chaos import harm
    from elastic.people import views

    report = harm(rundir.find(run), say=warn, **plan)
    show(as_json, report, views.chaos_view)
    sys.exit(Exit.ERROR if report["audit"]["problems"] else Exit.OK)


# ---- sandbox


@command("sandbox up --nodes 4", "sandbox env    # for eval", "sandbox preempt", cls=click.Group)
def sandbox():
    """Run a private multi-node Slurm on this machine."""


_WHICH = (click.Option(["--name"], default="default", help="Which one."),
          click.Option(["--dir", "folder"], type=Path, help="Folder of sandboxes."))


def _of_sandbox(method: Callable[..., str | None], *parameters: click.Parameter, **more) -> None:
    """Make a subcommand of a function of a sandbox; what it returns is printed. `more`
    for click: a help that is not the function's own."""
    verb = method.__name__.strip("_").replace("_", "-")

    @sandbox.command(verb, params=[*parameters, *_WHICH], **more)
    @functools.wraps(method)
    def call(name: str, folder: Path | None, **given: Any) -> None:
        from elastic.people import views

        if not (name and NAME.holds(name)):  # it is a path, say
            raise UsageError(f"unfit name of a sandbox: {name!r}", NAME.rule)
        box = Sandbox((folder or default_folder()).absolute() / name)
        with views.busy(f"sandbox {name}: {verb}"):
            answer = method(box, **given)
        if answer:
            click.echo(answer)


def _up(box: Sandbox, **shape: Any) -> str:
    """Start it and wait until its nodes are idle."""
    box.up(Shape(**shape))
    return f"up; to use it:\n{box.env()}"


def _number(option: str, default: float, least: float, what: str) -> click.Option:
    kind = click.IntRange(least) if isinstance(default, int) else click.FloatRange(least)
    return click.Option(option.split(), type=kind, default=default, help=what)


_NODE, _SECONDS = click.Argument(["node"]), _number("--seconds", 30.0, 0.0, "For how long.")
_of_sandbox(
    _up,
    _number("--nodes", Shape.nodes, 1, "Nodes with GPUs."),
    _number("--gpus", Shape.gpus, 0, "GPUs of each."),
    _number("--grace grace_s", Shape.grace_s, 0, "Seconds of notice before a preemption."),
    click.Option(["--set", "settings"], multiple=True, metavar="KEY=VALUE", help="In slurm.conf."),
)
_of_sandbox(Sandbox.env, help="Print what leads Slurm's commands to it, for eval.")
_of_sandbox(Sandbox.preempt, _number("--nodes", 1, 1, "How many."), _SECONDS,
            help="Take whole nodes with a job of high priority; print its id.")
_of_sandbox(Sandbox.kill_node, _NODE)
_of_sandbox(Sandbox.revive_node, _NODE)
_of_sandbox(Sandbox.down)


@click.group(cls=Ordered, commands=[demo, sandbox, chaos, plan, validate],
             context_settings=SETTINGS)
def lab():
    """Try Elastic out, and prove what it does.

    Each of these is also a program: elastic-demo.
    """
