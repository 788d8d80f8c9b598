# SPDX-License-Identifier: Apache-2.0
"""Commands of a model root: lines for its .hitrain/ctl."""
import os

from kept import Handle

_ANSWERS_BYTES = 1 << 16


def open_ctl(folder):
    """Of a model root, or of a directory that becomes one. OSError."""
    return Handle(os.open('.hitrain/ctl', os.O_RDWR | os.O_CLOEXEC, dir_fd=folder.fd))


def tell(ctl, line):
    """Runs a command, given as bytes. OSError with the store's own words; answers to commands before it are left out."""
    try:
        os.write(ctl.fd, line + b'\n')
    except OSError as e:
        answers = os.read(ctl.fd, _ANSWERS_BYTES).decode(errors='replace').split('\n')
        reason = next((answer for answer in answers if answer not in ('', 'ok')), '')
        raise OSError(e.errno, reason or e.strerror) from None
