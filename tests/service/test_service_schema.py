"""The OpenAPI description and the service agree, whatever is sent."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

import httpx2
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    response_schema_conformance,
    status_code_conformance,
)
from service_process import ServiceProcess

# What takes long: an index that is far away, programs that are followed to their end.
LEFT_OUT = re.compile(r"/pip/install|/stream$")
CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]


def test_every_answer_is_described(fake: ServiceProcess) -> None:
    headers = {"X-API-Key": fake.key}
    schema = schemathesis.openapi.from_url(f"{fake.url}/openapi.json", headers=headers)
    operations = [found.ok() for found in schema.get_all_operations()]
    tried = [one for one in operations if not LEFT_OUT.search(one.path)]
    assert len(tried) > 20
    with fake.client() as client:
        for operation in tried:
            _try(operation, headers)
            _remove_users(client)


def _remove_users(client: httpx2.Client) -> None:
    """Whatever text was tried is a user now, with a sandbox; and remote clients have theirs."""
    for one in client.get("/v1/sandboxes").json()["sandboxes"]:
        assert client.delete(f"/v1/sandboxes/{quote(one['sandbox_id'], safe='')}").is_success
    for one in client.get("/sandboxes", params={"limit": 1000}).json()["sandboxes"]:
        user = quote(one["user_id"], safe="").replace(".", "%2E")
        gone = client.delete(f"/sandbox/{user}/destroy", params={"erase_files": True})
        assert gone.status_code == 200, (one["user_id"], gone.text)


def _try(operation: Any, headers: dict[str, str]) -> None:
    @settings(
        max_examples=12, deadline=None, database=None, phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck), derandomize=True,
    )  # fmt: skip
    @given(case=operation.as_strategy())
    def one(case: Any) -> None:
        if isinstance(case.body, dict) and "timeout" in case.body:
            case.body["timeout"] = 1
        case.call_and_validate(headers=headers, checks=CHECKS, timeout=60)

    one()
