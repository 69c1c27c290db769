"""ik_llama.cpp through its own programs, ``llama-bench`` and ``llama-batched-bench``.

ik_llama.cpp has no Python package: ``--program ik=FOLDER`` names the folder of its programs. The programs generate
their own token ids, which changes no rate. Each figure is the better one of two runs, with and without repacking at run
time. For eight sequences the programs report the decode rate alone, without prefill. If ``streams`` is 0, several
sequences are not measured.

``llama-batched-bench`` gives every sequence the same token at every position. All sequences of an MoE model then choose
the same experts, and the model reads a fraction of the weights that different sequences read. Before eight sequences of
such a model are compared, build it with random tokens: ``std::rand() % llama_n_vocab(model)`` in place of 0 in its two
calls of ``common_batch_add`` after the warm-up.
"""

import json
import resource
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

#: Repacking at run time, off and on.
REPACKING = (0, 1)


class IkLlama:
    """Measures a whole topic in one call: the programs do not accept prompts."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.version = "?"  #: commit that the programs were built from

    def imports(self) -> None:
        """Do nothing: there is no Python library to import."""

    def measures(self, task: dict[str, Any]) -> dict[str, Any]:
        """Return the same measures as ``worker.generate``."""
        best: dict[str, list[float]] = {}
        for repacking in REPACKING:
            together = self._together(task, repacking) if task["streams"] else []
            for name, rates in (*self._alone(task, repacking), *together):
                best[name] = max(rates, best.get(name, [0.0]), key=statistics.median)
        used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6
        return {"measures": {name: statistics.median(rates) for name, rates in best.items()}, "samples": best,
                "rss MB": used, "version": self.version}

    def _run(self, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as scratch:  # the program writes a log into its working directory
            done = subprocess.run([str((self.folder / program).resolve()), *map(str, arguments)], capture_output=True,
                                  text=True, cwd=scratch)
        if done.returncode != 0:
            raise RuntimeError(f"{program}: {done.stderr.strip()[-400:]}")
        return done

    def _alone(self, task: dict[str, Any], repacking: int) -> list[tuple[str, list[float]]]:
        depths = [item for depth in task["depths"] for item in ("-gp", f"{depth},{task['write']}")]
        rows = json.loads(self._run(
            "llama-bench", "-m", task["path"], "-t", task["threads"], "-fa", 1, "-rtr", repacking, "-n", 0, "-o",
            "json", "-r", task["repeat"], "-p", ",".join(map(str, task["prompts"])), *depths).stdout)
        found = []
        self.version = rows[0].get("build_commit", "?")
        for row in rows:
            # a row of decode after a prompt is called "tg64@pp512"; its rates are of the decode alone
            prompt, written = row["n_prompt"], row["n_gen"]
            name = f"tg@{prompt}" if written else f"pp{prompt}"
            found.append((f"{name} tokens/s", [float(rate) for rate in row["samples_ts"]]))
        return found

    def _together(self, task: dict[str, Any], repacking: int) -> list[tuple[str, list[float]]]:
        streams, prompt, written = task["streams"], task["depths"][0], task["write"]
        done = self._run("llama-batched-bench", "-m", task["path"], "-c", streams * (prompt + written) + 64, "-b", 2048,
                          "-ub", 512, "-npp", prompt, "-ntg", written, "-npl",
                         ",".join([str(streams)] * task["repeat"]), "-fa", "on", "-t", task["threads"],
                         *["-rtr"] * repacking)
        cells = [line.strip("| \n").split("|") for line in (done.stdout + done.stderr).splitlines()
                 if line.startswith("|")]
        head = [cell.strip() for cell in cells[0]]
        rates = [float(row[head.index("S_TG t/s")]) for row in cells if row[0].strip().isdigit()]
        return [(f"{streams} streams tokens/s", rates)]
