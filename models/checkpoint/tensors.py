"""What a checkpoint is to the loader: named tensors that are read one at a time."""

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import numpy as np


class TensorStore(Protocol):
    """Opening a store has checked its layout; `read` may still refuse a tensor's type.

    `read` returns a fresh array that the caller owns, in float64, float32, float16 or bfloat16;
    `where` names the file and the tensor for a message, `path` is the file or directory as a whole.
    """

    @property
    def path(self) -> Path: ...

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> np.ndarray: ...

    def where(self, name: str) -> str: ...
