"""The projections whose weight is whole on every TP rank."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from .parameters import mark_partial_gradient, parameter_device


class ReplicatedLinear(torch.nn.Linear):
    """A linear without bias, replicated over TP and applied to this rank's tokens.

    Under sequence parallel the weight gradient is a partial sum over the tokens of a rank; the ``sequence_parallel``
    mark makes megatron-core add it up over TP. A plain ``torch.nn.Linear``, so that PEFT recognises it.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig):
        device = parameter_device(config)
        super().__init__(input_size, output_size, bias=False, device=device, dtype=config.params_dtype)
        if config.perform_initialization:
            config.init_method(self.weight)
        mark_partial_gradient(self.weight, config)
