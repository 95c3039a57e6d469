"""Shapes of requests and answers. A field that is not named here is refused, not ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from .faults import BadRequest
from .tenants import MAX_USER_ID, checked_user_id

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


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


# Requests


class CreateRequest(Strict):
    """All may be left out. Limits are bounded by those of the service."""

    image: Annotated[str | None, Field(max_length=255)] = None
    memory_limit: Annotated[str | None, Field(max_length=32, examples=["512m"])] = None
    cpu_limit: Annotated[float | None, Field(ge=0.1, le=4.0, allow_inf_nan=False)] = None


class ExecuteRequest(Strict):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"code": "print('hello')", "timeout": 30}]}
    )

    code: Text
    description: Annotated[str, Field(max_length=1000)] = ""
    timeout: OldSeconds = 30


class ShellRequest(Strict):
    model_config = ConfigDict(json_schema_extra={"examples": [{"command": "ls -la"}]})

    command: Text
    timeout: OldSeconds = 60


class WriteRequest(Strict):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"path": "notes.txt", "content": "hello\n"}]}
    )

    path: Path
    content: str
    encoding: Literal["utf-8", "base64"] = "utf-8"


class InstallRequest(Strict):
    """``package`` is one requirement or several with spaces or commas between; ``packages`` a
    list of them."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"package": "requests>=2"}]})

    package: Annotated[str | None, Field(max_length=2000)] = None
    packages: Annotated[list[Annotated[str, Field(max_length=500)]], Field(max_length=50)] = []
    timeout: OldSeconds = 120


class UnzipRequest(Strict):
    path: Path
    destination: Annotated[str | None, Field(min_length=1, max_length=MAX_PATH)] = None


class RunRequest(Strict):
    """A program: Python ``code`` or a shell ``command``."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"command": "for i in 1 2 3; do echo $i; done"}]}
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
    data: Text = ""
    encoding: Literal["utf-8", "base64"] = "utf-8"
    close: bool = False


class SignalRequest(Strict):
    signal: Annotated[int, Field(ge=1, le=64)]


class KeyRequest(Strict):
    """A key for ``users``, or with ``admin`` for everybody."""

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

    sandbox_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
    config: dict[str, Any] = {}
    labels: Annotated[
        dict[Annotated[str, Field(max_length=100)], Annotated[str, Field(max_length=500)]],
        Field(max_length=32),
    ] = {}


# Answers


class ErrorAnswer(BaseModel):
    """Every failure. ``kind`` is for programs, ``error`` for people."""

    error: str
    error_type: str
    kind: str
    retryable: bool = False
    state_lost: bool = False
    details: Any = None


class SandboxAnswer(BaseModel):
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
    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool
    truncated: bool


class ExecutionAnswer(BaseModel):
    """``output``, ``error`` and ``exit_code`` are the older shape of ``result``."""

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
    recreated: bool = False


class DoneAnswer(BaseModel):
    success: bool = True
    output: str
    error: str | None = None
    exit_code: int = 0
    execution_time: float = 0.0


class FileAnswer(BaseModel):
    path: str
    content: str
    encoding: str
    size: int


class FileEntry(BaseModel):
    name: str
    path: str
    kind: str
    size: int
    mode: int
    modified: float
    is_dir: bool


class FilesAnswer(BaseModel):
    path: str
    files: list[FileEntry]
    total: int
    next_offset: int | None = None


class DestroyAnswer(BaseModel):
    status: str
    files_preserved: bool = True


class CommandAnswer(BaseModel):
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
    commands: list[CommandAnswer]
    total: int
    next_offset: int | None = None


class SandboxesAnswer(BaseModel):
    sandboxes: list[SandboxAnswer]
    total: int
    next_offset: int | None = None


class HealthAnswer(BaseModel):
    status: str
    docker: bool
    version: str
    backend: str
