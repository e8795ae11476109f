"""Set before anything starts CUDA."""

import os

# Loading a kernel on its first launch may wait for the GPU to be idle; of virtual ranks, one waits
# on the GPU for another, whose kernel would then never come.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
