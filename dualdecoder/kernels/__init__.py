"""Triton kernels, one family a file. Import a module only when its kernels are to run: it imports Triton."""
