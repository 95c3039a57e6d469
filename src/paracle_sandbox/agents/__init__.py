"""Agents that work in sandboxes. An agent is a model, tools, and a loop with limits.

from paracle_sandbox.agents import SandboxAgent
async with SandboxAgent("gpt-5", provider="openai") as agent:
    print((await agent.run("What is the 100th prime?")).text)
"""

from .agent import SandboxAgent, SandboxManus
from .conversation import Message, Reply, ToolCall, Usage
from .definitions import AgentDefinition, find_agent, known_agents
from .events import AgentResult, Event
from .loop import Limits
from .model import Model, ModelError
from .providers import Options, make_model

__all__ = [
    "AgentDefinition",
    "AgentResult",
    "Event",
    "Limits",
    "Message",
    "Model",
    "ModelError",
    "Options",
    "Reply",
    "SandboxAgent",
    "SandboxManus",
    "ToolCall",
    "Usage",
    "find_agent",
    "known_agents",
    "make_model",
]
