"""The interface keeps what its description says, whatever is asked: schemathesis, against a server of its own."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from samples import PATIENCE, served
from tonnage.ui.examples import EXAMPLES
from tonnage.ui.openapi import openapi_document

EXAMPLES_EACH = 30
schema = schemathesis.openapi.from_dict(openapi_document())
quietly = settings(
    max_examples=EXAMPLES_EACH,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
NOT_ASKED = [
    schemathesis.checks.CHECKS.get_one(name)
    for name in ("positive_data_acceptance", "missing_required_header", "unsupported_method")
]
"""A body of the right shape may name a GPU that is none; no header is required but those that every client sends."""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    (tmp_path_factory.getbasetemp() / "models").mkdir()
    with served(tmp_path_factory.getbasetemp(), "models") as (found, _):
        yield found.rstrip("/")


@schema.parametrize()
@quietly
def test_what_is_asked_at_random_is_answered_as_described(case, address):
    case.call_and_validate(base_url=address, excluded_checks=NOT_ASKED, timeout=PATIENCE)


@schema.include(method="POST").parametrize()
@quietly
def test_what_is_asked_of_a_model_at_random_is_answered_as_described(case, address):
    if isinstance(case.body, dict):
        example = EXAMPLES[case.operation.definition.raw["operationId"]]
        case.body = {"engine": "vllm"} | case.body
        case.body |= {name: example[name] for name in ("checkpoint", "gpu", "profile", "log") if name in example}
        case.body = {name: value for name, value in case.body.items() if value is not None}
    answer = case.call(base_url=address, timeout=PATIENCE)
    assert answer.status_code < 500
    case.validate_response(
        answer, excluded_checks=[*NOT_ASKED, schemathesis.checks.CHECKS.get_one("negative_data_rejection")]
    )
