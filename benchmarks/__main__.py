"""Measure everything and print the tables. With --write, put them into docs/performance.md, and the
short one into the README."""

from __future__ import annotations

import argparse
import asyncio
import compileall
import functools
import math
import operator
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import paracle_sandbox
from paracle_sandbox.errors import SandboxError
from paracle_sandbox.settings import SPEED

from . import containers, ours, peers, service
from .measure import PACE_SECONDS, Times, per_second, timed_beside, timed_command

_ROOT = Path(__file__).resolve().parent.parent
# The rows of the README's table, by what they are called there.
SUMMARY = {
    "native: create + hello + destroy, back to back, p50": "a fresh sandbox: make, run, remove",
    "native: hello in a live sandbox, back to back, p50": "one more program in a live sandbox",
    "native, ml: create + import pandas + destroy, p50": "a fresh sandbox that imports pandas",
    "docker: create + hello + destroy, p50": "a fresh container (`docker`)",
    "docker: command in a live sandbox, p50": "a command in a live container (`docker`)",
    "service: hello in a live sandbox by request, p50": "one more program over HTTP",
    "1000 idle sandboxes: memory of each": "memory of an idle sandbox, of 1000",
    "stdout streamed to a callback": "output streamed to a callback",
}
PARTS = (
    "fresh", "live", "speed", "peers", "throughput", "pandas", "cli", "idle", "bulk", "containers",
    "incus", "service",
)  # fmt: skip
# Sandboxes that are there when a burst comes: who expects some sets PARACLE_STOCK.
_DEEP_STOCK = 64
_AT_ONCE = 8
_VERDICTS = {True: "kept", False: "missed", None: ""}
_BEGIN, _END = "<!-- bench:begin -->", "<!-- bench:end -->"


@dataclass(frozen=True)
class Row:
    """One line of the budget: a figure, and the bound it must keep, if there is one."""

    what: str
    measured: str
    ratio: float | None
    budget: str
    kept: bool | None


class Bench:
    """One run. Bare Python is this environment's interpreter, which has no packages of the system
    to look at when it starts; sandboxes run the same one below it."""

    def __init__(self, count: int, idle: int, megabytes: int) -> None:
        self.count = count
        self.idle = idle
        self.megabytes = megabytes
        self.python = sys.executable
        self.hello = [self.python, "-I", "-c", "print('hello')"]
        self.times: list[tuple[Times, str]] = []
        self.rows: list[Row] = []

    def note(self, times: Times, about: str = "") -> Times:
        self.times.append((times, about))
        print(
            f"  {times.name:44} {times.p50:8.2f} {times.p95:8.2f} {times.p99:8.2f}  {about}",
            flush=True,
        )
        return times

    def row(self, what: str, measured: str, ratio: float, most: float, budget: str) -> None:
        kept = None if math.isinf(most) else ratio <= most
        self.rows.append(Row(what, measured, ratio, budget, kept))

    def floor(self, what: str, measured: str, value: float, least: float, budget: str) -> None:
        self.rows.append(Row(what, measured, None, budget, value >= least))

    async def run(self, only: Sequence[str] = ()) -> None:
        print(machine())
        print(f"  {'milliseconds':44} {'p50':>8} {'p95':>8} {'p99':>8}", flush=True)
        for part in only or PARTS:
            await getattr(self, f"_{part}")()

    async def _service(self) -> None:
        hello, rest = await service.rest_beside_library(self.count)
        self.note(hello)
        self.note(rest, "over HTTP; files kept, figures, audit log")
        above = rest.p50 - hello.p50
        self.rows.append(
            Row(
                "service: hello in a live sandbox by request, p50",
                f"{rest.p50:.1f} ms, {above:.1f} ms above the library",
                None,
                "<= 3 ms above the library",
                above <= 3.0,
            )
        )
        seen = await service.crowd(200)
        self.rows.append(
            Row(
                f"service: {seen.users} users at once, each create + execute + read + destroy",
                f"{seen.seconds:.1f} s, {seen.failures} failures, {seen.left} left",
                None,
                "no failure, nothing left",
                not seen.failures and not seen.left,
            )
        )

    async def _fresh(self) -> None:
        found = shutil.which("python3")
        if found and os.path.dirname(found) != os.path.dirname(self.python):
            # With what the machine's own packages do when it starts.
            command = [found, *self.hello[1:]]
            self.note(await timed_command("python3 of the PATH -I -c", command, self.count // 4))
        for label, pause in (("back to back", 0.0), ("one every 100 ms", PACE_SECONDS)):
            fresh_times = functools.partial(ours.fresh_times, count=self.count, pause=pause)
            deep = f"native fresh + hello, stock of {_DEEP_STOCK}, {label}"
            bare, fresh = await timed_beside(
                f"bare python3 -I -c, {label}",
                self.hello,
                self.count,
                pause,
                functools.partial(fresh_times, deep, _DEEP_STOCK),
            )
            usual = await fresh_times(f"native fresh + hello, usual stock, {label}", None)
            cold = await fresh_times(f"native fresh + hello, no stock, {label}", 0)
            self.note(bare)
            for times in (fresh, usual, cold):
                self.note(times, "full posture, all limits")
            again = self.note(
                await ours.run_times(f"run(), later calls, {label}", self.count, pause),
                "full posture, all limits",
            )
            self.row(
                f"native: run(), second call and later, {label}, p50",
                f"{again.p50:.1f} ms",
                again.p50 / usual.p50,
                1.5,
                "<= 1.5x a fresh sandbox",
            )
            for name, most in (("p50", 0.5), ("p99", 2.0)):
                figure = operator.attrgetter(name)
                self.row(
                    f"native: create + hello + destroy, {label}, {name}",
                    f"{figure(fresh):.1f} ms with a stock of {_DEEP_STOCK} "
                    f"({ours.settings().stock}, as usual: {figure(usual):.1f}; "
                    f"none: {figure(cold):.1f})",
                    figure(fresh) / bare.p50,
                    most,
                    f"<= {most:g}x bare Python",
                )

    async def _live(self) -> None:
        for label, pause in (("back to back", 0.0), ("one every 100 ms", PACE_SECONDS)):
            sh = self.note(
                await timed_command(
                    f"bare sh -c true, {label}", ["sh", "-c", "true"], self.count, pause
                )
            )
            live_times = functools.partial(ours.live_times, self.count, pause)
            bare, (hello, true) = await timed_beside("", self.hello, self.count, pause, live_times)
            self.note(Times(f"native hello in a live sandbox, {label}", hello.values))
            self.note(Times(f"native sh true in a live sandbox, {label}", true.values))
            self.row(
                f"native: hello in a live sandbox, {label}, p50",
                f"{hello.p50:.2f} ms",
                hello.p50 / bare.p50,
                0.25,
                "<= 0.25x bare Python",
            )
            self.row(
                f"native: sh true in a live sandbox, {label}, p50",
                f"{true.p50:.2f} ms",
                true.p50 / sh.p50,
                4.0,
                "<= 4x bare sh",
            )

    async def _speed(self) -> None:
        """What each part gives that is there for speed alone: with it and without, in turns."""
        parts: dict[str, tuple[str, ...]] = {name: (name,) for name in SPEED}
        parts["all of them"] = SPEED
        for name, off in parts.items():
            # Twice each, in turns: a machine that becomes slower meanwhile does so for both.
            rounds = [await ours.speed_times(without, self.count // 2) for without in ((), off) * 2]
            for number, what in enumerate(("create + hello + destroy", "hello in a live sandbox")):
                on, without = (
                    Times(what, rounds[i][number].values + rounds[i + 2][number].values)
                    for i in (0, 1)
                )
                self.row(
                    f"native, {name}: {what}, p50",
                    f"{on.p50:.2f} ms with it, {without.p50:.2f} without",
                    on.p50 / without.p50,
                    math.inf,
                    "none; beside the same without it",
                )

    async def _peers(self) -> None:
        peers.install()
        for peer in peers.PEERS:
            try:
                self.note(
                    await timed_command(peer.name, peer.command(self.python), self.count // 2),
                    peer.guarantees,
                )
            except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
                print(f"  {peer.name}: left out: {str(error).strip().splitlines()[-1][:120]}")

    async def _throughput(self) -> None:
        async def bare(_: int) -> None:
            process = await asyncio.create_subprocess_exec(
                *self.hello, stdout=asyncio.subprocess.DEVNULL
            )
            await process.wait()

        mine, theirs = await ours.bursts(bare, _AT_ONCE, _DEEP_STOCK, 15)
        before = await per_second(bare, _AT_ONCE, 2.5)
        lasting = await ours.throughput(_AT_ONCE, 5.0, None)
        bare_lasting = (before + await per_second(bare, _AT_ONCE, 2.5)) / 2
        none = await ours.throughput(_AT_ONCE, 5.0, 0)
        print(
            f"  fresh per second, {_AT_ONCE} at a time, from a stock: native {mine:.0f}, ", end=""
        )
        print(f"bare Python {theirs:.0f}; lasting: {lasting:.0f}, {bare_lasting:.0f}")
        self.floor(
            f"native: fresh sandboxes per second, {_AT_ONCE} at a time",
            f"{mine:.0f}/s = {mine / theirs:.1f}x of {theirs:.0f}/s, {_DEEP_STOCK} of "
            f"{_DEEP_STOCK + _AT_ONCE} in stock (when it is used up: {lasting:.0f}/s = "
            f"{lasting / bare_lasting:.1f}x; none: {none:.0f}/s = {none / bare_lasting:.1f}x)",
            mine / theirs,
            2.5,
            ">= 2.5x bare Python",
        )

    async def _pandas(self) -> None:
        fresh = await ours.pandas_times(max(5, self.count // 10))
        if fresh is None:
            print("  import pandas: the ml template is not built (paracle template build ml)")
            return
        packages = ours.NativeBackend(ours.settings()).templates.get("ml").path
        # Compiled once, as the template's are, and not counted.
        code = f"import sys; sys.path.append({str(packages)!r}); import pandas"
        bare = self.note(
            await timed_command("bare import pandas", [self.python, "-I", "-c", code], 5)
        )
        self.note(fresh, "ml template")
        self.row(
            "native, ml: create + import pandas + destroy, p50",
            f"{fresh.p50:.0f} ms",
            fresh.p50 / bare.p50,
            0.1,
            "<= 0.1x bare import pandas",
        )

    async def _cli(self) -> None:
        # As an installed package is, also where the environment keeps Python from doing it.
        compileall.compile_dir(Path(paracle_sandbox.__file__).parent, quiet=1)
        bare = await timed_command("", self.hello, 10)
        whole = self.note(
            await timed_command(
                "paracle sandbox execute hello.py", ours.cli_command(), max(5, self.count // 10)
            )
        )
        self.row(
            "paracle sandbox execute, whole command, p50",
            f"{whole.p50:.0f} ms",
            whole.p50 / bare.p50,
            15.0,
            "<= 15x bare Python",
        )

    async def _idle(self) -> None:
        pss, first, last = await ours.many_idle(self.idle)
        self.row(
            f"{self.idle} idle sandboxes: memory of each",
            f"{pss:.2f} MiB PSS",
            pss,
            2.0,
            "<= 2 MiB PSS",
        )
        self.rows[-1] = Row(
            self.rows[-1].what, self.rows[-1].measured, None, self.rows[-1].budget, pss <= 2.0
        )
        self.row(
            f"create number {self.idle} against the first",
            f"{last:.1f} / {first:.1f} ms",
            last / first,
            1.5,
            "<= 1.5x",
        )

    async def _bulk(self) -> None:
        speed, growth = await ours.stream_speed(self.megabytes)
        self.floor(
            "stdout streamed to a callback",
            f"{speed:.0f} MB/s, host memory +{growth:.0f} MiB",
            speed,
            300,
            ">= 300 MB/s",
        )
        into, out, growth = await ours.copy_speed(self.megabytes)
        self.floor(
            f"copy in, a file of {self.megabytes} MiB",
            f"{into:.0f} MB/s, host memory +{growth:.0f} MiB",
            into,
            200,
            ">= 200 MB/s",
        )
        self.floor(
            f"copy out, a file of {self.megabytes} MiB", f"{out:.0f} MB/s", out, 200, ">= 200 MB/s"
        )

    async def _containers(self) -> None:
        for name in ("docker", "gvisor"):
            try:
                found = await containers.figures(name, self.count)
            except (SandboxError, OSError, RuntimeError) as error:
                print(f"  {name}: left out: {str(error)[:120]}")
                continue
            self._container_rows(name, found)

    def _container_rows(self, name: str, found: containers.Figures) -> None:
        self.note(found.run_rm, "the client's defaults: root inside, no limits, a network")
        self.note(found.run_rm_alone, "root inside, no limits")
        self.note(found.fresh, "full posture, all limits")
        self.note(found.exec_command, "the client, in the same container")
        self.note(found.command)
        print(
            f"  {name}, 8 at a time, per second: create + hello + destroy {found.at_once:.1f}, "
            f"docker run --rm --network none {found.run_rm_at_once:.1f}; "
            f"commands {found.commands_at_once:.0f}, docker exec {found.execs_at_once:.1f}"
        )
        # The budget is about Docker, one at a time; the rest is told beside it.
        bounded = name == "docker"
        most, budget = (0.1, "<= 0.1x docker exec") if bounded else (math.inf, "none")
        self.row(
            f"{name}: command in a live sandbox, p50",
            f"{found.command.p50:.2f} ms",
            found.command.p50 / found.exec_command.p50,
            most,
            budget,
        )
        self.row(
            f"{name}: command in a live sandbox, 8 at a time",
            f"{found.commands_at_once:.0f}/s against {found.execs_at_once:.1f}/s",
            found.execs_at_once / found.commands_at_once,
            most,
            budget,
        )
        self.row(
            f"{name}: create + hello + destroy, p50",
            f"{found.fresh.p50:.0f} ms; against --network none: "
            f"{found.fresh.p50 / found.run_rm_alone.p50:.2f}x",
            found.fresh.p50 / found.run_rm.p50,
            1.1 if bounded else math.inf,
            "<= 1.1x docker run --rm" if bounded else "none; beside docker run --rm",
        )
        self.row(
            f"{name}: create + hello + destroy, 8 at a time",
            f"{found.at_once:.1f}/s against {found.run_rm_at_once:.1f}/s",
            found.run_rm_at_once / found.at_once,
            math.inf,
            "none; beside docker run --rm --network none",
        )

    async def _incus(self) -> None:
        from . import incus

        try:
            found = await incus.figures(self.count)
        except (SandboxError, OSError, RuntimeError) as error:
            print(f"  incus: left out: {str(error)[:120]}")
            return
        self.note(found.cold, "container of its own, full posture; unpacks its image")
        self.note(found.warm, "the same; the image was unpacked ahead of need")
        self.note(found.launch, "its client: an instance of the same image, with its init running")
        self.note(found.exec_command, "the client of Incus, in the same instance")
        self.note(found.command)
        self.row(
            "incus: command in a live sandbox, p50",
            f"{found.command.p50:.2f} ms",
            found.command.p50 / found.exec_command.p50,
            0.1,
            "<= 0.1x incus exec",
        )
        self.row(
            "incus: create with a ready instance, p50",
            f"{found.warm.p50:.0f} ms; without one {found.cold.p50:.0f} ms",
            found.warm.p50 / found.launch.p50,
            1.0,
            "(<= 1x incus launch)",
        )

    def summary(self) -> str:
        rows = [row for row in self.rows if row.what in SUMMARY]
        lines = ["| what | measured | budget | |", "|---|---|---|---|"]
        lines += [
            f"| {SUMMARY[row.what]} | {row.measured} | {row.budget} | {_VERDICTS[row.kept]} |"
            for row in rows
        ]
        return "\n".join(lines)

    def table(self) -> str:
        lines = ["| what | measured | ratio | budget | |", "|---|---|---|---|---|"]
        for row in self.rows:
            ratio = f"{row.ratio:.2f}x" if row.ratio is not None else ""
            lines.append(
                f"| {row.what} | {row.measured} | {ratio} | {row.budget} | {_VERDICTS[row.kept]} |"
            )
        lines += [
            "",
            "| fresh or live, milliseconds | p50 | p95 | p99 | what it guarantees |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {t.name} | {t.p50:.1f} | {t.p95:.1f} | {t.p99:.1f} | {about} |"
            for t, about in self.times
        ]
        return "\n".join(lines)


def machine() -> str:
    kernel = platform.release().split("-")[0]
    return (
        f"Python {platform.python_version()}, Linux {kernel}, {os.cpu_count()} cores, "
        f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') >> 30} GiB, "
        f"{'root' if os.geteuid() == 0 else 'an ordinary user'}"
    )


def write_page(page: Path, text: str) -> None:
    """Replace what is between the markers of a page."""
    before, begin, rest = page.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"{page} has no {_BEGIN} ... {_END}")
    page.write_text(f"{before}{_BEGIN}\n{text}\n{_END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="runs of each short measurement")
    parser.add_argument("--idle", type=int, default=1000, help="idle sandboxes at once")
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the bulk transfers")
    parser.add_argument("--strict", action="store_true", help="fail when the budget is missed")
    parser.add_argument("--write", action="store_true", help="put them into the pages")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=(), help="a part of it")
    options = parser.parse_args()
    if options.only and options.write:
        parser.error("--write puts the whole run into the pages: leave out --only")
    bench = Bench(options.count, options.idle, options.megabytes)
    asyncio.run(bench.run(options.only))
    words = ["python -m benchmarks", *(word for word in sys.argv[1:] if word != "--write")]
    about = f"One run of `{' '.join(words)}` on: {machine()}."
    text = f"{about}\n\n{bench.table()}"
    print("\n" + text)
    if options.write:
        write_page(_ROOT / "docs/performance.md", text)
        write_page(_ROOT / "README.md", f"{bench.summary()}\n\n{about}")
    missed = [row.what for row in bench.rows if row.kept is False]
    print("\nmissed: " + (", ".join(missed) or "nothing"))
    return 1 if missed and options.strict else 0


if __name__ == "__main__":
    sys.exit(main())
