#!/usr/bin/env python3
"""Check the workflows, the container file, the Kubernetes manifest and the systemd unit with their linters.

    pip install ".[lint]"
    python tools/lint_deploy.py

None of these linters needs a network, Docker or a cluster. systemd-analyze belongs to Debian's package systemd; without
it, the unit is not checked, and the output says so.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Commands of the linters.
LINTERS = [["zizmor", "--offline", "--no-progress", ".github"],
           ["hadolint", "--failure-threshold", "style", "deploy/Dockerfile"],
           ["kubernetes-validate", "--strict", "deploy/kubernetes.yaml"]]
#: Highest exposure of the unit that passes, in tenths of systemd-analyze's scale from 0 (safe) to 10.
EXPOSURE = 20


def path() -> str:
    """The search path, with the folder of this Python's commands first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def missing() -> list[str]:
    """Return the linters that are not installed."""
    return [command[0] for command in LINTERS if shutil.which(command[0], path=path()) is None]


def run(*command: str) -> bool:
    """Run a command in the repository. Print its output if it fails."""
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={**os.environ, "PATH": path()})
    print(f"{'failed' if done.returncode else 'passed'}: {' '.join(command)}")
    if done.returncode:
        print(done.stdout)
    return done.returncode == 0


def check_unit() -> bool:
    """Check the systemd unit, with a command that exists on this machine."""
    if shutil.which("systemd-analyze") is None:
        print("not checked: deploy/mpool.service, because systemd-analyze is not installed")
        return True
    text = (ROOT / "deploy" / "mpool.service").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        unit = Path(folder, "mpool.service")
        unit.write_text(text.replace("/opt/mpool/bin/mpool", "/bin/true"), encoding="utf-8")
        verified = run("systemd-analyze", "verify", str(unit))
        return run("systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSURE}", str(unit)) and verified


def main() -> int:
    """Run every linter; the exit code is 1 if one fails or is not installed."""
    if missing():
        print(f"not installed: {', '.join(missing())}; run: pip install '.[lint]'")
        return 1
    return int(not all([run(*command) for command in LINTERS] + [check_unit()]))


if __name__ == "__main__":
    sys.exit(main())
