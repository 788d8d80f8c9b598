# SPDX-License-Identifier: Apache-2.0
"""What a mounted store says about itself. The mount may belong to another program, so all of it may hold anything."""
import collections
import errno
import json
import os
import re

LINE_BYTES_MAX = 1 << 16
NUMBER_MAX = (1 << 64) - 1
UNITS = 'B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB', 'EiB'

CONTROLS = '\x00-\x1f\x7f-\x9f\ud800-\udfff'
# Names may also hold characters that reverse the direction of writing.
CONTROLS_AND_DIRECTIONS = re.compile(f'[{CONTROLS}\u2028-\u202e\u2060-\u206f]')
CONTROLS = re.compile(f'[{CONTROLS}]')

COUNTER = re.compile('[0-9]{1,30}')
NO_BYTES = re.compile('[\ud800-\udc7f\udd00-\udfff]')


class Failure(Exception):
    """A message for the caller."""


def replace(pattern, text, mark):
    """The text with one mark for each byte of the characters that the pattern names."""
    return pattern.sub(lambda m: mark * len(m[0].encode(errors='surrogateescape')), text)


def printable(text):
    """A terminal must not obey the text."""
    return replace(CONTROLS, text, '?')


def size_text(count):
    """12 KiB, 1.5 GiB, as the programs in C write it."""
    tenths = shown = int(count) * 10
    unit = 0
    while shown >= 10240 and unit + 1 < len(UNITS):
        unit += 1
        shown = (tenths + (1 << 10 * unit - 1)) >> 10 * unit
    whole, tenth = divmod(shown, 10)
    return f'{whole}.{tenth} {UNITS[unit]}' if tenth else f'{whole} {UNITS[unit]}'


def explain(point, error):
    if error.errno == errno.ENOTCONN:
        return Failure(f'{point}: the daemon of this mount is gone; unmount it and mount it again')
    return Failure(f'{point}: {error.strerror}')


class Line(dict):
    """One object of JSON Lines. A byte that is no UTF-8 is half a surrogate pair, as os.fsdecode() makes it."""

    def number(self, key):
        value = self.get(key)
        return min(max(value, 0), NUMBER_MAX) if isinstance(value, int) else 0

    def text(self, key):
        value = self.get(key)
        return NO_BYTES.sub('\ufffd', value) if isinstance(value, str) else ''


def parse(line):
    """ValueError: it is no object of JSON."""
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError('nested too deeply') from None
    if not isinstance(found, dict):
        raise ValueError('no object')
    return Line(found)


def hidden_lines(point, name, most):
    """The lines of .hitrain/NAME, at most so many. PermissionError: the caller may not read it."""
    try:
        with open(f'{point}/.hitrain/{name}', 'rb') as f:
            for _ in range(most):
                line = f.readline(LINE_BYTES_MAX)
                if not line:
                    return
                if not line.endswith(b'\n'):
                    raise ValueError('a line has no end')
                yield parse(line)
    except PermissionError:
        raise
    except OSError as e:
        raise explain(point, e) from None
    except ValueError:
        raise Failure(f'{point}: .hitrain/{name} is not as this program knows it: the daemon is of another version') from None


def attribute(path, word):
    """The text of user.hitrain.WORD; None: there is none, or the caller may not read it."""
    try:
        return os.getxattr(path, f'user.hitrain.{word}').decode(errors='replace')
    except OSError:
        return None


def counters(point):
    """word -> number, of the whole store; 0 for others."""
    try:
        text = os.getxattr(point, 'user.hitrain.stats').decode(errors='replace')
    except OSError as e:
        raise explain(point, e) from None
    pairs = (line.partition('=') for line in text.split('\n'))
    return collections.Counter({word: min(int(value), NUMBER_MAX) for word, _, value in pairs if COUNTER.fullmatch(value)})
