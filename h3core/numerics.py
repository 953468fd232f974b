"""What decides the bits of a CPU run besides its code. Imports nothing, so that it can be set before torch loads.

MKL picks kernels by the number of rows, by how operands are aligned and by the number of threads. Its
conditional numerical reproducibility in strict mode takes the alignment and (from four rows on) the rows out.
Seen with torch 2.11 on an Intel Xeon with AMX, fp32 and fp64: `AVX2` alone gives other bits at 7, 8 and 44 of
177 rows, and at ten of fourteen sizes where K is 1,152 or more; `AVX2,STRICT` at none.
"""

from typing import Final

MKL_CBWR: Final = "AVX2,STRICT"
"""Value of the environment variable MKL_CBWR. MKL reads it at its first call."""
