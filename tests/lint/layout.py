#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What clang-format leaves open: blank lines after declarations, and the width of comments. --fix rewrites the files.

1. A blank line follows the declarations that open a function. None follows those that open a block inside it.
2. No line of a comment passes column 120. --fix wraps text, list items and tables of two columns, and leaves drawings.
"""
import re
import sys

from ctext import ROOT, blank, c_files, comments, line_of

WIDTH = 120

# ---- blank lines ----

QUALIFIER = r'(?:(?:static|const|volatile|register|extern|_Thread_local|_Alignas\(\w+\))\s+)*'
TAGGED = r'(?:struct|union|enum)(?:\s+\w+|(?=\s*\{))'
NUMBER = r'(?:unsigned|signed|long|short)(?:\s+(?:long|int|char|short))*'
TYPE = rf'(?:{TAGGED}|{NUMBER}|_Atomic\([^)]*\)|_Atomic\s+\w+|__typeof__\([^)]*\)|\w+)(?:\s+const)?'
NAME = r'\s+(?:\*\s*(?:const\s+)?)*\w+\s*(?:=(?!=)|[;,\[]|$)'
DECLARATION = re.compile(rf'\s+{QUALIFIER}({TYPE})(?:\s*\{{|{NAME}|\s+\**\(\*)')
STATEMENT = {'return', 'goto', 'case', 'else', 'do', 'if', 'for', 'while', 'switch', 'break', 'continue', 'default'}
BLOCK = re.compile(r'.*(?:\) |\belse |\bdo |: |^\s+)\{\s*$')


def is_declaration(line):
    m = DECLARATION.match(line)
    return bool(m) and m.group(1) not in STATEMENT


def statement_end(code, i):
    """The line on which the statement of line i ends."""
    depth = 0
    while i < len(code):
        depth += sum(code[i].count(c) for c in '([{') - sum(code[i].count(c) for c in ')]}')
        if depth <= 0 and code[i].rstrip().endswith(';'):
            return i
        i += 1
    return i


def after_declarations(code, lines, i):
    """The line after the declarations that begin at line i, or i where there are none."""
    begin = i
    while i < len(code) and is_declaration(code[i]):
        i = statement_end(code, i) + 1
        j = i
        while j < len(code) and lines[j].strip() and not code[j].strip():
            j += 1
        if j > i and j < len(code) and is_declaration(code[j]):
            i = j
    return min(i, len(code) - 1) if i > begin else begin


def blank_lines(text):
    """(line, wanted), lines counted from 0: a blank line is missing before this one, or this one is one too many."""
    lines, code = text.split('\n'), blank(text).split('\n')
    for i, line in enumerate(code[:-1]):
        if line != '{' and not (line.startswith(' ') and BLOCK.match(line)):
            continue
        end = after_declarations(code, lines, i + 1)
        if end == i + 1 or code[end].strip().startswith('}'):
            continue
        if line == '{' and lines[end].strip():
            yield end, True
        elif line != '{' and not lines[end].strip() and not is_declaration(code[end + 1]):
            yield end, False


def fix_blank_lines(text):
    lines = text.split('\n')
    for i, wanted in sorted(blank_lines(text), reverse=True):
        if wanted:
            lines.insert(i, '')
        else:
            del lines[i]
    return '\n'.join(lines)


# ---- width of comments ----

DRAWING = re.compile(r'--+>|<--+|\+--|--\+|[|^]\s|\s[|^]|====')
ARROW = re.compile(r'--(?:[^->]*--)?> +(?!.*--+>)')
COLUMNS = re.compile(r'\S {2,}(?=\S)')
ITEM = re.compile(r'(?:[-*]|\d+[.)]|\(\w\)|\w\)) +')
SHORT = 25  # a last line shorter than that gets more words
NO_FIRST_WORD = re.compile(r'[-*+=|<>/]')


def wide_lines(text):
    """Lines, counted from 0, on which a comment passes the width."""
    lines = text.split('\n')
    if max(map(len, lines)) <= WIDTH:
        return []
    wide = set()
    for begin, end in comments(text):
        first = line_of(text, begin) - 1
        for i, part in enumerate(text[begin:end].split('\n')):
            column = begin - text.rfind('\n', 0, begin) - 1 if i == 0 else 0
            if column + len(part) > WIDTH:
                wide.add(first + i)
    return sorted(wide)


def hang(line):
    """The column at which a line's text goes on in the next one; None for a drawing."""
    arrows = DRAWING.findall(line)
    if arrows:
        return ARROW.search(line).end() if arrows == ['-->'] else None
    indent = len(line) - len(line.lstrip())
    gaps = list(COLUMNS.finditer(line, indent))
    if gaps:
        return gaps[0].end() if len(gaps) == 1 else None
    item = ITEM.match(line, indent)
    return item.end() if item else indent


def split(line, room, at):
    """(the part that fits, the rest), or None if no word that could begin a line follows column at within the room."""
    space = line.rfind(' ', at, room + 1)
    while space > at and NO_FIRST_WORD.match(line, space + 1):
        space = line.rfind(' ', at, space)
    return (line[:space].rstrip(), line[space:].strip()) if space > at else None


def goes_on(line, following, at, room):
    """Is the following line the same paragraph? A line that ends early was broken on purpose."""
    text = following.lstrip()
    if not text or len(following) - len(text) != at:
        return False
    if ITEM.match(text) or COLUMNS.search(text) or DRAWING.search(text):
        return False
    return len(line) + 1 + len(text.split()[0]) > room - 20


def wrap(content, room):
    """The lines of a comment's text, none wider than room; a longer one continues in the next line of its paragraph."""
    out, todo = [], list(content)
    while todo:
        line = todo.pop(0)
        at = hang(line) if len(line) > room else None
        parts = split(line, room, at) if at is not None else None
        if not parts:
            out.append(line)
            continue
        fits, rest = parts
        if todo and goes_on(line, todo[0], at, room):
            rest += ' ' + todo.pop(0).strip()
        elif len(rest) < SHORT:
            fits, rest = split(line, room - SHORT, at) or parts
        out.append(fits)
        todo.insert(0, ' ' * at + rest)
    return out


def content_of(comment):
    """The text of a comment, line by line, without its marks."""
    first, *others = comment[2:-2].split('\n')
    lines = [first.strip(), *(re.sub(r'^\s*\* ?', '', line).rstrip() for line in others)]
    while lines and not lines[0]:
        lines.pop(0)
    while lines and not lines[-1]:
        lines.pop()
    return lines


def block(content, indent):
    """A comment of its own, as lines."""
    margin = ' ' * indent
    if len(content) == 1 and indent + len(content[0]) + 6 <= WIDTH:
        return f'{margin}/* {content[0]} */'
    body = [f'{margin} * {line}'.rstrip() for line in wrap(content, WIDTH - indent - 3)]
    return '\n'.join([f'{margin}/*', *body, f'{margin} */'])


def beside_code(text, begin, end):
    """A wide comment beside code moves above it: (where it goes, all up to its end)."""
    above = text.rfind('\n', 0, begin) + 1
    while above and not re.search(r'(?:[;,{}]|\*/)\s*\Z|^\s*#.*\n\Z', text[:above], re.M):
        above = text.rfind('\n', 0, above - 1) + 1
    indent = len(re.match(r' *', text[above:]).group())
    content = ' '.join(line.strip() for line in content_of(text[begin:end]))
    return above, f'{block([content], indent)}\n{text[above:begin].rstrip()}'


def fix_width(text):
    for begin, end in reversed(comments(text)):
        line_begin = text.rfind('\n', 0, begin) + 1
        in_macro = text[end:].split('\n', 1)[0].endswith('\\')
        if max(map(len, text[line_begin:end].split('\n'))) <= WIDTH or in_macro:
            continue
        if text[line_begin:begin].strip():
            line_begin, new = beside_code(text, begin, end)
        else:
            new = block(content_of(text[begin:end]), begin - line_begin)
        text = text[:line_begin] + new + text[end:]
    return text


# ---- all ----

def check(path, text):
    for i, wanted in blank_lines(text):
        yield f'{path}:{i + 1}: ' + ('a blank line follows the declarations of a function' if wanted else
                                     'no blank line follows the declarations of an inner block')
    for i in wide_lines(text):
        yield f'{path}:{i + 1}: a comment passes column {WIDTH}'


def main():
    if sys.argv[1:] == ['--fix']:
        for path, text in c_files():
            fixed = fix_blank_lines(fix_width(text))
            if fixed != text:
                (ROOT / path).write_text(fixed, encoding='utf-8')
    wrong = [line for path, text in c_files() for line in check(path, text)]
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == '__main__':
    sys.exit(main())
