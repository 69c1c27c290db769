"""``python -m benchmarks maxsim``: MaxSim compared with torch, for 1,000 documents of 128 tokens of 128 components and
one query of 32 tokens.

Every turn runs torch (einsum, maximum, sum), mpool in float32 and mpool in int8 one after the other, in an order that
alternates, with the same number of threads. A line for each gives the minimum and the median of its times, and the
median over the turns of the ratio of torch's time to its own. The load average is printed before and after.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable

import numpy as np
import torch

import mpool

from .options import add_json, parser_of
from .record import Recorder

DOCUMENTS, TOKENS, QUERY, DIM = 1000, 128, 32, 128


def main() -> int:
    """Run the command line."""
    parser = parser_of("maxsim", __doc__)
    parser.add_argument("--turns", type=int, default=200, help="number of turns (default: %(default)s)")
    add_json(parser)
    args = parser.parse_args()
    random = np.random.default_rng(0)
    query = random.standard_normal((QUERY, DIM), np.float32)
    documents = random.standard_normal((DOCUMENTS, TOKENS, DIM), np.float32)
    small = mpool.quantize_tokens(documents)
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    tensors = torch.from_numpy(query), torch.from_numpy(documents)

    def by_torch() -> torch.Tensor:
        with torch.inference_mode():
            return torch.einsum("qd,ntd->nqt", *tensors).amax(2).sum(1)

    calls: dict[str, Callable[[], object]] = {
        "torch": by_torch, "mpool:float32": lambda: mpool.maxsim(query, documents),
        "mpool:int8": lambda: mpool.maxsim(query, small)}
    np.testing.assert_allclose(by_torch().numpy(), mpool.maxsim(query, documents), rtol=1e-4)  # type: ignore[arg-type]
    print(f"torch {torch.__version__}, mpool {mpool.__version__}, {threads} threads, n = {args.turns}")
    print(f"load {os.getloadavg()}")
    recorder = Recorder("maxsim", threads, documents=DOCUMENTS, tokens=TOKENS, query=QUERY, components=DIM)
    recorder.versions["torch"] = torch.__version__
    times = recorder.rotate("maxsim", "one query ms", lambda seconds: 1e3 * seconds, calls, args.turns)
    for name, taken in times.items():
        ratio = statistics.median(other / own for other, own in zip(times["torch"], taken))
        print(f"{name:14} {min(taken):7.2f} ms at least, {statistics.median(taken):7.2f} median, {ratio:5.2f}x torch")
    if args.json:
        recorder.write(args.json)
    print(f"load {os.getloadavg()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
