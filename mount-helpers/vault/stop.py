# SPDX-License-Identifier: Apache-2.0
"""Signals that end a program. It looks for them where it waits, so that what it has begun can be removed. Where a lost
connection ended the reader of messages, too, a message must not end the program before that.
"""
import signal

from objects import Failure

LOOK_S = 0.2

_asked = False


class Stopped(Failure):
    """A signal came."""


def _note(number, frame):
    global _asked
    _asked = True


def catch():
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        signal.signal(number, _note)


def ask():
    """As a signal does."""
    _note(0, None)


def is_asked():
    return _asked


def check():
    if _asked:
        raise Stopped('interrupted')
