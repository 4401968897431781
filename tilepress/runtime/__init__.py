"""An artifact becomes a model: packed modules and the loader. Kernels below, evaluation above."""
