# SPDX-License-Identifier: Apache-2.0
"""hitrainctl metrics: over HTTP, as a file, and what the dashboard and the alert rules ask for."""
import contextlib
import http.client
import json
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request

import pytest

from calls import sync
from conftest import BIN, ROOT, SECONDS_MAX, run, wait_for
from models import new_model

MONITORING = ROOT / 'mount-helpers/monitoring'
OPENMETRICS = {'Accept': 'application/openmetrics-text;version=1.0.0,text/plain;q=0.5'}


@contextlib.contextmanager
def server(point, at='127.0.0.1:0'):
    program = subprocess.Popen([BIN / 'hitrainctl', 'metrics', point, f'--listen={at}'], stderr=subprocess.PIPE, text=True)
    try:
        line = program.stderr.readline()
        yield int(re.search(r'http://127\.0\.0\.1:(\d+)/metrics', line).group(1))
        assert program.poll() is None
    finally:
        program.kill()
        program.wait()
        program.stderr.close()


def get(port, target='/metrics', method='GET', headers={}):
    c = http.client.HTTPConnection('127.0.0.1', port, timeout=SECONDS_MAX)
    c.request(method, target, headers=headers)
    answer = c.getresponse()
    body = answer.read().decode()
    c.close()
    return answer.status, answer.headers['Content-Type'], body


def model(mnt):
    path = new_model(mnt / 'model', 'adamw lr=0.5')
    (path / 'w').write_bytes(bytes(4096))
    (path / '.hitrain/grad/w').write_bytes(bytes(4096))
    run('hitrainctl', 'commit', path)


def names(text):
    """Of the samples; and in the text format each sample follows the TYPE of its own name."""
    return {re.match(r'\w+', line).group() for line in text.splitlines() if line[:1] != '#'}


def test_over_http(store):
    model(store.point)
    with server(store.point) as port:
        status, kind, plain = get(port)
        assert status == 200 and kind.startswith('text/plain; version=0.0.4')
        types = dict(re.findall(r'^# TYPE (\w+) (\w+)$', plain, re.M))
        assert set(types.values()) == {'gauge', 'counter'} and names(plain) <= set(types)
        assert set(re.findall(r'^# HELP (\w+) ', plain, re.M)) == set(types) and '# EOF' not in plain
        status, kind, full = get(port, headers=OPENMETRICS)
        assert status == 200 and kind.startswith('application/openmetrics-text') and full.endswith('# EOF\n')
        assert names(full) == names(plain) and 'hitrain_step{root="/model"} ' in full
        assert get(port, '/')[0] == 200 and get(port, '/x')[0] == 404 and get(port, method='POST')[0] == 405
        assert get(port, method='HEAD')[2] == ''
        store.kill()
        assert get(port)[0] == 503  # and it goes on
        store.detach()
        store.mount()
        assert get(port)[0] == 200


def test_clients_that_do_everything_wrong(store):
    with server(store.point) as port:
        silent = socket.create_connection(('127.0.0.1', port))
        for data in b'\x16\x03\x01\x02\x00\r\n\r\n', b'GET\r\n\r\n', b'x' * 20000, b'GET /metrics HTTP/1.1\r\n':
            with contextlib.suppress(OSError), socket.create_connection(('127.0.0.1', port)) as s:
                s.sendall(data)
        assert get(port)[0] == 200
        silent.close()


def test_a_port_in_use_and_wrong_words(store, tmp_path):
    with socket.create_server(('127.0.0.1', 0)) as s:
        done = run('hitrainctl', 'metrics', store.point, f'--listen=127.0.0.1:{s.getsockname()[1]}', check=False)
        assert done.returncode == 1 and 'another port' in done.stderr
    for args in ['--listen=x'], ['--listen='], ['--listen=:1', '--watch=1'], ['--textfile='], ['--json']:
        assert run('hitrainctl', 'metrics', store.point, *args, check=False).returncode == 2, args
    assert run('hitrainctl', 'metrics', store.point, '--listen=192.0.2.1:1', check=False).returncode == 1
    done = run('hitrainctl', 'metrics', tmp_path, check=False)
    assert done.returncode == 1 and 'not on a hitrain mount' in done.stderr


def test_as_a_file(store, tmp_path):
    path = tmp_path / 'hitrain.prom'
    run('hitrainctl', 'metrics', store.point, f'--textfile={path}')
    text = path.read_text()
    assert 'hitrain_total_bytes ' in text and '# EOF' not in text and path.stat().st_mode & 0o777 == 0o644
    assert run('hitrainctl', 'metrics', store.point).stdout.endswith('# EOF\n')
    writer = subprocess.Popen([BIN / 'hitrainctl', 'metrics', store.point, f'--textfile={path}', '--watch=0.05'])
    first = path.stat().st_ino
    wait_for(lambda: path.stat().st_ino != first, 'a new file')
    for _ in range(50):  # never half a file
        now = path.read_text()
        assert names(now) >= names(text) and now.endswith('\n')
    writer.terminate()
    writer.wait(SECONDS_MAX)
    assert [p.name for p in tmp_path.iterdir() if p.name != 'hitrain.prom'] in ([], [p.name for p in tmp_path.glob('hitrain.prom.*')])
    done = run('hitrainctl', 'metrics', store.point, f'--textfile={tmp_path}/none/x', check=False)
    assert done.returncode == 1 and 'cannot be written' in done.stderr


def expressions():
    dashboard = json.loads((MONITORING / 'grafana.json').read_text())
    of_panels = [t['expr'] for p in dashboard['panels'] for t in p['targets']]
    of_alerts = re.findall(r'^ +expr: (.*)$', (MONITORING / 'alerts.yaml').read_text(), re.M)
    assert len(of_panels) > 20 and len(of_alerts) > 8
    return of_panels, of_alerts


def test_dashboard_and_alerts_ask_for_metrics_that_exist(store):
    model(store.point)
    for i in range(40):  # rates of a device are known after 16 MiB
        (store.point / f'{i}').write_bytes(bytes(1 << 20))
    sync(store.point)
    for i in range(40):
        run('hitrainctl', 'evict', store.point / f'{i}')
        (store.point / f'{i}').read_bytes()
    text = run('hitrainctl', 'metrics', store.point).stdout
    known = names(text)
    labels = {name: set(re.findall(r'(\w+)="', ''.join(re.findall(rf'^{name}{{(.*)}} \S+$', text, re.M)))) for name in known}
    of_panels, of_alerts = expressions()
    for expression in of_panels + of_alerts:
        used = re.findall(r'hitrain_\w+(?=[{\[) ]|$)', re.sub(r'"[^"]*"', '""', expression))
        assert used or 'up{' in expression, expression
        for name in used:
            assert name in known, f'{name} in {expression}'
        for name, selector in re.findall(r'(hitrain_\w+)\{([^}]*)\}', expression):
            asked = set(re.findall(r'(\w+)(?:=|!)', re.sub(r'"[^"]*"', '""', selector))) - {'instance'}
            assert asked <= labels[name], f'{asked} of {name}'
    for panel in json.loads((MONITORING / 'grafana.json').read_text())['panels']:
        for t in panel['targets']:
            for name in re.findall(r'(hitrain_\w+)', t['expr']):
                assert set(re.findall(r'{{(\w+)}}', t['legendFormat'])) <= labels[name] | {'instance'}, t


@pytest.mark.skipif(not shutil.which('prometheus'), reason='make deps-system installs Prometheus')
def test_prometheus_scrapes_them(store, tmp_path):
    model(store.point)
    alerts = MONITORING / 'alerts.yaml'
    subprocess.run(['promtool', 'check', 'rules', alerts], check=True, timeout=SECONDS_MAX)
    for headers in {}, OPENMETRICS:
        with server(store.point) as port:
            text = get(port, headers=headers)[2]
        if not headers:
            done = subprocess.run(['promtool', 'check', 'metrics'], input=text, text=True, capture_output=True, timeout=SECONDS_MAX)
            assert 'error while linting' not in done.stderr + done.stdout, done.stderr
    with server(store.point) as port, socket.create_server(('127.0.0.1', 0)) as s:
        at = f'127.0.0.1:{s.getsockname()[1]}'
        s.close()
        (tmp_path / 'p.yml').write_text(f'''
global: {{scrape_interval: 200ms, evaluation_interval: 200ms}}
rule_files: [{alerts}]
scrape_configs: [{{job_name: hitrain, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}]
''')
        log = open(tmp_path / 'log', 'w')
        program = subprocess.Popen(['prometheus', f'--config.file={tmp_path}/p.yml', f'--storage.tsdb.path={tmp_path}/db',
                                    f'--web.listen-address={at}'], stdout=log, stderr=log)

        def query(expression):
            """Values of a query; None: Prometheus does not answer yet."""
            try:
                with urllib.request.urlopen(f'http://{at}/api/v1/query?{urllib.parse.urlencode({"query": expression})}', timeout=SECONDS_MAX) as f:
                    return [float(r['value'][1]) for r in json.load(f)['data']['result']]
            except OSError:
                return None
        try:
            wait_for(lambda: query('up{job="hitrain"}') == [1.0], 'a scrape')
            wait_for(lambda: query('hitrain_step{root="/model"}'), 'a step')
            assert query('hitrain_total_bytes')[0] == int(re.search(r'^total_bytes +(\d+)', run(
                'hitrainctl', 'stats', store.point).stdout, re.M).group(1))
            for expression in expressions()[1] + expressions()[0]:
                expression = expression.replace('$instance', f'127.0.0.1:{port}').replace('$__rate_interval', '1m')
                assert query(expression) is not None, expression
            store.kill()
            wait_for(lambda: query('up{job="hitrain"}') == [0.0], 'a dead mount is seen')
        finally:
            program.kill()
            program.wait()
            log.close()
