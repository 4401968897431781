"""Times kernels, decode loops and models of well-known shapes."""
