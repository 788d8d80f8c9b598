# SPDX-License-Identifier: Apache-2.0
"""What a user may give to a vault by mistake, or a server may do: each is named, and nothing that existed changes."""
import contextlib
import http.server
import os
import shutil
import struct
import subprocess
import threading

import pytest

from conftest import run
from engines import NAMES, S3, end, started
from test_archive import archive, restore, small, vault  # noqa: F401 (fixtures)
from test_roots import command
from test_step_streams import digest, make_model
from test_vault_follow import job_of, new_vault
from trees import describe

import engine as engines
import errors
import scheme_s3
from sums import sum64


def changed(data, at, value):
    """An object whose header has another number there, and the right sum."""
    data = bytearray(data)
    struct.pack_into('<I', data, at, value)
    struct.pack_into('<Q', data, 56, sum64(bytes(data[:56])))
    return data


@pytest.mark.parametrize('at, value, why', [(8, 2, 'it has version 2, and this program reads version 1'),
                                            (16, 1, 'features that this program does not know: 0x1'),
                                            (24, 7, 'it is of another vault')])
def test_objects_of_another_version_or_vault_are_refused_by_name(small, at, value, why):
    _, b, folder, objects = small
    for name in objects:
        kind = os.path.relpath(name, folder).split('/')
        if kind[0] in ('lease', 'seg') or at == 24 and kind[0] == 'vault' or 'head' in kind and name != max(n for n in objects if '/head/' in n):
            continue        # a restore reads blocks of segments, and no lease; the highest vault/N is what others are compared with
        with open(name, 'r+b') as f:
            data = f.read()
            f.seek(0)
            f.write(changed(data, at, value))
        done = restore(f'{folder}/job', b / 'new', check=False)
        says = 'it is not the one that job job lists' if 'step' in kind else why     # its head has the sum of the whole object
        assert done.returncode == 1 and says in done.stderr and os.path.relpath(name, folder) in done.stderr, done.stderr
        assert not os.listdir(b)
        with open(name, 'wb') as f:
            f.write(data)
    restore(f'{folder}/job', b / 'new')


def test_a_job_that_was_copied_into_another_vault_is_refused(small, tmp_path):
    root, b, folder, _ = small
    other = tmp_path / 'other'
    run('hitrainctl', 'vault', 'init', other)
    shutil.copytree(folder / 'job', other / 'job')
    shutil.copytree(folder / 'seg', other / 'seg')
    for words in (('restore', f'{other}/job', b / 'new'), ('vault', 'list', other), ('vault', 'verify', other), ('vault', 'gc', other),
                  ('archive', root, '1', f'{other}/job')):
        done = run('hitrainctl', *words, check=False)
        assert done.returncode == 1 and 'it is of another vault' in done.stderr, (words, done.stderr)
    assert not os.listdir(b) and sorted(os.listdir(other / 'seg')) == sorted(os.listdir(folder / 'seg'))


def test_a_restore_over_something_that_is_there_changes_nothing(small):
    _, b, folder, _ = small
    (b / 'empty').mkdir()
    (b / 'full').mkdir()
    (b / 'full/w').write_bytes(b'mine')
    (b / 'file').write_bytes(b'mine')
    os.symlink('nowhere', b / 'link')
    before = describe(b)
    for name in 'empty', 'full', 'file', 'link':
        for words in (), ('--cold',):
            done = restore(f'{folder}/job', b / name, *words, check=False)
            assert done.returncode == 1 and 'is there already' in done.stderr, (name, done.stderr)
        done = run('hitrainctl', 'restore', f'{folder}/job', b / name, '--follow', check=False, timeout=60)
        assert done.returncode == 1 and done.stderr, name
    assert describe(b) == before


def test_names_of_jobs_with_dots_are_no_paths_and_no_prefixes(stores, vault):
    _, (a, b) = stores
    root = make_model(a / 'model', elements=5000)
    command(root, 'snapshot')
    for job in 'a.b', 'a', '..a', 'a..':
        archive(root, '0', f'{vault}/{job}')
    assert sorted(os.listdir(vault / 'job')) == ['..a', 'a', 'a..', 'a.b']
    run('hitrainctl', 'vault', 'forget', f'{vault}/a', '0')
    assert restore(f'{vault}/a.b', b / 'x')['digest'] == digest(root, '0')
    for job in '.', '..', '...', 'a%2fb', 'a b', 'x' * 65:
        done = run('hitrainctl', 'archive', root, '0', f'{vault}/{job}', check=False)
        assert done.returncode in (1, 2) and 'job' in done.stderr and 'Traceback' not in done.stderr, (job, done.stderr)
    assert len(os.listdir(vault / 'job')) == 4 and len(os.listdir(vault.parent)) == 1


@pytest.mark.parametrize('url, why', [('nobody://x/job', 'no program hitrain-vault-nobody'), ('s3:///v/job', 'expected s3://BUCKET'),
                                      ('rados://p/job', ''), ('ssh://nohost.invalid/v/job', 'nohost.invalid'), ('file://host/v/job', ''),
                                      ('/nothing/at/all/job', 'nothing')])
def test_a_url_that_leads_nowhere_is_named_and_shows_no_traceback(stores, url, why):
    _, (a, b) = stores
    root = make_model(a / 'model', elements=5000)
    command(root, 'snapshot')
    for words in (('archive', root, '0', url), ('restore', url, b / 'new'), ('vault', 'list', url), ('steps', root, f'--vault={url}')):
        done = run('hitrainctl', *words, check=False, timeout=120)
        assert done.returncode in (1, 2) and 'hitrainctl: error: ' in done.stderr and why in done.stderr, (words, done.stderr)
        assert 'Traceback' not in done.stderr, done.stderr
    assert not os.listdir(b) and os.listdir(root / '.hitrain/snap') == ['0']


# ---- S3 ----

s3_only = pytest.mark.skipif('s3' not in NAMES, reason='not selected')

KEYS = """import boto3, json
iam = boto3.client("iam", endpoint_url="http://127.0.0.1:{port}")
iam.create_user(UserName="u")
iam.put_user_policy(UserName="u", PolicyName="all", PolicyDocument=json.dumps(
    {{"Version": "2012-10-17", "Statement": [{{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}}]}}))
key = iam.create_access_key(UserName="u")["AccessKey"]
print(key["AccessKeyId"], key["SecretAccessKey"])
"""


@s3_only
def test_credentials_that_expire_are_taken_anew_from_their_file(tmp_path, monkeypatch):
    """An archiver runs for weeks, and a program beside it renews its credentials."""
    import subprocess
    s3 = S3(tmp_path, INITIAL_NO_AUTH_ACTION_COUNT='4')      # bucket, user, policy and key
    try:
        keys = subprocess.run([s3.python, '-c', KEYS.format(port=s3.port)], env={**os.environ, **s3.env}, stdout=subprocess.PIPE, text=True,
                              check=True).stdout.split()
        file = tmp_path / 'credentials'

        def write(secret):
            file.write_text(f'[default]\naws_access_key_id = {keys[0]}\naws_secret_access_key = {secret}\n')
        for key, value in s3.env.items():
            monkeypatch.setenv(key, value)
        monkeypatch.delenv('AWS_ACCESS_KEY_ID')
        monkeypatch.delenv('AWS_SECRET_ACCESS_KEY')
        monkeypatch.setenv('AWS_SHARED_CREDENTIALS_FILE', str(file))
        write(keys[1])
        with engines.open(s3.url('v'), timeout=60) as v:
            assert v.put_new('a', b'1')
            pid = v.program.child.pid
            write('another')
            v.program.child.kill()
            with pytest.raises(errors.Refused, match='AWS_PROFILE'):
                v.put_new('b', b'2')
            write(keys[1])
            with contextlib.suppress(errors.Refused):
                v.put_new('b', b'2')
            assert v.put_new('c', b'3') and v.get('a') == b'1' and v.program.child.pid != pid
    finally:
        end(s3.server)


@s3_only
def test_an_archive_that_loses_its_bucket_ends_by_name_and_the_store_has_its_step(tmp_path, make_store):
    root = make_model(make_store().mount() / 'model', elements=5000)
    command(root, 'snapshot')
    with started('s3', tmp_path) as s3:
        url = new_vault(s3)
        run('hitrainctl', 'archive', root, '0', job_of(url))
        s3.bucket('delete')
        for words in (('archive', root, '0', job_of(url)), ('restore', job_of(url), root.parent / 'new'), ('vault', 'gc', url)):
            done = run('hitrainctl', *words, check=False, timeout=120)
            assert done.returncode == 1 and 'there is no bucket vaults' in done.stderr, done.stderr
    assert os.listdir(root / '.hitrain/snap') == ['0'] and not (root.parent / 'new').exists()


class Refusing(http.server.BaseHTTPRequestHandler):
    """A server that refuses each request in this way."""
    code = ''

    def do_GET(self):
        body = f'<?xml version="1.0"?><Error><Code>{self.code}</Code><Message>m</Message></Error>'.encode()
        self.send_response(403)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *unused):
        pass


@s3_only
@pytest.mark.parametrize('code, why', [('RequestTimeTooSkewed', 'set the clock of this one'), ('ExpiredToken', 'ExpiredToken: give its program'),
                                       ('SomethingNew', 'SomethingNew: give its program')])
def test_a_server_that_refuses_says_what_helps(tmp_path, monkeypatch, code, why):
    with started('s3', tmp_path):     # for its environment
        server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), type('Says', (Refusing,), {'code': code}))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            done = run('hitrainctl', 'vault', 'list', f's3://b/v?endpoint=http://127.0.0.1:{server.server_port}', check=False)
            assert done.returncode == 1 and why in done.stderr, done.stderr
        finally:
            server.shutdown()


def test_a_million_objects_of_others_do_not_hide_those_of_a_vault():
    """Each page has objects that are no part of a vault, but the last one."""
    pages, asked = 1200, []

    class Date:
        @staticmethod
        def timestamp():
            return 0

    def page(StartAfter='', **_):
        asked.append(StartAfter)
        last = len(asked) == pages
        names = ['z/key'] if last else [f'other files/{len(asked):06} {i}' for i in range(3)]
        return {'Contents': [{'Key': f'p/{n}', 'Size': 1, 'LastModified': Date} for n in names], 'IsTruncated': not last,
                'ResponseMetadata': {}}
    s3 = object.__new__(scheme_s3.S3)
    s3.bucket, s3.prefix, s3.client = 'b', 'p/', type('Client', (), {'list_objects_v2': staticmethod(lambda Bucket, Prefix, **w: page(**w))})
    assert s3.list('', '', float('inf')) == ([('z/key', 1, 0)], False)
    assert len(asked) == pages == len(set(asked))
