"""A stand-in for OpenBLAS with the arithmetic of mpool's numeric contract, which therefore serves on every machine."""

import subprocess
from pathlib import Path
from platform import machine

#: The functions of OpenBLAS that mpool uses. Outputs are computed 16 at a time, so that the compiler can use vectors.
SOURCE = """
#include <math.h>
enum { WIDE = 16 };
void openblas_set_num_threads(int count) { (void)count; }
char *openblas_get_corename(void) { return "Model"; }
void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
    (void)order, (void)trans_a, (void)trans_b, (void)alpha;
    static _Thread_local float panel[1024][WIDE];
    for (int j0 = 0; j0 < n; j0 += WIDE) {
        const int wide = n - j0 < WIDE ? n - j0 : WIDE;
        for (int j = 0; j < WIDE; j++)
            for (int p = 0; p < k; p++)
                panel[p][j] = j < wide ? b[(long)(j0 + j) * ldb + p] : 0;
        for (long i = 0; i < m; i++) {
            float chain[WIDE] = {0};
            for (int p = 0; p < k; p++)
                for (int j = 0; j < WIDE; j++)
                    chain[j] = fmaf(a[i * lda + p], panel[p][j], chain[j]);
            for (int j = 0; j < wide; j++)
                c[i * ldc + j0 + j] = beta == 0 ? chain[j] : c[i * ldc + j0 + j] + chain[j];
        }
    }
}
"""


def build(folder: Path) -> Path:
    """Compile the stand-in into an existing folder. Returns the library."""
    source, library = folder / "model.c", folder / "libmodel.so"
    source.write_text(SOURCE)
    flags = ["-O3", "-ffp-contract=off", "-fno-trapping-math"]
    if machine() == "x86_64":
        flags += ["-mavx2", "-mfma"]
    subprocess.run(["gcc", *flags, "-shared", "-fPIC", str(source), "-o", str(library), "-lm"], check=True)
    return library
