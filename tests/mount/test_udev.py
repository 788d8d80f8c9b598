# SPDX-License-Identifier: Apache-2.0
"""What a rule of udev imports about a store, and that the rule uses just that."""
import re

from conftest import ROOT, run

KEY = re.compile(r'ID_FS_[A-Z_]+=[ -~]+')


def imported(device):
    done = run('hitrainctl', 'features', '--udev', device)
    lines = done.stdout.splitlines()
    assert all(KEY.fullmatch(line) for line in lines), lines
    return dict(line.split('=', 1) for line in lines)


def test_type_uuid_and_label(tmp_path):
    image = tmp_path / 'image'
    run('mkfs.hitrain', '--size=8M', '--label=a b/"$x', image)
    found = imported(image)
    uuid = re.search(r'store ([0-9a-f-]{36})', run('hitrainctl', 'features', image).stdout).group(1)
    assert found['ID_FS_TYPE'] == 'hitrain' and found['ID_FS_USAGE'] == 'filesystem' and found['ID_FS_VERSION'] == '3'
    assert found['ID_FS_UUID'] == found['ID_FS_UUID_ENC'] == uuid
    assert re.fullmatch(r'(?:[A-Za-z0-9#+.:=@_-]|\\x[0-9a-f]{2})+', found['ID_FS_LABEL_ENC'])
    assert ' ' not in found['ID_FS_LABEL'] and found['ID_FS_LABEL'].startswith('a_b')
    run('mkfs.hitrain', '--size=8M', tmp_path / 'plain')
    assert not [key for key in imported(tmp_path / 'plain') if 'LABEL' in key]


def test_what_is_no_store(tmp_path):
    (tmp_path / 'zeros').write_bytes(bytes(1 << 20))
    for path in tmp_path / 'zeros', tmp_path / 'none', '/dev/null':
        done = run('hitrainctl', 'features', '--udev', path, check=False)
        assert done.returncode == 1 and not done.stdout


def test_the_rule(tmp_path):
    rule = (ROOT / 'mount-helpers/udev/62-hitrain.rules').read_text()
    assert 'hitrainctl features --udev $devnode' in rule
    run('mkfs.hitrain', '--size=8M', '--label=x', tmp_path / 'image')
    keys = imported(tmp_path / 'image')
    assert set(re.findall(r'\$env\{(\w+)\}', rule)) == {'ID_FS_UUID_ENC', 'ID_FS_LABEL_ENC'} <= keys.keys()
    assert set(re.findall(r'GOTO="(\w+)"', rule)) == set(re.findall(r'LABEL="(\w+)"', rule)) == {'hitrain_end'}
    # rules of udev give a partition the keys of its disk
    assert 'ENV{DEVTYPE}!="partition", ENV{ID_PART_TABLE_TYPE}=="?*", GOTO="hitrain_end"' in rule
