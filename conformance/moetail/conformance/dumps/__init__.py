"""Save calls of the operations to files, and judge them later, without the kernel or a GPU.

``capture`` saves what a call was given and what it returned; ``judge_files`` gives the verdict that
``moetail check`` would give on that call::

    with capture("dumps", my_package.tail, calls=range(100, 101)):
        run_the_model()
    # and then, anywhere:  moetail judge dumps/*.safetensors

A file is one call on one rank, in safetensors format: the tensors, and under the metadata key
``moetail`` a JSON object with everything else (see :mod:`.content`). Numbers are kept exactly
(floats in hexadecimal), strides too. A checksum of the whole file keeps a damaged one from being
taken for a wrong kernel.
"""

import moetail.conformance.extra  # noqa: F401
from moetail.conformance.dumps.capturing import Capture, Mapped, capture, install
from moetail.conformance.dumps.files import Dump, DumpError, load_dump, write_dump
from moetail.conformance.dumps.judging import judge_dumps, judge_files

__all__ = [
    "Capture",
    "Dump",
    "DumpError",
    "Mapped",
    "capture",
    "install",
    "judge_dumps",
    "judge_files",
    "load_dump",
    "write_dump",
]
