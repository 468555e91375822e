"""The command line: `depthjax train | eval | probe | generate | info | plan | cost | convert |
data`.

Everything heavy is imported inside the command that needs it, and bad input ends every command in
one way: one sentence on stderr, exit status 2.
"""

import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from depthjax.errors import InputError, JobBroken

if TYPE_CHECKING:
    from depthjax.config import Config

USAGE = """\
usage: depthjax COMMAND ...

  train CONFIG [--field value ...]   train, or continue the run that is in run.dir
  eval RUN_DIR [--field value ...]   held-out losses of a run's newest checkpoint, or of a model
                                     folder; with --tasks A,B evaluation tasks; --help lists them
  eval fetch | count                 get the tasks' documents without the hub; their tokens
  probe CKPT [CKPT ...] --out DIR    what the layers of trained models do: diagnostics, drawn on one
                                     page; --help lists its options
  generate RUN_DIR --prompt TEXT ... text continued by a run's newest checkpoint or a model folder;
                                     --help lists its options
  info [CONFIG] [--field value ...]  shape, parameters, FLOPs, tokens; without CONFIG, all shapes
                                     and residual connections
  plan CONFIG [--topology T] ...     memory, traffic, FLOPs and fit on a pod that is not there;
                                     --help lists its options
  cost --shapes A,B --residuals A,B  what reading a prompt costs, by formula or (--measure) timed
                                     here, as a table, a figure and a page
  convert IN OUT [--from F] [--to F] checkpoints of others and back, as files or folders; --help
                                     lists formats; --to-residual NAME changes the connection
  data prepare INPUT... --out DIR    text files, folders or hf:// URLs into token shards
  data index DIR                     add an index with checksums to shards made elsewhere
  data verify DIR                    check shards against their index

CONFIG is a Python file, such as configs/quickstart.py, or the config.json of a run or a model
folder; any of its fields can be overridden:

  depthjax train configs/quickstart.py --train.steps 100 --run.dir runs/short
  depthjax info configs/depthbench.py --model.shape 400m-L70 --model.residual NAME

`depthjax COMMAND --help` lists the fields or options of a command.
"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and exits: 0 done, 2 bad input, 1 training diverged, 130 Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(_status(lambda: _run(arguments)))


def _run(arguments: Sequence[str]) -> int:
    commands = {"train": _train, "eval": _eval, "info": _info, "plan": _plan}
    commands |= {"probe": _probe, "cost": _cost, "generate": _generate}
    commands |= {"convert": _convert, "data": _data}
    if arguments[:1] == ["train"]:
        # While importing nothing is at stake, and an exception may be lost in a library's callback.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from depthjax import __version__

        print(f"depthjax {__version__}")
        return 0
    if arguments[0] not in commands:
        raise InputError(f"command {arguments[0]!r} is unknown: use {', '.join(commands)}")
    return commands[arguments[0]](arguments[1:])


def _status(work: Callable[[], int], speaker: str = "depthjax") -> int:
    """The exit status of `work`; what it may raise ends in one sentence on stderr."""
    try:
        return work()
    except InputError as error:
        print(f"{speaker}: {error}", file=sys.stderr)
        return 2
    except JobBroken as error:
        print(f"{speaker}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        name = error.filename or "input or output"
        print(f"{speaker}: {name}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{speaker}: interrupted", file=sys.stderr)
        return 130


def _config_file(arguments: Sequence[str], prog: str) -> "Config":
    """The config of `CONFIG [--field value ...]`."""
    from depthjax.config import load_config, with_dials
    from depthjax.overrides import override

    if arguments and not arguments[0].startswith("-"):
        load = functools.partial(load_config, arguments[0])
        return override(load, arguments[1:], f"{prog} CONFIG")
    if "--help" in arguments or "-h" in arguments:
        override(with_dials, arguments, f"{prog} CONFIG")
    raise InputError(f"{prog} needs a config file, such as configs/quickstart.py")


def _train(arguments: Sequence[str]) -> int:
    config = _config_file(arguments, "depthjax train").check()
    from depthjax.parallel import processes

    if not processes.join():
        return _train_here(config)
    work = functools.partial(processes.as_one, lambda: _train_here(config))
    return processes.leave(_status(work, f"depthjax, {processes.name()}"))


def _train_here(config: "Config") -> int:
    """Trains in this process, be it one of several."""
    from rich.console import Console

    from depthjax.parallel import processes
    from depthjax.train import TrainingDiverged, train

    try:
        return train(config, Console(markup=False))[1]
    except TrainingDiverged as error:
        if processes.is_first():
            print(f"depthjax: {error}", file=sys.stderr)
        return 1
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):  # all is saved: let nothing disturb the exit
            signal.signal(number, signal.SIG_IGN)


def _eval(arguments: Sequence[str]) -> int:
    from depthjax.cli_eval import run

    run(arguments)
    return 0


def _generate(arguments: Sequence[str]) -> int:
    from depthjax.cli_generate import run

    run(arguments)
    return 0


def _info(arguments: Sequence[str]) -> int:
    from depthjax.plan.info import print_config, print_shapes

    if not arguments:
        print_shapes()
    else:
        print_config(_config_file(arguments, "depthjax info").check())
    return 0


def _plan(arguments: Sequence[str]) -> int:
    from depthjax.cli_plan import run

    run(arguments)
    return 0


def _probe(arguments: Sequence[str]) -> int:
    from depthjax.cli_probe import run

    run(arguments)
    return 0


def _cost(arguments: Sequence[str]) -> int:
    from depthjax.cli_cost import run

    run(arguments)
    return 0


def _convert(arguments: Sequence[str]) -> int:
    from depthjax.cli_convert import run

    run(arguments)
    return 0


def _data(arguments: Sequence[str]) -> int:
    from depthjax.cli_data import COMMANDS, run

    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
    elif arguments and arguments[0] in COMMANDS:
        run(arguments[0], arguments[1:])
    else:
        given = repr(arguments[0]) if arguments else "missing"
        raise InputError(f"data command is {given}: use {', '.join(COMMANDS)}")
    return 0
