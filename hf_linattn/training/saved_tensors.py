"""What autograd keeps between a forward and its backward pass, on disk."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from hf_linattn.config import require

LEAST_BYTES = 2**16  # smaller tensors stay in memory


@contextmanager
def save_on_disk(folder: str | os.PathLike[str] | None = None, least_bytes: int = LEAST_BYTES) -> Iterator[None]:
    """Keep what autograd saves of the forward inside on disk until its backward pass: `save_on_cpu` a step further.

    With gradient checkpointing that is the input of every layer, [B, N, d] for each, all that still grows with the
    depth: memory is then that of one layer however many there are, as with Reformer's reversible layers (Kitaev et al.
    2020), which make their inputs again and have to be trained so. Without it every activation would go to disk. On a
    CPU set `MALLOC_MMAP_THRESHOLD_=65536` as well, or the C library keeps what was freed.

        with save_on_disk():
            loss = model(**batch).loss
        loss.backward()

    Args:
        folder: where the files go; None is the system's folder for temporary files. Each is removed with its graph.
        least_bytes: tensors that are smaller, and parameters, stay where they are.

    Raises:
        OptionError: `folder` is none.

    >>> x = torch.ones(300, 300, requires_grad=True)
    >>> with save_on_disk():
    ...     y = (2 * x).square().sum()
    >>> torch.equal(torch.autograd.grad(y, x)[0], 8 * torch.ones(300, 300))
    True
    """

    require("folder", folder, folder is None or Path(folder).is_dir(), "an existing folder, or None")

    def pack(tensor: Tensor) -> Tensor | StoredTensor:
        owner = tensor if tensor._base is None else tensor._base
        parameter = owner.is_leaf and owner.requires_grad
        return tensor if parameter or tensor.nbytes < max(1, least_bytes) else StoredTensor(tensor, folder)

    def unpack(packed: Tensor | StoredTensor) -> Tensor:
        return packed.read() if isinstance(packed, StoredTensor) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class StoredTensor:
    """A tensor in a file, which is there as long as this object."""

    def __init__(self, tensor: Tensor, folder: str | os.PathLike[str] | None):
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        handle, self.path = tempfile.mkstemp(dir=folder)
        os.close(handle)
        weakref.finalize(self, Path(self.path).unlink, missing_ok=True)
        self._map(shared=True).copy_(tensor)

    def read(self) -> Tensor:
        """Return the tensor where it was."""
        return self._map(shared=False).to(self.device)

    def _map(self, shared: bool) -> Tensor:
        """Return the file's content; what is written reaches it if it is `shared`."""
        flat = torch.from_file(self.path, shared=shared, size=self.shape.numel(), dtype=self.dtype)
        return flat.view(self.shape)
