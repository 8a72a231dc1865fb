"""Tests of the GPU kernels on machines without a GPU.

Triton decides when it is imported whether kernels are interpreted or compiled, so what needs the interpreter lies in
`interpreted/`, and `test_interpreted` runs it in processes of its own.
"""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
