# SPDX-License-Identifier: Apache-2.0
"""hitrainctl restore URL/JOB[@STEP]|- DIR: a new model root, from a vault or a pipe."""
import importlib
import os
import sys

from restore import from_job, from_pipe, report
import engine
import jobs
import words


def run(given):
    paths, o = words.parse(given, 2, 2, 'the URL of a job or -, and a new directory', base=words.text, json=None,
                           follow=None, rank=words.rank)
    url, path = paths
    if o['follow']:
        return importlib.import_module('follow').run_restore(url, path, o)
    if url == '-':
        if os.isatty(0):
            raise words.Usage('restore - reads a step from a file or a pipe, and standard input is a terminal')
        report(path, from_pipe(path, o['base']), o['json'], sys.stdout)
        return
    place, job, step = engine.split_job(url)
    with engine.open(place) as e:
        report(path, from_job(path, e, jobs.open_vault(e), job, step, o['base']), o['json'], sys.stdout)
