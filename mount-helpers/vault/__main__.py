# SPDX-License-Identifier: Apache-2.0
"""hitrainctl runs this folder for its commands on vaults, for `verify` and for `steps --vault`: python3 FOLDER COMMAND WORD...
Standard library only. A command is a module with run(words); it returns an exit status, or None for success.
"""
import importlib
import os
import sys

# What the programs that draw have in common with these: texts for terminals.
sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'tools'))

from objects import Failure     # noqa: E402
from say import error           # noqa: E402
from words import Usage         # noqa: E402

COMMANDS = {'archive': 'archive_command', 'restore': 'restore_command', 'verify': 'verify_command',
            'vault': 'vault_command', 'steps': 'steps_command', 'recall': 'recall_command', 'demote': 'demote_command'}


def main(command, *words):
    status = 1
    try:
        status = importlib.import_module(COMMANDS[command]).run(list(words)) or 0
        sys.stdout.flush()
    except Usage as e:
        error(str(e))
        status = 2
    except Failure as e:
        error(str(e))
    except BrokenPipeError:
        error('cannot write: Broken pipe')
    except OSError as e:
        error(f'cannot write: {e.strerror}' if not e.filename else f'{e.filename}: {e.strerror}')
    except KeyboardInterrupt:
        status = 130
    os._exit(status)            # threads that wait for a silent vault are not waited for


main(*sys.argv[1:])
