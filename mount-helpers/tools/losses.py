# SPDX-License-Identifier: Apache-2.0
"""Losses from a file that a trainer wrote: CSV with the columns step and loss, or JSON Lines with these keys."""
import json
import math
import os
import stat

from store import Failure

LINE_BYTES_MAX = 8192
POINTS_MAX = 1024


def number(value):
    """None: it is no finite number."""
    try:
        found = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def words_of(line):
    return [word.strip(' \t\r\n"') for word in line.split(',')]


def halve(values):
    return [a / 2 + b / 2 for a, b in zip(values[::2], values[1::2])]


class Losses:
    """The file may be of any length: neighbouring points become their mean when there are too many."""

    def __init__(self, path=''):
        self.path = path
        self.step, self.loss = [], []
        self.points = self.skipped = 0      # lines with a loss; others
        self.each, self.in_point = 1, 0     # points in one of step and loss; and in the last one
        self.columns = None                 # of step and loss in CSV

    def add(self, step, loss):
        if self.in_point == 0:
            if len(self.loss) == POINTS_MAX:
                self.step, self.loss = halve(self.step), halve(self.loss)
                self.each *= 2
            self.step.append(0.0)
            self.loss.append(0.0)
        self.in_point += 1
        self.step[-1] += step / self.in_point - self.step[-1] / self.in_point
        self.loss[-1] += loss / self.in_point - self.loss[-1] / self.in_point
        self.points += 1
        self.in_point %= self.each

    def take(self, line):
        line = line.strip()
        if not line:
            return
        if not line.startswith('{') and self.is_header(line):
            return
        step, loss = self.of_json(line) if line.startswith('{') else self.of_csv(line)
        if loss is None:
            self.skipped += 1
        else:
            self.add(self.points + self.skipped + 1 if step is None else step, loss)

    @staticmethod
    def of_json(line):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            return None, None
        return number(found.get('step')), number(found.get('loss'))

    def is_header(self, line):
        """The first line is one if it names a column loss. Without one the columns are step and loss, or loss alone."""
        if self.columns is not None:
            return False
        words = words_of(line)
        if 'loss' in words:
            self.columns = [words.index(w) if w in words else None for w in ('step', 'loss')]
            return True
        self.columns = [0, 1] if len(words) > 1 else [None, 0]
        return False

    def of_csv(self, line):
        words = words_of(line)
        return [number(words[i]) if i is not None and i < len(words) else None for i in self.columns]


def read(path):
    found = Losses(path)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 'rb') as f:
            if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
                raise Failure(f'{path} is no regular file')
            take_lines(f, found)
    except IsADirectoryError:
        raise Failure(f'{path} is no regular file') from None
    except OSError as e:
        raise Failure(f'{path}: {e.strerror}') from None
    if not found.points:
        raise Failure(f'{path}: no line has a loss: expected CSV with the columns step and loss, or JSON Lines with these keys')
    return found


def take_lines(f, found):
    whole = True    # the line before has ended
    while line := f.readline(LINE_BYTES_MAX):
        ends = line.endswith(b'\n') or len(line) < LINE_BYTES_MAX
        if whole and ends:
            found.take(line.decode(errors='replace'))
        elif whole:
            found.skipped += 1
        whole = ends
