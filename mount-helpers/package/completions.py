#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Completions of bash and zsh: completions.py FOLDER OUT makes them from what the programs in FOLDER print for --help, which
comes from their option tables. OUT/bash/PROGRAM is one for each program, OUT/zsh/_hitrain is one for all.
"""
import pathlib
import re
import subprocess
import sys

PROGRAMS = 'hitrain', 'mkfs.hitrain', 'mount.hitrain', 'umount.hitrain', 'hitrain-fsck', 'hitrainctl'
OPTION = re.compile(r'(?<![\w-])(--?[A-Za-z][\w-]*)(=?)')

BASH_SIMPLE = '''# Made from {program} --help.
_{name}() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} head=
    COMPREPLY=()
    if [[ $prev == -o && -n "{mount}" ]]; then
        [[ $cur == *,* ]] && head=${{cur%,*}},
        compopt -o nospace
        mapfile -t COMPREPLY < <(compgen -P "$head" -W "{mount}" -- "${{cur##*,}}")
    elif [[ $cur == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "{options}" -- "$cur")
        [[ ${{COMPREPLY[0]-}} == *= ]] && compopt -o nospace
    else
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -f -- "$cur")
    fi
    return 0
}}
complete -F _{name} {names}
'''
BASH_COMMANDS = '''# Made from hitrainctl --help.
_hitrainctl() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} options= verbs=
    COMPREPLY=()
    case ${{COMP_WORDS[1]-}} in
{cases}
    esac
    if [[ $COMP_CWORD == 1 ]]; then
        mapfile -t COMPREPLY < <(compgen -W "{commands} --help --version" -- "$cur")
    elif [[ $cur == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$options --help" -- "$cur")
        [[ ${{COMPREPLY[0]-}} == *= ]] && compopt -o nospace
    elif [[ $COMP_CWORD == 2 && -n $verbs ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$verbs" -- "$cur")
    else
        compopt -o filenames
        mapfile -t COMPREPLY < <(compgen -f -- "$cur")
    fi
    return 0
}}
complete -F _hitrainctl hitrainctl
'''
ZSH = '''#compdef {names}
# Made from what the programs print for --help.
local -a options verbs
case $service in
{programs}
hitrainctl)
    if (( CURRENT == 2 )); then
        compadd -- {commands} --help --version
        return
    fi
    case $words[2] in
{cases}
    esac
    options+=(--help)
    if (( CURRENT == 3 && $#verbs )); then
        compadd -- $verbs
        return
    fi
    ;;
esac
if [[ $PREFIX == -* ]]; then
    compadd -- $options
else
    _files
fi
'''


def help_of(folder, *command):
    return subprocess.run([folder / command[0], *command[1:], '--help'], stdout=subprocess.PIPE, check=True, text=True,
                          timeout=60).stdout


def options_of(text):
    """Those in the synopsis and at the beginning of lines; -abc in brackets is three options."""
    found = {}
    usage, _, rest = text.partition('\n\n')
    for letters in re.findall(r'\[-([a-zA-Z]{2,})\]', usage):
        found.update({f'-{c}': '' for c in letters})
    usage = re.sub(r'\[-[a-zA-Z]{2,}\]', '', usage)
    begins = '\n'.join(re.match(r' *(.*?)(?:  |$)', line).group(1) for line in rest.splitlines() if line.startswith('  -'))
    for name, value in OPTION.findall(usage + '\n' + begins):
        if value or name not in found:
            found[name] = value
    return sorted(n + v for n, v in found.items())


def mount_options(text):
    part = text.partition('\nOptions:\n')[2]
    words = [re.match(r'  (\w+)(=?)', line) for line in part.splitlines()]
    kernel = re.search(r'for the kernel: (.*)', part)
    return [''.join(w.groups()) for w in words if w] + (kernel.group(1).split() if kernel else [])


def commands_of(folder):
    """name -> (verbs, options)"""
    commands = {}
    for name, usage in re.findall(r'^  ([a-z-]+) (.*)$', help_of(folder, 'hitrainctl'), re.M):
        verbs = re.match(r'([a-z]+(?:\|[a-z]+)+) ', usage)
        commands[name] = (verbs.group(1).split('|') if verbs else [],
                          [n + v for n, v in OPTION.findall(usage) if n.startswith('--')])
    return commands


def main():
    folder, out = map(pathlib.Path, sys.argv[1:])
    (out / 'bash').mkdir(parents=True, exist_ok=True)
    (out / 'zsh').mkdir(parents=True, exist_ok=True)
    mount = ' '.join(mount_options(help_of(folder, 'hitrain')))
    simple = {}
    for program in PROGRAMS[:-1]:
        options = ' '.join(options_of(help_of(folder, program)))
        names = f'{program} fsck.hitrain' if program == 'hitrain-fsck' else program
        simple[program] = names, options
        (out / 'bash' / program).write_text(BASH_SIMPLE.format(
            program=program, name=re.sub(r'\W', '_', program), names=names, options=options,
            mount=mount if program in ('hitrain', 'mount.hitrain') else ''))
    commands = commands_of(folder)
    bash_cases = '\n'.join(f'    {n}) verbs="{" ".join(v)}" options="{" ".join(o)}" ;;' for n, (v, o) in commands.items())
    zsh_cases = '\n'.join(f'    {n}) verbs=({" ".join(v)}) options=({" ".join(o)}) ;;' for n, (v, o) in commands.items())
    (out / 'bash/hitrainctl').write_text(BASH_COMMANDS.format(cases=bash_cases, commands=' '.join(commands)))
    (out / 'zsh/_hitrain').write_text(ZSH.format(
        names=' '.join(n for n, _ in simple.values()) + ' hitrainctl', cases=zsh_cases, commands=' '.join(commands),
        programs='\n'.join(f'{n.replace(" ", "|")}) options=({o}) ;;' for n, o in simple.values())))


if __name__ == '__main__':
    main()
