# SPDX-License-Identifier: Apache-2.0
"""hitrainctl restore URL/JOB[@STEP]|- DIR: a new model root, from a vault or a pipe, or with --cold one whose content stays there."""
import contextlib
import importlib
import os
import sys

import engine
import jobs
import words


@contextlib.contextmanager
def opened(place, name):
    """The engine of a place, and a module. The program of the engine starts while Python loads that."""
    with engine.open(place) as e:
        e.start()
        yield e, importlib.import_module(name)


def run(given):
    paths, o = words.parse(given, 2, 2, 'the URL of a job or -, and a new directory', base=words.text, json=None,
                           follow=None, rank=words.rank, shard=words.rank, lost=words.number, cold=None)
    url, path = paths
    if o['lost'] is not None and not o['shard']:
        raise words.Usage('--lost is for --shard=rofR')
    if o['shard'] and (o['follow'] or url == '-'):
        raise words.Usage('--shard is for a step in a vault, without --follow')
    if o['cold'] and (o['follow'] or o['shard'] or o['base'] or url == '-'):
        raise words.Usage('--cold is for a step in a vault, without --follow, --shard and --base')
    if o['follow']:
        return importlib.import_module('follow').run_restore(url, path, o)
    if o['rank'] and (url == '-' or o['shard']):
        raise words.Usage('--rank is for a vault, and without --shard')
    if url == '-':
        if os.isatty(0):
            raise words.Usage('restore - reads a step from a file or a pipe, and standard input is a terminal')
        restore = importlib.import_module('restore')
        restore.report(path, restore.from_pipe(path, o['base']), o['json'], sys.stdout)
        return
    if o['shard']:
        return shard_from_vault(url, path, o)
    if o['cold']:
        return cold_from_vault(url, path, o)
    from_vault(url, path, o)


def shard_from_vault(url, path, o):
    place, job, step = engine.split_job(url)
    with opened(place, 'elastic') as (e, elastic):
        vault = jobs.open_vault(e)
        chain = jobs.chain_of(e, vault, job, step)
        done = elastic.from_chain(path, e, vault, job, chain, o['shard'], o['lost'], o['base'])
    elastic.report(path, done, o['json'], sys.stdout)


def cold_from_vault(url, path, o):
    place, job, step = engine.split_job(url)
    with opened(place, 'cold') as (e, cold):
        done, cold_bytes = cold.from_vault(path, e, jobs.open_vault(e), job, step, o['rank'] or (0, 1))
    cold.report(path, done, cold_bytes, o['json'])


def from_vault(url, path, o):
    """To a logged step lead the full one before it and the logged ones between."""
    place, job, step = engine.split_job(url)
    with opened(place, 'restore') as (e, restore):
        vault = jobs.open_vault(e)
        done = restore.from_chain(path, e, vault, job, jobs.chain_of(e, vault, job, step), o['base'], o['rank'] or (0, 1))
    restore.report(path, done, o['json'], sys.stdout)
