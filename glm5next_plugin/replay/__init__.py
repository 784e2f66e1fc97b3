"""What routers and indexers chose, recorded in one forward pass and repeated in another; knows no framework."""

from .record import Kind, ReplayRecord, kind_layers, kind_width
from .rows import join_layers, packed_choices

__all__ = ["Kind", "ReplayRecord", "join_layers", "kind_layers", "kind_width", "packed_choices"]
