"""Requests to S3 signed by hand, against the example of its documentation; what is left of an upload, in test_store."""

from __future__ import annotations

import pytest

from tonnage.export.unfinished import Caller, abort_unfinished, signed_headers
from tonnage.sources.limits import Limits

EXAMPLE = Caller(
    server="https://examplebucket.s3.amazonaws.com",
    region="us-east-1",
    key_id="AKIAIOSFODNN7EXAMPLE",
    secret="wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",  # noqa: S106 - of the documentation
    token=None,
)
"""Amazon S3 API reference, "Signature calculations for the Authorization header", example "GET Bucket Lifecycle"."""


def test_the_signature_of_the_documentation_is_ours() -> None:
    host, now = "examplebucket.s3.amazonaws.com", "20130524T000000Z"
    headers = signed_headers(EXAMPLE, "GET", host, "/", "lifecycle=", now=now)
    assert headers["authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, "
        "SignedHeaders=host;x-amz-content-sha256;x-amz-date, "
        "Signature=fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"
    )
    assert EXAMPLE.secret not in str(headers)
    assert EXAMPLE.secret not in repr(EXAMPLE)


def test_a_session_token_is_signed_too() -> None:
    caller = Caller(server="https://a", region="eu-west-1", key_id="k", secret="s", token="t")  # noqa: S106
    headers = signed_headers(caller, "DELETE", "a", "/b/c", "uploadId=1", now="20130524T000000Z")
    assert headers["x-amz-security-token"] == "t"
    assert "x-amz-security-token," in headers["authorization"].replace(" ", ",")


def test_without_keys_or_on_another_store_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    assert abort_unfinished("s3://models/a", frozenset({"b"}), Limits()) is None
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    assert abort_unfinished("gs://models/a", frozenset({"b"}), Limits()) is None


def test_a_store_that_is_not_there_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert abort_unfinished("s3://models/a", frozenset({"b"}), Limits()) is None
