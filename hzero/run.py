"""Runs a Python script so that hzero serves DeepSpeed configurations with an "hzero" block. The script needs no change.

With hzero installed this is so anyway; the command also works where torch does not load it (HZERO_AUTOLOAD=0, a checkout).

Examples:
  torchrun --nproc-per-node=8 -m hzero.run train.py --deepspeed ds_config.json
  srun -n16 --gpus-per-task=1 hzero run train.py --deepspeed ds_config.json    (sets RANK and the like)
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from hzero import autoload
from hzero.errors import ConfigError
from hzero.tools.launch import launched
from hzero.tools.terminal import Parser, keep_streams


def run_script(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments. Exceptions of the script pass through.

    Returns:
        0; 2, after one line on stderr, if the script does not exist or the variables of launchers contradict each other.
    """
    parser = Parser("hzero run", __doc__)
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="file of the script, or name of a module with -m")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    keep_streams()
    try:
        parsed = parser.parse_args(list(arguments))
        if not parsed.module and not Path(parsed.script).is_file():
            raise ConfigError(f"SCRIPT: found no file {parsed.script!r}; expected a Python script, or -m and a module")
        launched()
    except ConfigError as error:
        print(f"hzero: error: {error}", file=sys.stderr)
        return 2
    sys.argv = [parsed.script, *parsed.rest]
    # Python puts the script's folder first, or with -m the current one.
    sys.path.insert(0, os.getcwd() if parsed.module else str(Path(parsed.script).resolve().parent))
    try:
        if parsed.module:
            runpy.run_module(parsed.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(parsed.script, run_name="__main__")
    finally:
        failed = isinstance(sys.exc_info()[1], Exception)  # its traceback is enough
        if not failed and not autoload.blocks_read and os.environ.get("RANK", "0") == "0":
            print('hzero: no DeepSpeed configuration with an "hzero" block was read', file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_script(sys.argv[1:]))
