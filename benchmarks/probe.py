"""State of the machine around a measurement: memory bandwidth, distance between cores, CPU time of other processes."""

import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

SOURCE = Path(__file__).with_name("probe.c")
#: Thresholds: ratios of two probes above which the machine states differ, and the CPU share that other processes may
#: use.
TRIP, READ, OTHERS = 1.8, 1.3, 0.08


class Probe:
    """Builds probe.c once and runs it. Without a compiler there are no figures, so the record cannot say which turns
    were disturbed.
    """

    def __init__(self) -> None:
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
        self.folder = tempfile.TemporaryDirectory(prefix="mpool-probe-")
        self.program = os.path.join(self.folder.name, "probe")
        built = compiler is not None and subprocess.run(
            [*compiler.split(), "-std=c11", "-O2", "-pthread", str(SOURCE), "-o", self.program]).returncode == 0
        self.cpus = sorted(os.sched_getaffinity(0))
        self.works = built

    def run(self) -> dict[str, float] | None:
        """Run the probe and return its figures."""
        if not self.works:
            return None
        pair = (self.cpus[0], self.cpus[min(1, len(self.cpus) - 1)])
        done = subprocess.run([self.program, *map(str, pair)], capture_output=True, text=True, timeout=60)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def around(self, run: Callable[[], T]) -> tuple[T, "Frame"]:
        """Return the result of ``run``, and the probes before and after it."""
        before = self.run()
        with Watch() as watch:
            found = run()
        return found, Frame(before, self.run(), watch.others)


@dataclass
class Frame:
    """A measurement between two probes. ``others`` is the share of this process's CPUs that other processes used."""

    before: dict[str, float] | None
    after: dict[str, float] | None
    others: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the frame as the record holds it."""
        return {"before": self.before, "after": self.after, "others": self.others}


class Watch:
    """Measures the CPU time of other processes while it is open: the busy time in /proc/stat minus that of our
    children.
    """

    def __enter__(self) -> "Watch":
        self.cpus = os.sched_getaffinity(0)
        self.start, self.busy, self.own = time.monotonic(), self._busy(), self._own()
        self.others: float | None = None
        return self

    def __exit__(self, *_: object) -> None:
        if self.busy is not None:
            capacity = (time.monotonic() - self.start) * len(self.cpus)
            used = (self._busy() or 0.0) - self.busy - (self._own() - self.own)
            self.others = round(max(0.0, used / capacity), 3)

    def _busy(self) -> float | None:
        """Return the busy seconds of our CPUs since boot; None if the system does not report them."""
        try:
            lines = Path("/proc/stat").read_text().splitlines()
        except OSError:
            return None
        total = 0
        for line in lines:
            name, *fields = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in self.cpus:
                user, nice, system, _, _, irq, soft, steal = map(int, fields[:8])
                total += user + nice + system + irq + soft + steal
        return total / os.sysconf("SC_CLK_TCK")

    def _own(self) -> float:
        return sum(use.ru_utime + use.ru_stime for use in map(resource.getrusage, (resource.RUSAGE_SELF,
                                                                                   resource.RUSAGE_CHILDREN)))

    def describe(self) -> str:
        """Describe the CPU use of other processes, in words."""
        if self.others is None:
            return "CPU use of other processes unknown"
        return f"other processes used {self.others:.0%} of the CPUs"


def disturbance(frames: list[Frame]) -> str | None:
    """Return why measurements with these frames must not be compared; None if they may."""
    probes = [probe for frame in frames for probe in (frame.before, frame.after) if probe]
    if not probes:
        return "no probe"
    for name, factor in (("round_trip_ns", TRIP), ("read_2", READ)):
        values = [probe[name] for probe in probes if probe[name] > 0]
        if values and max(values) > factor * min(values):
            return f"{name} from {min(values):.0f} to {max(values):.0f}"
    others = max((frame.others for frame in frames if frame.others is not None), default=0.0)
    return f"other processes used {others:.0%} of the CPUs" if others > OTHERS else None
