"""How a model is spread over GPUs: parallel sizes and the layers of each pipeline stage."""

from __future__ import annotations

import dataclasses

from glm5next_plugin.architecture import Architecture
from glm5next_plugin.errors import InputError


@dataclasses.dataclass(frozen=True)
class ParallelLayout:
    """Parallel sizes in Megatron's terms; a split expert (expert tensor parallel) is not supported.

    Attributes:
        gpus: ranks in all.
        tensor, pipeline, expert, context: sizes of the groups.
        layers_per_stage: decoder layers of each pipeline stage; stage 0 also has the embedding, the last one the final
            norm and the head.
    """

    gpus: int
    tensor: int
    pipeline: int
    expert: int
    context: int
    layers_per_stage: tuple[int, ...]

    @property
    def data(self) -> int:
        """Replicas of the dense part that see different sequences."""
        return self.gpus // (self.tensor * self.context * self.pipeline)

    @property
    def dense_replicas(self) -> int:
        """Ranks that hold the same dense parameters: the optimizer's state is split over them."""
        return self.data * self.context

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts."""
        return self.gpus // (self.expert * self.pipeline)

    def stage_layers(self, stage: int) -> range:
        """0-based layers of a stage."""
        first = sum(self.layers_per_stage[:stage])
        return range(first, first + self.layers_per_stage[stage])

    def __str__(self) -> str:
        stages = "/".join(str(count) for count in self.layers_per_stage)
        return (
            f"TP {self.tensor} x PP {self.pipeline} x EP {self.expert} x CP {self.context}, "
            f"DP {self.data}, layers {stages}"
        )


def split_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, as even as first-stage and last-stage overrides allow: those between have as many each.

    What is left over goes to the last stage, with two stages to the first: 23/22, 15/15/15, 11/11/11/12.

    Raises:
        InputError: more stages than layers.
    """
    if not 1 <= stages <= layers:
        raise InputError(f"{stages} pipeline stages for {layers} layers; needed: 1 to {layers}, a layer each at least")
    if stages <= 2:
        return (layers,) if stages == 1 else (layers - layers // 2, layers // 2)
    candidates = []
    for between in (layers // stages, -(-layers // stages)):
        ends = layers - between * (stages - 2)
        if ends >= 2:
            candidates.append((ends // 2, *[between] * (stages - 2), ends - ends // 2))
    return min(candidates, key=max)


def make_layout(
    architecture: Architecture,
    gpus: int,
    *,
    tensor: int,
    pipeline: int,
    expert: int,
    context: int = 1,
) -> ParallelLayout:
    """A layout of ``architecture`` on ``gpus`` ranks, checked.

    Raises:
        InputError: every reason why it cannot work, with the arithmetic.
    """
    a, faults = architecture, []
    for name, size in (("TP", tensor), ("PP", pipeline), ("EP", expert), ("CP", context)):
        if size < 1:
            faults.append(f"{name} is {size}; needed: at least 1")
    if faults:
        raise InputError("; ".join(faults))
    dense = tensor * context * pipeline
    if gpus % dense:
        faults.append(f"TP {tensor} x CP {context} x PP {pipeline} needs a multiple of {dense} ranks; there are {gpus}")
    if gpus % (expert * pipeline):
        faults.append(f"EP {expert} x PP {pipeline} needs a multiple of {expert * pipeline} ranks; there are {gpus}")
    for what, count in (("attention heads", a.num_attention_heads), ("intermediate_size", a.intermediate_size)):
        if count % tensor:
            faults.append(f"TP {tensor} does not divide {count} ({what})")
    if a.vocab_size % tensor:
        faults.append(f"TP {tensor} does not divide the vocabulary of {a.vocab_size}")
    if a.kda_num_heads % (tensor * context):
        faults.append(f"TP {tensor} x CP {context} does not divide the {a.kda_num_heads} KDA heads")
    if a.n_routed_experts % expert:
        faults.append(f"EP {expert} does not divide the {a.n_routed_experts} routed experts")
    if pipeline > a.num_hidden_layers:
        faults.append(f"PP {pipeline} is more than the {a.num_hidden_layers} layers")
    if faults:
        raise InputError("; ".join(faults))
    return ParallelLayout(gpus, tensor, pipeline, expert, context, split_layers(a.num_hidden_layers, pipeline))
