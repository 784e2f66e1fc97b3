"""Launch shapes by name, nodes x GPUs a node, and the layouts that the recipes use on them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """A cluster.

    Attributes:
        nodes, gpus_per_node: its size.
        gpu: what is in it.
        gpu_memory: GiB a GPU.
        sizes: (TP, PP, EP) of each variant.
    """

    nodes: int
    gpus_per_node: int
    gpu: str
    gpu_memory: float
    sizes: dict[str, tuple[int, int, int]]

    @property
    def gpus(self) -> int:
        """In all."""
        return self.nodes * self.gpus_per_node


# 288 GB and 141 GB as their makers count them
_GB300 = dict(gpus_per_node=4, gpu="GB300", gpu_memory=268.2)
_SLICES = {"8layer": (2, 2, 2), "4layer": (2, 2, 2)}
SHAPES = {
    "16x4": Shape(16, **_GB300, sizes={"full": (8, 4, 16), **_SLICES}),
    "8x4": Shape(8, **_GB300, sizes={"full": (8, 4, 8), **_SLICES}),
    "6x4": Shape(6, **_GB300, sizes={"full": (8, 3, 8), **_SLICES}),
    # two stages of the 8-layer slice do not fit: nearly all its experts would be on the second one
    "1x8": Shape(1, 8, "H200", 131.3, {"full": (8, 1, 8), **_SLICES, "8layer": (2, 1, 8)}),
}
