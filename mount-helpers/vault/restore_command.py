# SPDX-License-Identifier: Apache-2.0
"""hitrainctl restore URL/JOB[@STEP]|- DIR: a new model root, from a vault or a pipe."""
import os
import sys

from restore import from_pipe, report
import words


def run(given):
    paths, o = words.parse(given, 2, 2, 'the URL of a job or -, and a new directory', base=words.text, json=None)
    url, path = paths
    if url == '-':
        if os.isatty(0):
            raise words.Usage('restore - reads a step from a file or a pipe, and standard input is a terminal')
        report(path, from_pipe(path, o['base']), o['json'], sys.stdout)
        return
    raise words.Usage(f'{url}: no vault')
