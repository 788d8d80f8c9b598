# SPDX-License-Identifier: Apache-2.0
"""Commands of a model root: lines for its .hitrain/ctl."""
import errno
import os

from kept import Handle, open_folder
from objects import Failure

_ANSWERS_BYTES = 1 << 16


def open_ctl(folder):
    """Of a model root, or of a directory that becomes one. OSError."""
    return Handle(os.open('.hitrain/ctl', os.O_RDWR | os.O_CLOEXEC, dir_fd=folder.fd))


def tell(ctl, line):
    """Runs a command, given as bytes. OSError with the store's own words; answers to commands before it are left out."""
    if b'\n' in line:
        raise OSError(errno.EINVAL, 'a name with a newline would be another command: rename it first')
    try:
        os.write(ctl.fd, line + b'\n')
    except OSError as e:
        answers = os.read(ctl.fd, _ANSWERS_BYTES).decode(errors='replace').split('\n')
        reason = next((answer for answer in answers if answer not in ('', 'ok')), '')
        raise OSError(e.errno, reason or e.strerror) from None


class Held:
    """A kept step does not expire while this is there. Where the caller may not command its model, it may."""

    def __init__(self, kept):
        self.name = kept.name
        try:
            self.ctl = open_ctl(open_folder(os.path.realpath(kept.root)))
            tell(self.ctl, f'hold {kept.name}'.encode())
        except OSError as e:
            self.ctl = None
            if e.errno == errno.ENOENT:
                raise Failure(f'{kept.root}: kept step {kept.name} has gone') from None

    def is_in(self, job, digest):
        """The store notes that a vault has the step: it may give it up when it is full."""
        try:
            if self.ctl:
                tell(self.ctl, f'archived {self.name} {job} {digest.hex()}'.encode())
        except OSError:
            pass                # of another owner, or forgotten: the vault has it all the same
