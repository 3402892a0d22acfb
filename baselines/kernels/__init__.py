"""Triton kernels of the baselines. Import a module only when its kernels are to run: it imports Triton."""
