# SPDX-License-Identifier: Apache-2.0
"""python -m hitrain run SCRIPT --store PATH: a script beside a store. python -m hitrain doctor: whether this machine can, and how fast."""
import argparse
import os
import pathlib
import signal
import subprocess
import sys
from typing import List

from hitrain import _doctor
from hitrain._daemon import StoreError
from hitrain.store import Store

STORE_VARIABLE = 'HITRAIN_STORE'


def _run(args: argparse.Namespace, words: List[str]) -> int:
    """The script's exit status; 128 and the number of a signal that ended it."""
    with Store(args.store, size=args.size, dram=args.dram, options=args.options) as store:
        environment = {**os.environ, STORE_VARIABLE: str(store.mountpoint)}
        with subprocess.Popen([sys.executable, args.script, *words], env=environment) as child:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the script, too, and that decides
            signal.signal(signal.SIGTERM, lambda number, _: child.send_signal(number))
            status = child.wait()
    return status if status >= 0 else 128 - status


def _commands() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog='python -m hitrain', description='A store for a training script, and a look at this machine.')
    commands = parser.add_subparsers(dest='command', required=True)
    run = commands.add_parser('run', help='mount a store, made if it is not there, and run a script beside it',
                              usage='%(prog)s SCRIPT --store PATH [OPTION...] [-- ARGUMENT...]',
                              description=f'Runs SCRIPT with its arguments and {STORE_VARIABLE}=DIRECTORY in its environment: the mount of the '
                                          'store. Several of these may share a store; the last one unmounts it.')
    run.add_argument('script', metavar='SCRIPT')
    run.add_argument('--store', required=True, metavar='PATH', help='a file, made if it is not there, or a formatted device')
    run.add_argument('--size', default='auto', help='of a new file, as 64G (half of the free space of its folder)')
    run.add_argument('--dram', default='auto', help='memory for tensors, as 8G (a quarter of what is available)')
    run.add_argument('--options', default='', metavar='O', help='more options of the mount, see hitrain(8)')
    doctor = commands.add_parser('doctor', help='look at this machine and a folder',
                                 description='Prints what is missing, with the remedy, and what the speed of a folder means for a model. '
                                             'Writes and removes one file of 256 MiB.')
    doctor.add_argument('folder', nargs='?', default='.', metavar='FOLDER', help='where a store would lie (.)')
    doctor.add_argument('--parameters', default='1B', metavar='N', help='of a model, as 7B or 350M (1B)')
    return parser


def main(words: List[str]) -> int:
    end = words.index('--') if '--' in words else len(words)
    args = _commands().parse_args(words[:end])
    try:
        if args.command == 'doctor':
            return _doctor.look(pathlib.Path(args.folder), args.parameters)
        return _run(args, words[end + 1:])
    except (StoreError, ValueError, OSError) as e:
        print(f'hitrain: {e}', file=sys.stderr)
        return 1


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
