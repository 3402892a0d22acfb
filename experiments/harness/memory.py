"""Memory of one point given back before the next one of the same process asks for it."""

import gc
import sys
from collections.abc import Callable, Hashable
from functools import wraps
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def give_back() -> None:
    """Free what only reference cycles hold, of our own or of a library, and hand unused device memory back."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        # cuBLAS keeps 32 MiB for every stream that it has run on, and each point has streams of its own.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def keep_last(key: Callable[_P, Hashable]) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Keep the last result for as long as ``key`` of the arguments stays the same.

    Unlike ``lru_cache(maxsize=1)`` it lets the last result go before it makes the next: two models need not fit.
    """

    def decorate(make: Callable[_P, _T]) -> Callable[_P, _T]:
        kept: dict[Hashable, _T] = {}

        @wraps(make)
        def made(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            wanted = key(*args, **kwargs)
            if wanted not in kept:
                kept.clear()
                give_back()
                kept[wanted] = make(*args, **kwargs)
            return kept[wanted]

        return made

    return decorate
