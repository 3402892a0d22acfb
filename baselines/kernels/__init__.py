"""Triton kernels of the methods to compare with."""
