"""Triton kernels of the baselines, one family a file. Import a module only when its kernels are to run."""
