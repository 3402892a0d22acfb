"""Imported before all else: without a GPU, kernels run in Triton's interpreter.

Triton reads the variable when it is first imported, and much of torch and transformers imports it.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
