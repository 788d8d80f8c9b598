# SPDX-License-Identifier: Apache-2.0
"""Scheme s3: `s3://BUCKET[/PREFIX][?endpoint=URL][&region=NAME]`, by boto3 (Debian: python3-boto3).

put_new is a PUT with `If-None-Match: *`. Some servers ignore that; `hitrainctl vault probe` finds them. Single PUTs leave no
orphans of uploads in parts. Credentials are those that boto3 finds: environment, ~/.aws, the machine's role. Retries are
the client's (engine.py), which knows that a deed may be done although its answer was lost.
"""
import email.utils
import time
import urllib.parse

from errors import Again, Failed, Full, Missing, NoProgram, NoVault, Refused, TooLarge
import wire

try:
    import boto3
    import botocore.config
    import botocore.exceptions as exceptions
except ImportError as e:
    MISSING_MODULE = e.name
else:
    MISSING_MODULE = None

CONNECT_S, READ_S = 5, 20
REFUSED = {'AccessDenied', 'InvalidAccessKeyId', 'SignatureDoesNotMatch', 'ExpiredToken', 'InvalidToken', 'Forbidden', '403',
           'TokenRefreshRequired', 'AllAccessDisabled', 'AuthorizationHeaderMalformed', 'ExpiredTokenException', '401'}
FULL = {'QuotaExceeded', 'XMinioStorageFull', 'InsufficientStorage', 'ServiceQuotaExceededException', '507'}
CLOCK = {'RequestTimeTooSkewed', 'RequestExpired'}
REMEDY = ('give its program credentials that may read, write, list and delete there: AWS_PROFILE, AWS_ACCESS_KEY_ID and '
          'AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials')


class S3:
    def __init__(self, url):
        parts = urllib.parse.urlsplit(url)
        query = dict(urllib.parse.parse_qsl(parts.query))
        if not parts.netloc or set(query) - {'endpoint', 'region'}:
            raise Failed('expected s3://BUCKET/PREFIX, perhaps with ?endpoint=URL&region=NAME')
        if MISSING_MODULE:
            raise NoProgram(f'Python lacks {MISSING_MODULE}: install python3-boto3, or boto3 with pip')
        self.bucket, self.prefix = parts.netloc, urllib.parse.unquote(parts.path).strip('/')
        self.prefix += '/' if self.prefix else ''
        self.query, self.client = query, self._connect(query)

    def _connect(self, query):
        words = {'connect_timeout': CONNECT_S, 'read_timeout': READ_S, 'max_pool_connections': 64,
                 'retries': {'total_max_attempts': 1}}
        if 'endpoint' in query:
            words['s3'] = {'addressing_style': 'path'}
        try:        # a later botocore sends checksums in trailers, which other servers do not know
            config = botocore.config.Config(request_checksum_calculation='when_required',
                                            response_checksum_validation='when_required', **words)
        except TypeError:
            config = botocore.config.Config(**words)
        try:
            client = boto3.session.Session().client('s3', endpoint_url=query.get('endpoint'),
                                                    region_name=query.get('region'), config=config)
        except (exceptions.BotoCoreError, ValueError) as e:
            raise Failed(f'{e}: name the region in AWS_DEFAULT_REGION or in ?region=') from None
        # Older versions of botocore have no parameter for it.
        client.meta.events.register('before-call.s3.PutObject', only_new)
        return client

    def _do(self, call, **words):
        try:
            return call(Bucket=self.bucket, **words)
        except exceptions.ClientError as e:
            raise self._error(e) from None
        except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError, exceptions.ProfileNotFound,
                exceptions.CredentialRetrievalError, exceptions.TokenRetrievalError) as e:
            raise Refused(f'{type(e).__name__}: {REMEDY}') from None
        except exceptions.ParamValidationError:
            raise Failed(f'{self.bucket} is no name of a bucket') from None
        except (exceptions.BotoCoreError, exceptions.HTTPClientError, OSError) as e:
            raise Again(type(e).__name__) from None

    def _error(self, e):
        code = str(e.response.get('Error', {}).get('Code', ''))
        status = e.response.get('ResponseMetadata', {}).get('HTTPStatusCode', 0)
        if code in ('NoSuchKey', '404'):
            return Missing('no such object')
        if code == 'NoSuchBucket':
            return NoVault(f'there is no bucket {self.bucket}: make it, or name another one')
        if code in CLOCK:
            return Refused('the clocks of this machine and of the server differ too much: set the clock of this one')
        if code in REFUSED or status in (401, 403):
            self.client = self._connect(self.query)     # their file may have other ones by now
            return Refused(f'{code}: {REMEDY}')
        if code in FULL or status == 507:
            return Full(f'{code}: no space there, or the quota is used up')
        if code == 'EntityTooLarge' or status == 413:
            return TooLarge(code)
        if status == 409 or status == 429 or status >= 500:
            return Again(code or f'status {status}')
        return Failed(f'{code} (status {status})')

    def hello(self, deadline):
        self._do(self.client.list_objects_v2, Prefix=self.prefix, MaxKeys=1)
        return wire.OBJECT_BYTES_MAX

    def put_new(self, key, data, deadline):
        """True: made now. The server has no other answer for a key that exists than status 412."""
        try:
            self.client.put_object(Bucket=self.bucket, Key=self.prefix + key, Body=bytes(data))
            return True
        except exceptions.ClientError as e:
            if e.response.get('ResponseMetadata', {}).get('HTTPStatusCode') == 412:
                return False
            raise self._error(e) from None
        except Exception as e:
            return self._do(raiser(e))

    def get(self, key, offset, room, deadline):
        words = {'Range': f'bytes={offset}-{offset + len(room) - 1}'} if len(room) else {}
        try:
            answer = self.client.get_object(Bucket=self.bucket, Key=self.prefix + key, **words)
        except exceptions.ClientError as e:
            if e.response.get('ResponseMetadata', {}).get('HTTPStatusCode') == 416:
                return 0
            raise self._error(e) from None
        except Exception as e:
            self._do(raiser(e))
        if offset and not answer.get('ContentRange', '').startswith(f'bytes {offset}-'):
            raise Failed('it does not keep to a Range')
        return self._read(answer['Body'], min(len(room), answer['ContentLength']), room)

    @staticmethod
    def _read(body, length, room):
        done = 0
        try:
            while done < length:
                part = body.read(min(1 << 20, length - done))
                if not part:
                    raise Again('the connection ended')
                room[done:done + len(part)] = part
                done += len(part)
        except (exceptions.BotoCoreError, exceptions.HTTPClientError, OSError) as e:
            raise Again(type(e).__name__) from None
        finally:
            body.close()
        return done

    def list(self, prefix, after, deadline):
        while True:
            words = {'StartAfter': self.prefix + after} if after else {}
            answer = self._do(self.client.list_objects_v2, Prefix=self.prefix + prefix, **words)
            now = server_time(answer)
            found = [(o['Key'][len(self.prefix):], o['Size'], now - o['LastModified'].timestamp() if now else 0)
                     for o in answer.get('Contents', ())]
            # Others may keep objects under the prefix, which are no keys of a vault.
            entries = [e for e in found if wire.is_key(e[0]) and e[0] > after]
            if entries or not found or not answer['IsTruncated']:
                return entries, answer['IsTruncated']
            if time.monotonic() > deadline:
                raise Again('many objects there are no part of a vault')
            after = found[-1][0]

    def remove(self, key, deadline):
        self._do(self.client.delete_object, Key=self.prefix + key)


def only_new(params, **_):
    params['headers']['If-None-Match'] = '*'


def raiser(error):
    def call(**_):
        raise error
    return call


def server_time(answer):
    """The server's clock by its Date; 0: it has sent none, and all is young."""
    date = answer['ResponseMetadata'].get('HTTPHeaders', {}).get('date', '')
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return 0


open_scheme = S3
