"""Parameters and buffers that keep every fp32 bit when a wrapper casts the model.

``Float16Module`` and the mixed-precision wrapper of Megatron-Bridge cast whole modules. Five kinds of tensors must not
be rounded: ``A_log``, ``dt_bias``, ``base`` and ``scale`` of the hyper-connections, ``expert_bias``. The module that
owns one of them inherits from :class:`KeepsFloat32` and names it; that is the only list.
"""

from __future__ import annotations

import torch


class KeepsFloat32(torch.nn.Module):
    """Mixin: the tensors named by :meth:`keep_float32` change device, never dtype."""

    def keep_float32(self, *names: str) -> None:
        """Name the parameters and buffers of this module that stay fp32.

        Megatron-Bridge restores parameters (not buffers) from the instance attribute set here after its own wrap, so
        it has to see the same list.
        """
        self._float32_names = names
        self._keep_in_float32_parameter_names = [name for name in names if name in self._parameters]

    def _apply(self, fn, recurse=True):
        kept = [getattr(self, name) for name in self._float32_names]
        kept += [tensor.grad for tensor in kept if tensor.grad is not None]

        def apply(tensor):
            result = fn(tensor)
            if result.dtype != tensor.dtype and any(tensor is one for one in kept):
                return tensor.to(device=result.device, copy=True)
            return result

        return super()._apply(apply, recurse)
