# SPDX-License-Identifier: Apache-2.0
"""What the programs say: messages, and how far they are."""
import os
import sys
import time

from store import printable, size_text

BAR_WIDTH = 24
SHOWN_EACH_S = 0.2


def error(text):
    print('hitrainctl: error: ' + printable(text), file=sys.stderr, flush=True)


def note(text):
    print('hitrainctl: ' + printable(text), file=sys.stderr, flush=True)


class Progress:
    """A bar on a terminal, else nothing. done: what happened to the bytes, as in "archived". total: a number, or a function that is asked
    for the bar alone.
    """

    def __init__(self, done, total):
        self.on = os.isatty(2)
        self.done, self.bytes = done, 0
        self.total = total if not callable(total) else total() if self.on else 0
        self.began = self.shown = time.monotonic()

    def add(self, count):
        self.bytes += count
        if self.on and time.monotonic() - self.shown >= SHOWN_EACH_S:
            self.show()

    def show(self):
        self.shown = time.monotonic()
        rate = self.bytes / max(self.shown - self.began, 1e-9)
        part = min(self.bytes / self.total, 1) if self.total else 1
        full = int(part * BAR_WIDTH)
        left = f', {(self.total - self.bytes) / rate:.0f} s left' if 0 < self.bytes < self.total else ''
        print(f'\r[{"#" * full}{"." * (BAR_WIDTH - full)}] {100 * part:.1f} %  {size_text(self.bytes)} of '
              f'{size_text(self.total)} {self.done}, {size_text(rate)}/s{left}\033[K', end='', file=sys.stderr, flush=True)

    def clear(self):
        if self.on:
            print('\r\033[K', end='', file=sys.stderr, flush=True)

    def end(self):
        if self.on:
            self.show()
            print(file=sys.stderr, flush=True)
