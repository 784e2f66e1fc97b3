"""The hyper-connection around one sub-layer."""

from __future__ import annotations

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from glm5next_plugin.ops.hyper_connection import hc_post, hc_pre

from .float32 import KeepsFloat32
from .parameters import mark_partial_gradient, parameter_device


class HyperConnection(KeepsFloat32, MegatronModule):
    """Mixes the residual streams into a sub-layer's input and its output back into them (``ops.hyper_connection``).

    Replicated over TP; works on the tokens of this rank. Parameters have the disk's names: ``fn``
    ``[(2 + n) * n, n * h]``, ``base`` ``[(2 + n) * n]`` and ``scale`` ``[3]``, the last two always fp32.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__(config=config)
        architecture = config.architecture
        self.streams = architecture.hc_mult
        device = parameter_device(config)
        width = architecture.hc_mix_width
        self.fn = torch.nn.Parameter(
            torch.empty(width, self.streams * config.hidden_size, dtype=config.params_dtype, device=device)
        )
        self.base = torch.nn.Parameter(torch.zeros(width, dtype=torch.float32, device=device))
        self.scale = torch.nn.Parameter(torch.ones(3, dtype=torch.float32, device=device))
        if config.perform_initialization:
            config.init_method(self.fn)
        for parameter in self.parameters():
            mark_partial_gradient(parameter, config)
        self.keep_float32("base", "scale")

    def collapse(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Streams ``[s, b, n * h]`` to the sub-layer's input ``[s, b, h]`` and the mixes for :meth:`spread`."""
        a = self.config.architecture
        return hc_pre(
            self._split(streams), self.fn, self.base, self.scale, a.rms_norm_eps, a.hc_eps, a.hc_sinkhorn_iters
        )

    def spread(
        self, output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> torch.Tensor:
        """The sub-layer's output ``[s, b, h]`` and the streams it started from to new streams ``[s, b, n * h]``."""
        mixed = hc_post(output, self._split(streams), post, comb)
        return mixed.view(streams.shape)

    def _split(self, streams: torch.Tensor) -> torch.Tensor:
        return streams.view(*streams.shape[:-1], self.streams, self.config.hidden_size)
