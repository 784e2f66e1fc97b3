"""What is in a checkpoint, from headers and indices alone: counts, bytes and dtypes by class, and what is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol

from .header import tensor_bytes
from .inventory import SCALE_SUFFIX, TensorSpec, expected_tensors
from .sources import Source

_VISION = "vision"
UNKNOWN = "unknown"


class Inspectable(Source, Protocol):
    """A source that can tell of its files."""

    format: str

    def faults(self) -> list[str]:
        """What is wrong, each with its file or key and its tensor."""

    def scales(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of the scale of each FP8 weight, by the weight's name."""

    def files(self) -> dict[str, int]:
        """Bytes of each file with tensors."""


@dataclasses.dataclass
class Class:
    """Tensors of one class, scales included."""

    tensors: int = 0
    nbytes: int = 0
    dtypes: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Count a tensor."""
        self.tensors += 1
        self.nbytes += tensor_bytes(dtype, shape)
        self.dtypes[dtype] = self.dtypes.get(dtype, 0) + 1


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What was found.

    Attributes:
        format: "safetensors" or "torch_dist".
        layers: kinds of the layers, as "kda/dense".
        mtp_layers: MTP layers that the config counts.
        files: files with tensors.
        file_bytes: bytes of these files.
        text_tensors, vision_tensors: tensors by released name, scales included; MTP counts as text.
        fp8_matrices: FP8 weights with a scale.
        classes: by class of the inventory, in its order; "unknown" last.
        faults: what is missing, unknown, or of the wrong shape or dtype.
    """

    format: str
    layers: list[str]
    mtp_layers: int
    files: int
    file_bytes: int
    text_tensors: int
    vision_tensors: int
    fp8_matrices: int
    classes: dict[str, Class]
    faults: list[str]

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return dataclasses.asdict(self)


def inspect_source(source: Inspectable) -> Inspection:
    """Count what a source holds; no tensor is read."""
    expected = expected_tensors(source.architecture)
    order = dict.fromkeys(spec.group for spec in expected.values())
    classes = {group: Class() for group in (*order, UNKNOWN)}
    scales = source.scales()
    for name, dtype, shape in _stored(source, scales):
        classes[_class_of(name, expected)].add(dtype, shape)
    files = source.files()
    architecture = source.architecture
    return Inspection(
        format=source.format,
        layers=[f"{a}/{m}" for a, m in zip(architecture.attention_kinds, architecture.mlp_kinds, strict=True)],
        mtp_layers=architecture.num_nextn_predict_layers,
        files=len(files),
        file_bytes=sum(files.values()),
        text_tensors=sum(found.tensors for group, found in classes.items() if group not in (_VISION, UNKNOWN)),
        vision_tensors=classes[_VISION].tensors if _VISION in classes else 0,
        fp8_matrices=sum(source.spec(name).dtype == "F8_E4M3" for name in source.names() if name in scales),
        classes={group: found for group, found in classes.items() if found.tensors},
        faults=source.faults(),
    )


def _stored(source: Inspectable, scales: dict) -> Iterable[tuple[str, str, tuple[int, ...]]]:
    for name in source.names():
        spec = source.spec(name)
        yield name, spec.dtype, tuple(spec.shape)
    for name, (dtype, shape) in scales.items():
        yield name + SCALE_SUFFIX, dtype, shape


def _class_of(name: str, expected: dict[str, TensorSpec]) -> str:
    spec = expected.get(name.removesuffix(SCALE_SUFFIX))
    return UNKNOWN if spec is None else spec.group
