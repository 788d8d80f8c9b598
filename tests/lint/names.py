#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""One way to say a thing in C: names of return codes, tests of pointers, prefixes in headers.

1. An int that holds 0 or a negative errno (or a count) is called rc, not ret or r.
2. A pointer is tested as p and !p. "p != NULL" stands only where its value is used: returned, assigned, passed.
3. Tags and types that a header defines begin with ht_, enumerators with HT_. Headers of tests and bench use the name
   of their module instead.
"""
import re
import sys

from ctext import blank, c_files, line_of

DECLARED = re.compile(r'\b(?:int|ssize_t)\s+([^;{}]*);')
PARAMETER = re.compile(r'[(,]\s*(?:const\s+)?(?:int|ssize_t)\s+(ret|r)\s*[,)]')
NAMED = re.compile(r'(?:^|,)\s*(ret|r)\s*(?:=|,|$)')
COMPARED = re.compile(r'([=!]=)\s*NULL\b|\bNULL\s*[=!]=')
TESTED = re.compile(r'\b(?:if|while|for|assert|ck_assert)\s*$')
TAG = re.compile(r'\b(?:struct|union|enum)\s+(\w+)\s*\{')
ENUM = re.compile(r'\benum\b[\s\w]*\{([^}]*)\}')
TYPEDEF = re.compile(r'\btypedef\b[^;{]*?\(\*(\w+)\)')
MACRO = re.compile(r'^[ \t]*#(?:[^\n]*\\\n)*[^\n]*', re.M)


def without_nested(text):
    """The text with spaces for everything in parentheses and brackets."""
    while True:
        shorter = re.sub(r'\([^()]*\)|\[[^\[\]]*\]', lambda m: ' ' * len(m.group()), text)
        if shorter == text:
            return text
        text = shorter


def return_codes(code):
    for m in DECLARED.finditer(code):
        name = NAMED.search(without_nested(m.group(1)))
        if name:
            yield m.start(1) + name.start(1), f'a return code is called rc, not {name.group(1)}'
    for m in PARAMETER.finditer(code):
        yield m.start(1), f'a return code is called rc, not {m.group(1)}'


def before_operand(code, at):
    """(the code before this place inside the parentheses around it, the code before these parentheses)"""
    depth = 0
    for i in range(at - 1, -1, -1):
        c = code[i]
        if c in ')]':
            depth += 1
        elif c in '([' and depth > 0:
            depth -= 1
        elif c in '([':
            return code[i + 1:at], code[max(0, i - 40):i]
        elif c in '{}' and depth == 0:
            return code[i + 1:at], ''
    return code[:at], ''


def is_tested(code, begin, end):
    """Is the comparison a condition, or a part of one?"""
    if re.match(r'\s*(?:&&|\|\||\?)', code[end:]):
        return True
    inside, opener = before_operand(code, begin)
    if TESTED.search(opener):
        return True
    mine = re.split(r'[;,?:]|(?<![=!<>])=(?!=)|\breturn\b', without_nested(inside))[-1]
    return bool(re.search(r'&&|\|\|', mine))


def null_tests(code):
    for m in COMPARED.finditer(code):
        if m.group(1) != '!=':
            yield m.start(), 'write !p for a pointer that is NULL'
        elif is_tested(code, m.start(), m.end()):
            yield m.start(), 'write p for a pointer that is not NULL'


def prefixes(code):
    for m in TAG.finditer(code):
        if not m.group(1).startswith('ht_'):
            yield m.start(), f'{m.group(1)}: a tag in a header begins with ht_'
    for m in TYPEDEF.finditer(code):
        if not m.group(1).startswith('ht_'):
            yield m.start(1), f'{m.group(1)}: a type in a header begins with ht_'
    plain = MACRO.sub(lambda m: re.sub(r'[^\n]', ' ', m.group()), code)
    for m in ENUM.finditer(plain):
        for name in re.finditer(r'(?:^|,)\s*(\w+)', without_nested(m.group(1))):
            if not name.group(1).startswith('HT_'):
                yield m.start(1) + name.start(1), f'{name.group(1)}: an enumerator in a header begins with HT_'


def check(path, text):
    code = blank(text)
    found = [*return_codes(code), *null_tests(code)]
    if path.suffix == '.h' and path.parts[0] not in ('tests', 'bench'):
        found += prefixes(code)
    for at, why in sorted(found):
        yield f'{path}:{line_of(text, at)}: {why}'


def main():
    wrong = [line for path, text in c_files() for line in check(path, text)]
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == '__main__':
    sys.exit(main())
