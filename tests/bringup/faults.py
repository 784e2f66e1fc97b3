"""One fault each, planted in trainer or engine before they are built: ``worker_setup`` callables."""

import torch

TRAINER = "glm5next_plugin.adapters.megatron.bringup_trainer:MegatronTrainer"
SYNCED = "model.language_model.layers.2.self_attn.o_proj.weight"


def _adapter():
    """The adapter with Megatron imported."""
    from glm5next_plugin.adapters.megatron import registration

    registration.register()


def _after_build(change):
    """Call ``change(model)`` for every chunk of a trainer that was just built."""
    from megatron.core.utils import unwrap_model

    from glm5next_plugin.adapters.megatron.bringup_trainer import MegatronTrainer

    right = MegatronTrainer.__init__

    def build(self, **arguments):
        right(self, **arguments)
        for model in unwrap_model(self._models):
            change(model)

    MegatronTrainer.__init__ = build


def tensor_not_loaded(target):
    """The engine keeps the first value that it got of one tensor."""
    if target == TRAINER:
        return
    from glm5next_plugin.bringup import engine

    right, kept = engine.HfEngine.load, {}

    def load(self, directory):
        held = right(self, directory)
        weight = self._model.get_parameter(SYNCED)
        if kept:
            weight.data.copy_(kept["weight"])
            return held | {SYNCED: engine.digest(weight)}
        kept["weight"] = weight.detach().clone()
        return held

    engine.HfEngine.load = load


def tensor_not_exported(target):
    """The trainer exports the first value of one tensor for ever, digest included."""
    if target != TRAINER:
        return
    from glm5next_plugin.adapters.megatron.bringup_trainer import MegatronTrainer

    right, kept = MegatronTrainer._released, {}

    def released(self):
        for name, tensor in right(self):
            yield name, kept.setdefault(name, tensor.clone()) if name == SYNCED else tensor

    MegatronTrainer._released = released


def beta_dropped(target):
    """KDA writes with a strength of 1 instead of beta."""
    if target != TRAINER:
        return
    _adapter()
    from glm5next_plugin.adapters.megatron import kda as module

    right = module.kda
    module.kda = lambda q, k, v, decay, beta, *rest: right(q, k, v, decay, torch.ones_like(beta), *rest)


def clamp_off(target):
    """No SwiGLU is clamped."""
    if target != TRAINER:
        return
    _adapter()
    from glm5next_plugin.adapters.megatron import mlp as module

    right = module.clamped_swiglu
    module.clamped_swiglu = lambda gate_up, limit: right(gate_up, 1e9)


def a_log_rounded(target):
    """A_log went through bf16."""
    if target != TRAINER:
        return
    _adapter()

    def change(model):
        for name, parameter in model.named_parameters():
            if name.endswith(".A_log"):
                parameter.data.copy_(parameter.data.to(torch.bfloat16))

    _after_build(change)


def raw_latent_into_indexer(target):
    """The indexer's query comes from the latent before its norm."""
    if target != TRAINER:
        return
    _adapter()
    from glm5next_plugin.adapters.megatron.dsa import SparseLatentAttention
    from glm5next_plugin.adapters.megatron.indexer import PooledIndexer

    right = PooledIndexer.forward
    PooledIndexer.forward = lambda self, hidden, latent, boundaries: right(self, hidden, self.raw_latent, boundaries)

    def change(model):
        for module in model.modules():
            if isinstance(module, SparseLatentAttention):
                module.q_layernorm.register_forward_hook(
                    lambda norm, args, output, indexer=module.indexer: setattr(indexer, "raw_latent", args[0])
                )

    _after_build(change)


def nan_in_a_weight(target):
    """The trainer's output head has one NaN."""
    if target != TRAINER:
        return
    _adapter()
    _after_build(lambda model: model.output_layer.weight.data[7, 3].fill_(float("nan")))
