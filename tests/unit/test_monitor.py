"""Tests of SandboxMonitor: it takes real samples at a pace, and survives its callbacks."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from paracle_sandbox import Sandbox, SandboxConfig, SandboxError, SandboxMonitor
from paracle_sandbox.backends.base import Usage
from paracle_sandbox.backends.machine.cgroup_usage import MemoryPeak
from paracle_sandbox.sandbox.monitor import Sample
from paracle_sandbox.testing.fake import FakeBackend

MIB = 1 << 20


@dataclass
class Meter:
    """The usage that the sandbox is made to report."""

    memory_mb: float = 10.0
    peak_mb: float = 0.0
    cache_mb: float = 0.0
    oom_kills: int = 0
    cpu_cores_used: float = 0.0
    fails: bool = False
    peak: MemoryPeak = field(default_factory=MemoryPeak)
    started: float = field(default_factory=time.monotonic)


class MeteredBackend(FakeBackend):
    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    async def usage(self, sandbox_id: str) -> Usage:
        if self.meter.fails:
            raise SandboxError("no meter", sandbox_id)
        usage = Usage(
            cpu_seconds=(time.monotonic() - self.meter.started) * self.meter.cpu_cores_used,
            memory_bytes=int(self.meter.memory_mb * MIB),
            memory_peak_bytes=int(self.meter.peak_mb * MIB),
            cache_bytes=int(self.meter.cache_mb * MIB),
            oom_kills=self.meter.oom_kills,
        )
        return self.meter.peak.of(usage)


@pytest.fixture
def meter() -> Meter:
    return Meter()


@pytest.fixture
async def sandbox(meter: Meter) -> AsyncIterator[Sandbox]:
    backend = MeteredBackend(meter)
    config = SandboxConfig(memory_mb=128, cpu_cores=1.0)
    async with Sandbox(backend, "metered", config) as sandbox:
        yield sandbox
    await backend.close()


async def until_samples(monitor: SandboxMonitor, count: int) -> None:
    async with asyncio.timeout(5):
        while len(monitor.get_history()) < count:
            await asyncio.sleep(0.005)


@pytest.mark.clock
async def test_samples_are_taken_while_something_runs(sandbox: Sandbox) -> None:
    monitor = SandboxMonitor(sandbox, interval_seconds=0.05)
    async with monitor:
        assert len(monitor.get_history()) == 1
        await sandbox.execute("sleep 0.3")
        during = len(monitor.get_history())
    assert 3 <= during <= 8
    samples = monitor.get_history()
    for key in ("cpu_percent", "memory_mb", "memory_percent", "network_rx_bytes", "timestamp"):
        assert key in samples[0]
    assert [s["timestamp"] for s in samples] == sorted(s["timestamp"] for s in samples)
    await asyncio.sleep(0.15)
    assert len(monitor.get_history()) == len(samples)  # stopped means stopped


async def test_a_very_short_run_has_a_first_and_a_last_sample(
    sandbox: Sandbox, meter: Meter
) -> None:
    async with SandboxMonitor(sandbox, interval_seconds=10) as monitor:
        meter.memory_mb = 20
    assert [sample["memory_mb"] for sample in monitor.get_history()] == [10, 20]
    assert monitor.get_averages()["memory_mb"] == 15
    assert monitor.get_peaks()["memory_mb"] == 20


async def test_nothing_sampled_means_zeros(sandbox: Sandbox) -> None:
    monitor = SandboxMonitor(sandbox)
    zeros = {"cpu_percent": 0, "memory_percent": 0, "memory_mb": 0}
    assert monitor.get_averages() == monitor.get_peaks() == zeros
    assert monitor.get_history() == monitor.get_history(10) == []
    assert monitor.get_latest() is None


async def test_cpu_is_measured_between_samples(sandbox: Sandbox, meter: Meter) -> None:
    meter.cpu_cores_used = 0.5
    async with SandboxMonitor(sandbox, interval_seconds=0.05) as monitor:
        await until_samples(monitor, 4)
    assert monitor.get_averages()["cpu_percent"] == pytest.approx(50, abs=15)
    assert monitor.get_peaks()["cpu_percent"] >= monitor.get_averages()["cpu_percent"]


async def test_the_peak_sees_what_no_sample_saw(sandbox: Sandbox, meter: Meter) -> None:
    async with SandboxMonitor(sandbox, interval_seconds=10) as monitor:
        meter.peak_mb = 64
    assert monitor.get_peaks()["memory_mb"] == 64
    assert monitor.get_peaks()["memory_percent"] == 50


async def test_history_is_bounded_and_its_end_can_be_had(sandbox: Sandbox, meter: Meter) -> None:
    monitor = SandboxMonitor(sandbox, interval_seconds=10)
    for number in range(60):
        meter.memory_mb = number
        await monitor.start()
        await monitor.stop()
    history = monitor.get_history()
    assert len(history) == 100
    assert monitor.get_history(10) == history[-10:]
    assert monitor.get_history(limit=1000) == history
    assert monitor.get_history(0) == []
    assert monitor.get_summary()["history_samples"] == 100


async def test_start_and_stop_are_idempotent(sandbox: Sandbox) -> None:
    monitor = SandboxMonitor(sandbox, interval_seconds=10)
    await monitor.stop()
    await monitor.start()
    await monitor.start()
    await monitor.stop()
    await monitor.stop()
    assert len(monitor.get_history()) == 2


@pytest.mark.parametrize(
    ("memory_mb", "cpu", "warned", "exceeded"),
    [(10, 0, False, False), (110, 0, True, False), (125, 0, True, True), (10, 0.95, True, False)],
)
async def test_callbacks_at_their_thresholds(
    sandbox: Sandbox, meter: Meter, memory_mb: float, cpu: float, warned: bool, exceeded: bool
) -> None:
    meter.memory_mb, meter.cpu_cores_used = memory_mb, cpu
    warnings: list[Sample] = []
    breaches: list[Sample] = []

    async def on_limit_exceeded(stats: Sample) -> None:
        await asyncio.sleep(0)
        breaches.append(stats)

    async with SandboxMonitor(sandbox, 0.05, warnings.append, on_limit_exceeded) as monitor:
        await until_samples(monitor, 3)
    assert (bool(warnings), bool(breaches)) == (warned, exceeded)
    if warnings:
        assert {"cpu_percent", "memory_percent"} <= set(warnings[0])


@pytest.mark.parametrize(
    ("peak_mb", "cache_mb", "oom_kills", "warned", "exceeded"),
    [
        (64, 0, 0, False, False),
        (110, 0, 0, True, False),
        (128, 0, 0, True, True),
        (64, 0, 1, True, True),
        (128, 100, 0, False, False),
    ],
    ids=["little", "much", "all", "killed", "a cache of files"],
)
async def test_callbacks_for_what_no_sample_saw(
    sandbox: Sandbox, meter: Meter, peak_mb: float, cache_mb: float, oom_kills: int,
    warned: bool, exceeded: bool,
) -> None:  # fmt: skip
    meter.peak_mb = 20
    warnings: list[Sample] = []
    breaches: list[Sample] = []
    async with SandboxMonitor(sandbox, 0.02, warnings.append, breaches.append) as monitor:
        await until_samples(monitor, 2)
        meter.peak_mb, meter.cache_mb, meter.oom_kills = peak_mb, cache_mb, oom_kills
        await until_samples(monitor, len(monitor.get_history()) + 3)
    # It is reported once, and not with each sample.
    assert (len(warnings), len(breaches)) == (warned, exceeded)


async def test_a_callback_that_raises_is_logged_only(
    sandbox: Sandbox, meter: Meter, caplog: pytest.LogCaptureFixture
) -> None:
    meter.memory_mb = 127

    def broken(stats: Sample) -> None:
        raise ZeroDivisionError("my own fault")

    async with SandboxMonitor(sandbox, 0.02, broken) as monitor:
        await until_samples(monitor, 3)
    assert "my own fault" in caplog.text


async def test_a_sample_that_fails_does_not_end_it(sandbox: Sandbox, meter: Meter) -> None:
    meter.fails = True
    async with SandboxMonitor(sandbox, 0.02) as monitor:
        await asyncio.sleep(0.05)
        assert monitor.get_history() == []
        meter.fails = False
        await until_samples(monitor, 1)


async def test_a_sandbox_that_goes_away_ends_it_quietly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = FakeBackend()
    sandbox = Sandbox(backend, "going", SandboxConfig())
    await sandbox.start()
    async with SandboxMonitor(sandbox, 0.02) as monitor:
        await sandbox.stop()
        await asyncio.sleep(0.1)
    assert len(monitor.get_history()) == 1
    assert len(caplog.records) <= 2


async def test_the_interval_must_be_positive(sandbox: Sandbox) -> None:
    for none in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="interval_seconds must be"):
            SandboxMonitor(sandbox, none)
    with pytest.raises(TypeError, match="interval_seconds must be a number of seconds, not str"):
        SandboxMonitor(sandbox, "1")  # type: ignore[arg-type]
