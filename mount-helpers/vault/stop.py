# SPDX-License-Identifier: Apache-2.0
"""Signals that end a program. It looks for them where it waits, so that what it has begun can be removed. Where a lost
connection ended the reader of messages, too, a message must not end the program before that.
"""
import signal

from objects import Failure

LOOK_S = 0.2

_asked = _raises = False


class Stopped(Failure):
    """A signal came."""


def _note(number, frame):
    global _asked
    _asked = True
    if _raises:
        raise Stopped('interrupted')


def catch():
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        signal.signal(number, _note)


class Raises:
    """with Raises(): a signal ends a call that waits."""

    def __enter__(self):
        global _raises
        _raises = True
        check()

    def __exit__(self, *unused):
        global _raises
        _raises = False


def is_asked():
    return _asked


def check():
    if _asked:
        raise Stopped('interrupted')
