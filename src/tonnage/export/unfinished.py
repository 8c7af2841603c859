"""Multipart uploads that a killed run left in a bucket: invisible, and paid for until somebody aborts them.

obstore aborts what fails, and can neither list nor abort what another process began. S3 can be asked in a few words
that are signed as its documentation says; for that the keys must be in the environment. Where they come from elsewhere
(a role of the machine), or the store is another, nothing is done here: a lifecycle rule of the bucket is the way.

Source:
    AWS Signature Version 4; Amazon S3 API, ListMultipartUploads and AbortMultipartUpload.
"""

from __future__ import annotations

import hashlib
import hmac
import html
import http.client
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from tonnage.sources.hanging_up import sigpipe_held_back
from tonnage.sources.limits import Limits
from tonnage.sources.store import endpoint

_LIMIT_BYTES = 8 << 20
_MOST_UPLOADS = 1000
_UPLOAD = re.compile(r"<Upload>(.*?)</Upload>", re.DOTALL)
_FIELD = r"<{0}>([^<]{{1,4096}})</{0}>"
_DEFAULT_REGION = "us-east-1"
_EMPTY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Caller:
    """Who asks, and whom.

    Attributes:
        server: URL of it.
        region: Of the bucket.
        key_id: Public half of the key.
        secret: The other; shown nowhere.
        token: Of a session.
    """

    server: str
    region: str
    key_id: str
    secret: str
    token: str | None


def abort_unfinished(address: str, paths: frozenset[str], limits: Limits) -> int | None:
    """Abort the unfinished uploads of these objects and return how many there were.

    Args:
        address: ``s3://bucket/prefix``.
        paths: Of the objects, relative to it.
        limits: How long the store is waited for.

    Returns:
        ``None`` if it cannot be told: another store than S3, no keys in the environment, or the store does not say.
    """
    caller = _caller()
    if caller is None or not address.startswith("s3://"):
        return None
    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    below = f"{prefix}/" if prefix else ""
    answer = _ask(
        caller, limits, "GET", f"/{bucket}", {"uploads": "", "prefix": below, "max-uploads": f"{_MOST_UPLOADS}"}
    )
    if answer is None:
        return None
    aborted = 0
    for key, upload in _uploads(answer):
        if key.startswith(below) and key.removeprefix(below) in paths:
            done = _ask(caller, limits, "DELETE", f"/{bucket}/{quote(key)}", {"uploadId": upload})
            aborted += done is not None
    return aborted


def _caller() -> Caller | None:
    """Return what the environment says, as obstore reads it."""
    key_id, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if not key_id or not secret:
        return None
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or _DEFAULT_REGION
    server = endpoint() or f"https://s3.{region}.amazonaws.com"
    token = os.environ.get("AWS_SESSION_TOKEN") or os.environ.get("AWS_TOKEN")
    return Caller(server=server, region=region, key_id=key_id, secret=secret, token=token)


def _uploads(answer: str) -> Iterator[tuple[str, str]]:
    """Yield key and name of every upload in a listing."""
    for part in _UPLOAD.findall(answer):
        key, upload = (re.search(_FIELD.format(field), part) for field in ("Key", "UploadId"))
        if key is not None and upload is not None:
            yield html.unescape(key[1]), html.unescape(upload[1])


def _ask(caller: Caller, limits: Limits, method: str, path: str, query: Mapping[str, str]) -> str | None:
    """Return an answer; ``None`` if there is none, or it is a refusal."""
    parts = urlsplit(caller.server)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    words = "&".join(f"{quote(name, safe='')}={quote(query[name], safe='')}" for name in sorted(query))
    target = f"{parts.path.rstrip('/')}{path}"
    connection = kind(parts.hostname or "", parts.port, timeout=limits.connect_seconds)
    try:
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        headers = signed_headers(caller, method, parts.netloc, target, words, now=now)
        with sigpipe_held_back():
            connection.request(method, f"{target}?{words}", headers=headers)
            answer = connection.getresponse()
            content = answer.read(_LIMIT_BYTES)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return content.decode("utf-8", "replace") if answer.status in (200, 204) else None


def signed_headers(caller: Caller, method: str, host: str, target: str, words: str, *, now: str) -> dict[str, str]:
    """Return the headers of a request without a body, signed.

    Args:
        caller: Who asks.
        method: Such as ``GET``.
        host: Asked, with its port if that is another than usual.
        target: Path, encoded.
        words: Query, encoded and sorted.
        now: As ``20130524T000000Z``.
    """
    headers = {"host": host, "x-amz-content-sha256": _EMPTY, "x-amz-date": now}
    if caller.token:
        headers["x-amz-security-token"] = caller.token
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    request = f"{method}\n{target}\n{words}\n{lines}\n{names}\n{_EMPTY}"
    scope = f"{now[:8]}/{caller.region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{caller.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    authorization = f"AWS4-HMAC-SHA256 Credential={caller.key_id}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**headers, "authorization": authorization}
