"""Triton kernels of the methods to compare with. Import a module only to run its kernels: it imports Triton."""
