"""Tell a spawner that was started ahead of need what it is for, before there is a backend."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ...errors import SandboxError
from ...settings import Settings
from .own_directory import require_own_directory
from .spawner_process import default_python, tell_ahead
from .spawner_protocol import spawner_options
from .template_kinds import find_template, refuse_other_python, template_name

if TYPE_CHECKING:
    from ...config import SandboxConfig


def prepare(settings: Settings, first: SandboxConfig) -> bool:
    """Prepare as the backend will for its first sandbox, which then meets the same errors and
    reports them. Returns whether a spawner was told."""
    try:
        require_own_directory(settings.state_dir)
        refuse_other_python(first.base_image, settings)
        template = find_template(template_name(first.base_image), settings)
    except SandboxError:
        return False
    options = json.dumps(spawner_options(settings, template, first)).encode()
    return tell_ahead(settings.python or default_python(), options)
