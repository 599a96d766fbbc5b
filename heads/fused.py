"""torch.compile of the small pure functions of a training step: norms, activations, rotations.

Off unless `switch` turns it on (train.compile): on a GPU each saves several passes over its rows; on a CPU compiling costs more
than a short run wins. Where compiling fails, the plain function goes on, and one line says so.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from headwright.configs import reason
from headwright.configs.console import say

Function = TypeVar("Function", bound=Callable[..., Any])


class State:
    """Whether fused functions are compiled."""

    on = False


def switch(mode: str, device: torch.device) -> None:
    """on, off, or auto: on GPUs."""
    State.on = mode == "on" or (mode == "auto" and device.type == "cuda")


def fused(function: Function) -> Function:
    """A function of tensors that may be compiled, for any number of rows. Gradients are the business of its caller."""

    @functools.cache  # not at import: the compiler takes seconds to load
    def compiled() -> Callable[..., Any]:
        return torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        if not State.on or torch.compiler.is_compiling():
            return function(*arguments)
        try:
            # else a version of its own for every combination of what requires a gradient
            return compiled()(*(part.detach() if isinstance(part, torch.Tensor) else part for part in arguments))
        except Exception as error:  # whatever the compiler raises: it is only faster, never needed
            State.on = False
            say(f"torch.compile is off from here on: {type(error).__name__}: {reason(error)}")
            return function(*arguments)

    return call  # type: ignore[return-value]
