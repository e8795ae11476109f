"""Set before anything starts CUDA."""

import os

# Loading a kernel on its first launch may wait for the GPU to be idle; of virtual ranks, one waits
# on the GPU for another, whose kernel would then never come.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

# Streams that share a connection to the GPU run one after the other, and so would virtual ranks.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
