# SPDX-License-Identifier: Apache-2.0
"""hitrainctl runs this folder for its commands `report` and `plan`: python3 FOLDER COMMAND WORD... Standard library only."""
import os
import signal
import sys

import plan
import report
from store import Failure, printable

COMMANDS = {'plan': plan.run, 'report': report.run}


def main(command, *words):
    for number in signal.SIGINT, signal.SIGPIPE:
        signal.signal(number, signal.SIG_DFL)
    try:
        COMMANDS[command](*words)
        sys.stdout.flush()
    except Failure as e:
        why = str(e)
    except OSError as e:
        why = f'cannot write: {e.strerror}'
    else:
        return
    print('hitrainctl: error: ' + printable(why), file=sys.stderr, flush=True)
    os._exit(1)     # output that could not be written is not tried again


main(*sys.argv[1:])
