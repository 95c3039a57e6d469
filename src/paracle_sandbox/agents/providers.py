"""Makes models by provider: which SDK it needs, which address it has, and which key it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..settings import Settings, load_settings
from .model import Model, ModelError


@dataclass(frozen=True)
class Options:
    """Options of requests. None leaves a value to the endpoint, and a key to the variables that
    the SDK reads. Without ``stream`` a reply comes whole, for endpoints that cannot stream."""

    temperature: float | None = None
    max_tokens: int | None = None
    base_url: str | None = None
    api_key: str | None = None
    timeout_seconds: float = 300.0
    max_retries: int = 3
    stream: bool = True


@dataclass(frozen=True)
class Provider:
    """A provider of models. ``key`` is the setting with its key, if the SDK does not read one."""

    default_model: str | None = None
    sdk: str = "openai"
    base_url: str | None = None
    key: str | None = None


PROVIDERS = {
    "openai": Provider("gpt-6-sol"),
    "anthropic": Provider("claude-sonnet-5-5", sdk="anthropic"),
    "google": Provider(
        base_url="https://generativelanguage.googleapis.com/v1beta/openai/", key="google_key"
    ),
    "mistral": Provider(base_url="https://api.mistral.ai/v1", key="mistral_key"),
    "groq": Provider(base_url="https://api.groq.com/openai/v1", key="groq_key"),
    "ollama": Provider(base_url="http://localhost:11434/v1"),
}


def choose_provider(model: str | None, provider: str | None) -> str:
    """Return the given provider, or the one that the model's name implies, or openai."""
    if provider is not None:
        if provider not in PROVIDERS:
            raise ModelError(
                f"There is no provider {provider!r}; known are {', '.join(PROVIDERS)}."
            )
        return provider
    for beginning, name in (("claude", "anthropic"), ("gemini", "google"), ("mistral", "mistral")):
        if (model or "").startswith(beginning):
            return name
    return "openai"


def make_model(
    model: str | None = None,
    provider: str | None = None,
    options: Options | None = None,
    settings: Settings | None = None,
) -> Model:
    """Make a model by name. Raises ModelError for an unknown provider or a missing SDK or key."""
    options = options or Options()
    chosen = choose_provider(model, provider)
    entry = PROVIDERS[chosen]
    name = model or entry.default_model
    if name is None:
        raise ModelError(f"No model is named. Name a model of {chosen}.")
    key, base_url = options.api_key, options.base_url or entry.base_url
    if key is None and entry.key is not None:
        setting = getattr(settings or load_settings(), entry.key)
        if setting is None and options.base_url is None:
            variable = f"{chosen.upper()}_API_KEY"
            raise ModelError(f"{chosen} needs a key: set {variable}.")
        key = setting
    if key is None and chosen == "ollama":
        key = "ollama"  # Ollama needs no key, but the SDK does
    connection = {"base_url": base_url, "api_key": key, "timeout": options.timeout_seconds,
                  "max_retries": options.max_retries}  # fmt: skip
    request_options: dict[str, Any] = {
        "temperature": options.temperature, "max_tokens": options.max_tokens,
        "stream": options.stream,
    }  # fmt: skip
    if entry.sdk == "anthropic":
        from .anthropic_model import AnthropicModel

        return AnthropicModel(name, connection, **request_options)
    from .openai_model import OpenAIModel

    return OpenAIModel(name, connection, **request_options, new_token_name=chosen == "openai")
