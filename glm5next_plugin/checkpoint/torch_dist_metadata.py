"""Reading ``.metadata`` of a torch_dist checkpoint without running what a pickle can run.

Only the record classes of ``torch.distributed.checkpoint`` are accepted, and stand-ins take their place: importing the
real ones takes longer than reading most checkpoints.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

_RECORDS = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "StorageMeta",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "TensorProperties",
    )
} | {("torch.distributed.checkpoint.filesystem", "_StorageInfo")}
_ENUMERATIONS = {("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")}
_PLAIN = {
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
}


class Record:
    """A record of the pickle: its fields are attributes, ``kind`` is its class's name."""

    kind: str

    def __setstate__(self, state: Any) -> None:
        # TensorProperties has a tuple, which starts with the dtype
        self.__dict__.update(state if isinstance(state, dict) else {"dtype": state[0]})


def read_metadata(file: Path) -> Record:
    """The ``Metadata`` record of a file, with the fields that torch gives it.

    Raises:
        pickle.UnpicklingError: the file holds something else.
        OSError: it cannot be read.
    """
    with file.open("rb") as stream:
        try:
            found = _Unpickler(stream).load()
        except (pickle.UnpicklingError, OSError):
            raise
        except Exception as error:  # of a damaged pickle, whatever the records' classes make of what they get
            raise pickle.UnpicklingError(f"{type(error).__name__}: {error!s:.200}") from error
    if getattr(found, "kind", None) != "Metadata":
        raise pickle.UnpicklingError(f"it holds {type(found).__name__}, not Metadata")
    return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return _RECORD_TYPES[name]
        if (module, name) in _ENUMERATIONS:
            return lambda value: value
        if (module, name) in _PLAIN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        if module.startswith("pathlib"):
            return lambda *parts: "/".join(parts)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in it")


_RECORD_TYPES = {name: type(name, (Record,), {"kind": name}) for _, name in _RECORDS}
