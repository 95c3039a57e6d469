"""Figures for Prometheus, in a registry of this service's own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3600)


class Metrics:
    """The service's counters. No text of a user becomes a label."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.creations = Counter(
            "paracle_sandbox_creations", "Sandboxes made", ["outcome"], registry=self.registry
        )
        self.removals = Counter(
            "paracle_sandbox_removals", "Sandboxes removed", ["reason"], registry=self.registry
        )
        self.executions = Counter(
            "paracle_executions", "Programs run", ["kind", "outcome"], registry=self.registry
        )
        self.durations = Histogram(
            "paracle_execution_seconds", "How long programs ran", ["kind"],
            buckets=_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self.refusals = Counter(
            "paracle_refusals", "Requests refused", ["reason"], registry=self.registry
        )
        self.requests = Counter(
            "paracle_requests", "Requests answered", ["method", "status"], registry=self.registry
        )
        self.live = Gauge("paracle_live_sandboxes", "Sandboxes alive now", registry=self.registry)
        self.connections = Gauge(
            "paracle_connections", "Requests and WebSockets open now", registry=self.registry
        )

        self.unlogged = Gauge(
            "paracle_audit_failures", "Lines the audit log could not take", registry=self.registry
        )

    def text(self, live: int, unlogged: int) -> bytes:
        self.live.set(live)
        self.unlogged.set(unlogged)
        return generate_latest(self.registry)
