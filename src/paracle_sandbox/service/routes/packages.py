"""Routes for the packages of a user's sandbox."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request

from ...errors import StoppedError
from ...sandbox.packages import checked_requirement
from ..errors import BadRequest, Forbidden
from ..schemas import ExecutionAnswer, InstallRequest
from ..service import Service
from ..users.executions import stopped_answer
from .dependencies import TheService, TheUser, note_refusal, while_connected
from .strict_json import StrictRoute

router = APIRouter(tags=["packages"], route_class=StrictRoute)


@router.post("/sandbox/{user_id}/pip/install", response_model=ExecutionAnswer)
async def install(
    request: Request, service: TheService, user: TheUser, body: InstallRequest
) -> dict[str, Any]:
    """Install packages inside, also where the sandbox has no network. Only names with versions,
    extras and markers are taken: no files, addresses or options."""
    if not service.settings.packages:
        raise Forbidden("Packages are switched off by the operator (SANDBOX_PACKAGES)")
    wanted = [*body.packages, *split_requirements(body.package or "")]
    if not wanted:
        raise BadRequest("Name a package, or several in packages")
    try:
        wanted = [checked_requirement(one) for one in wanted]
    except ValueError as error:
        raise note_refusal(request, "package", BadRequest(str(error)), packages=wanted) from None
    return await while_connected(request, _install(service, user, wanted, body.timeout))


@router.get("/sandbox/{user_id}/pip/list")
async def installed(service: TheService, user: TheUser) -> dict[str, Any]:
    """The packages that programs of the sandbox can import."""
    async with service.sandboxes.using(user) as owned:
        return {"packages": await owned.sandbox.installed_packages()}


async def _install(
    service: Service, user: str, wanted: list[str], timeout: float
) -> dict[str, Any]:
    started = time.monotonic()
    with service.executions.one(user):
        async with service.sandboxes.using(user) as owned:
            index = service.settings.package_index
            try:
                result = await owned.sandbox.install(*wanted, timeout=timeout, index_url=index)
            except StoppedError as error:
                answer = stopped_answer(
                    error, hide=service.hide, recreated=owned.recreated, files_kept=False
                )
            else:
                ok = result["exit_code"] == 0
                answer = {
                    "success": ok, "output": result["stdout"], "exit_code": result["exit_code"],
                    "error": None if ok else result["stderr"], "result": result,
                    "sandbox_id": owned.sandbox.sandbox_id, "recreated": owned.recreated,
                }  # fmt: skip
            answer["files_kept"] = await service.sandboxes.save(owned)
            owned.execution_count += 1
    service.journal.record(
        "install", user=user, packages=wanted, outcome="ok" if answer["success"] else "failed"
    )
    answer["execution_time"] = time.monotonic() - started
    return answer


def split_requirements(text: str) -> list[str]:
    """Split a text into requirements: at lines, and at spaces or commas, because people write them
    so. A line that is a requirement as it stands is not split."""
    found: list[str] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        ways = ([line], _words(line), _words(line.replace(",", " ")))
        found += next((way for way in ways if all(map(_is_good, way))), [line])
    return found


def _words(line: str) -> list[str]:
    """Split at spaces, and drop "and": "numpy and pandas" names two packages."""
    return [word for word in line.split() if word.lower() != "and"]


def _is_good(text: str) -> bool:
    try:
        checked_requirement(text)
    except ValueError:
        return False
    return True
