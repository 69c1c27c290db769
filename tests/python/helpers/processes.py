"""Scripts that use mpool, run in separate processes."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

#: Prints how much later than asked a process without other work wakes, which is the machine's share of a delay.
LATENESS = """
import os, time
worst, parent = 0.0, os.getppid()
print("started", flush=True)
while os.getppid() == parent:
    at = time.monotonic()
    time.sleep(0.05)
    late = time.monotonic() - at - 0.05
    if late > worst:
        worst = late
        print(worst, flush=True)
"""

#: Part of a script that measures delays: `lateness()` ends the measurement and returns the machine's share, in seconds.
METER = f"""
import subprocess
meter = subprocess.Popen([sys.executable, "-c", {LATENESS!r}], stdout=subprocess.PIPE, text=True)
meter.stdout.readline()
def lateness():
    meter.terminate()
    return max(map(float, meter.communicate()[0].split()), default=0.0)
"""

HEAD = """
import faulthandler, json, os, signal, sys, threading, time
faulthandler.dump_traceback_later(100, exit=True)
import numpy as np
import mpool
bert, llama = sys.argv[1:3]

def idle():
    for _ in range(500):
        if not any(row.running or row.queued for row in mpool.ps()):
            return True
        time.sleep(0.01)
    return False
"""


def process(script: str, *models: Path, **environment: str) -> tuple[int, str, str]:
    """Run a script with the models' paths as arguments. Returns exit status, standard output and standard error."""
    done = subprocess.run([sys.executable, "-c", HEAD + script, *map(str, models)], capture_output=True, text=True,
                          timeout=150, cwd=tempfile.gettempdir(), env={**os.environ, **environment})
    return done.returncode, done.stdout, done.stderr


def script_result(script: str, *models: Path, **environment: str) -> Any:
    """Return the last line that a script prints, parsed as JSON. Fails if the script exits with another code than 0 or
    writes to standard error."""
    status, out, err = process(script, *models, **environment)
    assert status == 0 and not err.strip(), f"exit {status}\n{out}\n{err}"
    return json.loads(out.splitlines()[-1])
