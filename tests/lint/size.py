#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Functions, macros, headers and files stay small enough to be read at once; functions nest little.

A function's lines are those of its braces and all between them. Each if, for, while, do and switch nests one level,
also without braces. A macro with for_each in its name is a loop, and `else if` nests as deep as its if. The lint reads
both branches of an #if. Each run begins with examples of its own, so a lint that finds nothing any more fails.
"""
import pathlib
import re
import sys

from ctext import blank, c_files

# (lines of a file, of a private header, of a function, levels) of the folders where they differ, deepest folder first.
LIMITS = {
    'tests/programs': (1400, 400, 70, 4),  # one file each, so that they run anywhere
    'tests': (1000, 400, 70, 4),
    'bench': (1000, 400, 70, 4),
}
DEFAULT = (800, 400, 70, 3)

DIRECTIVE = re.compile(r'^[ \t]*#[ \t]*(\w+)((?:[^\n]*\\\n)*[^\n]*)', re.M)
TOKEN = re.compile(r'\w+|\S')
NEST = {'if', 'for', 'while', 'do', 'switch'}
OPENING, CLOSING = '([{', ')]}'


# ---- text ----

def spaces(match):
    return re.sub(r'[^\n]', ' ', match.group())


def branches(code, first):
    """The code without directives; of each #if it keeps the first branch, or all others."""
    out, at, stack = [], 0, []
    for m in DIRECTIVE.finditer(code):
        kept = code[at:m.start()]
        out += [kept if all(stack) else re.sub(r'[^\n]', ' ', kept), spaces(m)]
        at = m.end()
        if m.group(1) in ('if', 'ifdef', 'ifndef'):
            # Without another branch there is no choice.
            stack.append(first or not has_else(code, at))
        elif m.group(1) in ('else', 'elif') and stack:
            stack[-1] = not first
        elif m.group(1) == 'endif' and stack:
            stack.pop()
    return ''.join(out) + code[at:]


def has_else(code, at):
    """Does the #if that ends here have an #else or #elif?"""
    depth = 0
    for m in DIRECTIVE.finditer(code, at):
        if m.group(1) in ('else', 'elif') and depth == 0:
            return True
        if m.group(1) == 'endif' and depth == 0:
            return False
        depth += m.group(1).startswith('if') - (m.group(1) == 'endif')
    return False


def functions(code):
    """(line, name, lines, body) of each function; as clang-format lays them out, its braces begin lines."""
    lines = code.split('\n')
    begin = None
    for i, line in enumerate(lines):
        if line.rstrip() == '{':
            begin = i
        elif line.startswith('}') and begin is not None:
            head = ' '.join(lines[max(0, begin - 5):begin])
            head = re.split(r'[;}]', head)[-1]
            name = re.search(r'(?:_TEST\()?(\w+)\s*[()]', head)
            yield begin + 1, name.group(1) if name else '?', i - begin + 1, '\n'.join(lines[begin:i + 1])
            begin = None


def macros(code):
    for m in DIRECTIVE.finditer(code):
        if m.group(1) == 'define':
            yield code.count('\n', 0, m.start()) + 1, m.group(2).split('(')[0].split()[0], m.group().count('\n') + 1


# ---- nesting ----

class Body:
    """The statements of a function."""

    def __init__(self, text):
        self.tokens = TOKEN.findall(text)
        self.at = 0

    def look(self, ahead=0):
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ''

    def after_group(self, at):
        """The place after the parentheses or braces that open there."""
        depth = 0
        while at < len(self.tokens):
            depth += (self.tokens[at] in OPENING) - (self.tokens[at] in CLOSING)
            at += 1
            if depth == 0:
                break
        return at

    def skip_to(self, end):
        while self.look() and self.look() != end:
            self.at = self.after_group(self.at) if self.look() in OPENING else self.at + 1
        self.at += 1

    def block(self):
        """The levels that nest in a block."""
        deepest = 0
        self.at += 1
        while self.look() and self.look() != '}':
            deepest = max(deepest, self.statement())
        self.at += 1
        return deepest

    def statement(self):
        """The levels that nest in a statement, its own included."""
        word = self.look()
        if word == '{':
            return self.block()
        if word in ('case', 'default') or (self.look(1) == ':' and re.match(r'[A-Za-z_]', word)):
            self.skip_to(':')
            return 0
        if word in NEST or 'for_each' in word:
            return self.nesting(word)
        self.skip_to(';')
        return 0

    def nesting(self, word):
        self.at += 1
        if word == 'do':
            levels = 1 + self.statement()
            self.skip_to(';')
            return levels
        self.at = self.after_group(self.at)
        levels = 1 + self.statement()
        if word == 'if' and self.look() == 'else':
            self.at += 1
            chained = self.look() == 'if'
            levels = max(levels, self.statement() + (not chained))
        return levels


# ---- all ----

def limits_of(path):
    return next((limits for folder, limits in LIMITS.items() if path.is_relative_to(folder)), DEFAULT)


def check(path, text):
    code = blank(text)
    file_lines, header_lines, function_lines, levels = limits_of(path)
    lines = text.count('\n')
    if lines > (header_lines if path.name.endswith('_priv.h') else file_lines):
        yield f'{path}:1: {lines} lines'
    for line, name, lines in macros(code):
        if lines > function_lines:
            yield f'{path}:{line}: {name} has {lines} lines'
    for first in (True, False):
        for line, name, lines, body in functions(branches(code, first)):
            if first and lines > function_lines:
                yield f'{path}:{line}: {name} has {lines} lines'
            deepest = Body(body).block()
            if deepest > levels:
                yield f'{path}:{line}: {name} nests {deepest} levels'


# ---- examples ----

GOOD = """
static int f(struct ht_x *x) HT_REQUIRES(HT_LOCK_X)
{
#if A
    if (a) {
#else
    if (b) {
#endif
        ht_list_for_each (p, head)
            if (c)
                return (struct t){1, {2}}.a;
            else if (d)
                call("{{{", '{'); /* { */
    } else if (e) {
        goto out;
    }
out:
    return 0;
}
"""
FOUR = ['if (a) {', 'ht_list_for_each (p, head)', 'do', 'switch (x) {', 'y++;', '}', 'while (z);', '}']


def function(body):
    return f'int f(void)\n{{\n{body}\n}}\n'


# (file, text, complaints)
EXAMPLES = [
    ('fs/a.c', GOOD, 0),
    ('fs/a.c', function('g();\n' * 67), 0),
    ('fs/a.c', function('g();\n' * 68), 1),
    ('fs/a.c', function(' '.join(FOUR)), 1),
    ('fs/a.c', function(' '.join(FOUR[:2] + FOUR[3:6] + FOUR[7:])), 0),
    ('fs/a.c', GOOD.replace('if (c)', 'while (c) if (f)'), 1),
    ('fs/a.c', GOOD.replace('goto out;', 'for (;;) for (;;) for (;;) ;'), 1),
    ('fs/a.c', '#if A\n#else\n' + function('for (;;) for (;;) for (;;) for (;;) ;') + '#endif\n', 1),
    ('fs/a.c', '#define A(x) \\\n' + '    x; \\\n' * 70 + '    x\n', 1),
    ('fs/a.c', '\n' * 801, 1),
    ('fs/a_priv.h', '\n' * 400, 0),
    ('fs/a_priv.h', '\n' * 401, 1),
    ('tests/unit/a.c', '\n' * 1000, 0),
]


def failing_examples():
    for name, text, expected in EXAMPLES:
        found = set(check(pathlib.PurePath(name), text))
        if len(found) != expected:
            yield f'size.py: finds {found or "nothing"} in this example, and not {expected}:\n{text[:1000]}'


def main():
    wrong = [*failing_examples()]
    wrong += [line for path, text in c_files() for line in dict.fromkeys(check(path, text))]
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == '__main__':
    sys.exit(main())
