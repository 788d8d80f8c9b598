# SPDX-License-Identifier: Apache-2.0
"""The picture of a terminal in the README is what its script draws today."""
import re
import subprocess
import sys
import xml.etree.ElementTree

from conftest import ROOT, SECONDS_MAX


def lines_of(path):
    """Its text, without numbers that depend on the file system below."""
    root = xml.etree.ElementTree.parse(path).getroot()
    return [re.sub(r'[\d.]+ [KMG]?i?B', 'SIZE', ''.join(t.itertext())) for t in root.iter('{http://www.w3.org/2000/svg}text')]


def test_the_script_draws_it_again(tmp_path):
    subprocess.run([sys.executable, ROOT / 'docs/recording.py', tmp_path / 'again.svg'], check=True, timeout=SECONDS_MAX)
    kept = ROOT / 'docs/recording.svg'
    assert lines_of(tmp_path / 'again.svg') == lines_of(kept)
    text = lines_of(kept)
    assert text.count('3') == 1 and any('store.img: clean' in line for line in text) and any('kill -9' in line for line in text)
    assert '](docs/recording.svg)' in (ROOT / 'README.md').read_text() and kept.stat().st_size < 200 << 10
