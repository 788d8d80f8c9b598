# SPDX-License-Identifier: Apache-2.0
"""The daemon has probes for bpftrace and perf where the build found their header, and CONTRIBUTING.md lists them."""
import re
import subprocess

import pytest

from conftest import BIN, ROOT, needs


def test_the_daemon_has_the_probes_that_the_documentation_lists():
    header = '#include <sys/sdt.h>\n'
    if subprocess.run(['cc', '-E', '-'], input=header, text=True, capture_output=True).returncode != 0:
        pytest.skip('systemtap-sdt-dev is not installed')
    needs('readelf')
    notes = subprocess.run(['readelf', '-n', BIN / 'hitrain'], capture_output=True, text=True, check=True).stdout
    found = set(re.findall(r'Provider: hitrain\s+Name: (\w+)', notes))
    table = re.findall(r'^\| `(\w+)` \|', (ROOT / 'CONTRIBUTING.md').read_text(), re.M)
    assert found == set(table) and len(found) == 10
