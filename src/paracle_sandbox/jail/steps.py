"""Named steps: a step that fails is reported by its name, and nothing after it is done."""

from __future__ import annotations

from collections.abc import Callable


class StepFailed(Exception):
    """A step did not succeed; nothing after it was done."""

    def __init__(self, step: str, error: OSError) -> None:
        super().__init__(f"{step}: {error}")
        self.step = step
        self.errno = error.errno or 0


class Steps:
    """Runs named steps; ``failpoints`` makes one of them fail, for the tests that need it."""

    def __init__(self, failpoints: dict[str, str], notify: Callable[[str], None]) -> None:
        self._failpoints = failpoints
        self._notify = notify

    def step(self, name: str) -> _Step:
        return _Step(name, self._failpoints.get(name), self._notify)


class _Step:
    # A class, not a generator: each child pays for every page that it writes to.
    def __init__(self, name: str, action: str | None, notify: Callable[[str], None]) -> None:
        self._name = name
        self._action = action
        self._notify = notify

    def __enter__(self) -> None:
        if self._action == "kill-owner":
            self._notify(self._name)
        elif self._action == "fail":
            raise StepFailed(self._name, PermissionError(1, "failpoint", self._name))

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError):
            raise StepFailed(self._name, error) from error
        if isinstance(error, ValueError):  # what the resource module makes of a refusal
            raise StepFailed(self._name, PermissionError(1, str(error), self._name)) from error
