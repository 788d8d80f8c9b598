# SPDX-License-Identifier: Apache-2.0
"""Words of a command line: paths and options, as the other commands of hitrainctl take them."""
import getopt
import re

from objects import Failure, NUMBER_MAX, RANKS_MAX

UNITS = {'': 0, 'K': 10, 'M': 20, 'G': 30, 'T': 40}


class Usage(Failure):
    """The caller used a command in a way that it has not."""


def size(text):
    m = re.fullmatch('([0-9]{1,18})([KMGT]?)', text)
    if not m or not int(m[1]):
        raise ValueError('a number of bytes per second')
    return int(m[1]) << UNITS[m[2]]


def number(text):
    if not re.fullmatch('[0-9]{1,19}', text) or int(text) > NUMBER_MAX:
        raise ValueError('a number')
    return int(text)


def count(text):
    if not number(text):
        raise ValueError('a number above 0')
    return number(text)


def digest(text):
    if not re.fullmatch('[0-9a-f]{32}', text):
        raise ValueError('32 hexadecimal digits in lower case')
    return bytes.fromhex(text)


def rank(text):
    """(rank, ranks) of rofR."""
    m = re.fullmatch('([0-9]{1,5})of([0-9]{1,5})', text)
    if not m or not int(m[1]) < int(m[2]) <= RANKS_MAX:
        raise ValueError('a rank and a number of ranks, as in 0of4')
    return int(m[1]), int(m[2])


def seconds(text):
    m = re.fullmatch('([0-9]{1,9})([smhd]?)', text)
    if not m or not int(m[1]):
        raise ValueError('a time, as in 30s, 24h or 7d')
    return int(m[1]) * {'': 1, 's': 1, 'm': 60, 'h': 3600, 'd': 86400}[m[2]]


def text(word):
    if not word:
        raise ValueError('a name')
    return word


def parse(words, least, most, expected, **options):
    """(paths, {option: value}). options: a function of the value that raises ValueError(what it expects), or None for one
    without a value; an underscore stands for a dash. Usage.
    """
    rows = {name.replace('_', '-'): take for name, take in options.items()}
    try:
        given, paths = getopt.gnu_getopt(words, '', [name + ('=' if take else '') for name, take in rows.items()])
    except getopt.GetoptError as e:
        raise Usage(f'{e}; `hitrainctl --help`') from None
    found = dict.fromkeys(options)
    for name, value in given:
        take = rows[name[2:]]
        try:
            found[name[2:].replace('-', '_')] = take(value) if take else True
        except ValueError as e:
            raise Usage(f'{name}: not {e}: {value}') from None
    if not least <= len(paths) <= most:
        raise Usage(f'expected {expected}')
    return paths, found
