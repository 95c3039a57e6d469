"""Schemas of requests and answers. An unknown field of a request is refused, not ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from .errors import BadRequest
from .users.names import MAX_USER_ID, checked_user_id

MAX_CODE = 4 << 20
MAX_PATH = 4096
OLD_MAX_SECONDS = 300
MAX_SECONDS = 3600

Path = Annotated[str, Field(min_length=1, max_length=MAX_PATH)]
OldSeconds = Annotated[int, Field(ge=1, le=OLD_MAX_SECONDS)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=MAX_CODE)]
Environment = Annotated[dict[str, Annotated[str, Field(max_length=32768)]], Field(max_length=256)]


def _user(text: str) -> str:
    try:
        return checked_user_id(text)
    except BadRequest as error:
        raise ValueError(str(error)) from None


User = Annotated[str, Field(min_length=1, max_length=MAX_USER_ID), AfterValidator(_user)]


def example(**fields: Any) -> ConfigDict:
    """Return a model configuration with an example, which a test validates."""
    return ConfigDict(json_schema_extra={"examples": [fields]})


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


# Requests


class CreateRequest(Strict):
    """All may be left out. Limits are bounded by those of the service."""

    model_config = example(memory_limit="512m", cpu_limit=1.0)

    image: Annotated[str | None, Field(max_length=255)] = None
    memory_limit: Annotated[str | None, Field(max_length=32, examples=["512m"])] = None
    cpu_limit: Annotated[float | None, Field(ge=0.1, le=4.0, allow_inf_nan=False)] = None


class ExecuteRequest(Strict):
    model_config = example(code="print('hello')", timeout=30)

    code: Text
    description: Annotated[str, Field(max_length=1000)] = ""
    timeout: OldSeconds = 30


class ShellRequest(Strict):
    model_config = example(command="ls -la")

    command: Text
    timeout: OldSeconds = 60


class WriteRequest(Strict):
    model_config = example(path="notes.txt", content="hello\n")

    path: Path
    content: str
    encoding: Literal["utf-8", "base64"] = "utf-8"


class DirectoryRequest(Strict):
    model_config = example(path="data/raw")

    path: Path
    parents: bool = True


class InstallRequest(Strict):
    """``package`` is one requirement or several with spaces or commas between; ``packages`` a
    list of them."""

    model_config = example(package="requests>=2")

    package: Annotated[str | None, Field(max_length=2000)] = None
    packages: Annotated[list[Annotated[str, Field(max_length=500)]], Field(max_length=50)] = []
    timeout: OldSeconds = 120


class UnzipRequest(Strict):
    model_config = example(path="data.zip", destination="data")

    path: Path
    destination: Annotated[str | None, Field(min_length=1, max_length=MAX_PATH)] = None


def _only(given: str, absent: str) -> dict[str, JsonValue]:
    """Return the JSON schema of what RunRequest's validator checks."""
    return {
        "required": [given],
        "properties": {given: {"type": "string"}, absent: {"type": "null"}},
    }


class RunRequest(Strict):
    """A program: Python ``code`` or a shell ``command``."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"command": "for i in 1 2 3; do echo $i; done"}, {"code": "print(6 * 7)"}],
            "anyOf": [_only("code", "command"), _only("command", "code")],
        }
    )

    code: Text | None = None
    command: Text | None = None
    timeout: Seconds = 300
    cwd: Annotated[str | None, Field(max_length=MAX_PATH)] = None
    env: Environment = {}
    stdin: Text | None = None
    keep_stdin: bool = False

    @model_validator(mode="after")
    def _one_program(self) -> RunRequest:
        if (self.code is None) == (self.command is None):
            raise ValueError("give code (Python) or command (shell), one of the two")
        if self.stdin is not None and self.keep_stdin:
            raise ValueError("stdin and keep_stdin exclude each other")
        return self


class InputRequest(Strict):
    model_config = example(data="yes\n", close=True)

    data: Text = ""
    encoding: Literal["utf-8", "base64"] = "utf-8"
    close: bool = False


class SignalRequest(Strict):
    model_config = example(signal=15)

    signal: Annotated[int, Field(ge=1, le=64)]


class KeyRequest(Strict):
    """A key for ``users``, or with ``admin`` for everybody."""

    model_config = example(users=["ann"], expires_in=86400.0, note="for ann's notebook")

    users: Annotated[list[User], Field(max_length=1000)] = []
    admin: bool = False
    expires_in: Annotated[float | None, Field(gt=0, le=10 * 365 * 86400)] = None
    note: Annotated[str, Field(max_length=200)] = ""

    @model_validator(mode="after")
    def _for_somebody(self) -> KeyRequest:
        if not self.users and not self.admin:
            raise ValueError("name the users it acts for, or make it an admin key")
        return self


class LeaseRequest(Strict):
    """A sandbox for a remote client: the configuration is a SandboxConfig."""

    model_config = example(sandbox_id="job-17", config={"memory_mb": 512}, labels={"team": "data"})

    sandbox_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
    config: dict[str, Any] = {}
    labels: Annotated[
        dict[Annotated[str, Field(max_length=100)], Annotated[str, Field(max_length=500)]],
        Field(max_length=32),
    ] = {}


# Answers

_SANDBOX = {
    "user_id": "ann", "sandbox_id": "u-5f2a", "container_id": "u-5f2a", "status": "running",
    "created_at": "2026-01-31T09:00:00Z", "last_used": "2026-01-31T09:05:00Z",
    "execution_count": 3, "memory_usage_mb": 21.5, "cpu_percent": 0.4, "recreated": False,
}  # fmt: skip
_RESULT = {
    "exit_code": 0, "stdout": "hello\n", "stderr": "", "timed_out": False, "truncated": False,
}  # fmt: skip
_FILE = {
    "name": "notes.txt", "path": "/workspace/notes.txt", "kind": "file", "size": 6,
    "mode": 420, "modified": 1769850000.0, "is_dir": False, "escaped": False,
}  # fmt: skip
_COMMAND = {
    "command_id": "0f3c", "running": True, "exit_code": None, "stdout": "1\n", "stderr": "",
    "started_at": "2026-01-31T09:05:00Z",
}  # fmt: skip


class ErrorAnswer(BaseModel):
    """Every failure. ``kind`` is for programs, ``error`` for people."""

    model_config = example(
        error="Maximum containers (10) reached", error_type="Unavailable", kind="busy"
    )

    error: str
    error_type: str
    kind: str
    retryable: bool = False
    state_lost: bool = False
    details: Any = None
    hint: str | None = None


class SandboxAnswer(BaseModel):
    model_config = example(**_SANDBOX)

    user_id: str
    sandbox_id: str
    container_id: str
    status: str
    created_at: str
    last_used: str
    execution_count: int
    memory_usage_mb: float
    cpu_percent: float
    recreated: bool = False


class ResultAnswer(BaseModel):
    model_config = example(**_RESULT)

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool
    truncated: bool


class ExecutionAnswer(BaseModel):
    """``output``, ``error`` and ``exit_code`` are the older shape of ``result``."""

    model_config = example(
        success=True, output="hello\n", error=None, exit_code=0, execution_time=0.04,
        result=_RESULT, sandbox_id="u-5f2a",
    )  # fmt: skip

    success: bool
    output: str
    error: str | None = None
    exit_code: int
    execution_time: float
    result: ResultAnswer | None = None
    stats: dict[str, Any] | None = None
    sandbox_id: str | None = None
    error_type: str | None = None
    kind: str | None = None
    state_lost: bool = False
    files_kept: bool = True
    files_error: str | None = Field(default=None, description="Why the files are not kept")
    recreated: bool = False


class DoneAnswer(BaseModel):
    model_config = example(success=True, output="Written 6 bytes to notes.txt")

    success: bool = True
    output: str
    error: str | None = None
    exit_code: int = 0
    execution_time: float = 0.0


class FileAnswer(BaseModel):
    model_config = example(path="notes.txt", content="hello\n", encoding="utf-8", size=6)

    path: str
    content: str
    encoding: str
    size: int


class FileEntry(BaseModel):
    model_config = example(**_FILE)

    name: str
    path: str
    kind: str
    size: int
    mode: int
    modified: float
    is_dir: bool
    escaped: bool = False


class ExistsAnswer(BaseModel):
    model_config = example(path="notes.txt", exists=True)

    path: str
    exists: bool


class FilesAnswer(BaseModel):
    model_config = example(path="/workspace", files=[_FILE], total=1, next_offset=None)

    path: str
    files: list[FileEntry]
    total: int
    next_offset: int | None = None


class DestroyAnswer(BaseModel):
    model_config = example(status="deleted", files_preserved=True, files_kept=True)

    status: str
    files_preserved: bool = True
    files_kept: bool | None = Field(
        default=None, description="Whether the last changes are kept; null if nothing was removed"
    )


class CommandAnswer(BaseModel):
    model_config = example(**_COMMAND)

    command_id: str
    running: bool
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    truncated: bool = False
    started_at: str
    error: str | None = None
    error_type: str | None = None


class CommandsAnswer(BaseModel):
    model_config = example(commands=[_COMMAND], total=1, next_offset=None)

    commands: list[CommandAnswer]
    total: int
    next_offset: int | None = None


class SandboxesAnswer(BaseModel):
    model_config = example(sandboxes=[_SANDBOX], total=1, next_offset=None)

    sandboxes: list[SandboxAnswer]
    total: int
    next_offset: int | None = None


class HealthAnswer(BaseModel):
    model_config = example(status="healthy", docker=False, version="1.0.0", backend="native")

    status: str
    docker: bool
    version: str
    backend: str
