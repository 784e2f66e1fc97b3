"""What single-process tests of the adapter run in a pool process; each returns plain tensors and strings."""

from __future__ import annotations

from typing import Any

import torch

from .layout_runs import build, direction
from .packed_batch import PackedBatch
from .process_pool import Layout

FP32_SUFFIXES = ("A_log", "dt_bias", "_hc.base", "_hc.scale", "router.expert_bias")


def _named_fp32(models) -> dict[str, torch.Tensor]:
    from megatron.core.utils import unwrap_model

    (model,) = unwrap_model(models)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor for name, tensor in tensors if name.endswith(FP32_SUFFIXES)}


def fp32_kinds_through_a_bf16_run(layout: Layout, checkpoint: str, scratch: str) -> dict[str, Any]:
    """Wrap in bf16 and DDP, step with a zero learning rate, save and load torch_dist, export with a bf16 cast."""
    import tempfile
    from pathlib import Path

    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from glm5next_plugin.adapters import megatron as adapter

    bridge, provider, models = build(layout, checkpoint, dtype="bfloat16")
    stages: dict[str, Any] = {"wrapped": {n: t.detach().clone() for n, t in _named_fp32(models).items()}}
    stages["dtypes"] = sorted({str(p.dtype) for p in models[0].parameters()})
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=0.0, weight_decay=0.0, bf16=True, params_dtype=torch.bfloat16), models
    )
    output = models[0](input_ids=torch.arange(1, 40).view(1, -1), position_ids=None, attention_mask=None)
    (output.float() * direction(output.shape, 0)).mean().backward()
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(models)
    stages["stepped_ok"] = bool(optimizer.step()[0])
    stages["stepped"] = {n: t.detach().clone() for n, t in _named_fp32(models).items()}
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        adapter.save_torch_dist(models, directory)
        for tensor in _named_fp32(models).values():
            tensor.data.zero_()
        adapter.load_torch_dist(models, directory)
    stages["loaded"] = {n: t.detach().clone() for n, t in _named_fp32(models).items()}
    exported = bridge.export_hf_weights(models, cpu=True, show_progress=False, weight_dtype=torch.bfloat16)
    stages["exported"] = {name: tensor.clone() for name, tensor in exported}
    target = Path(scratch) / "exported"
    adapter.save_checkpoint(bridge, models, target, dtype="bfloat16")
    return stages


def fp32_kinds_cast_by_plain_megatron(layout: Layout, checkpoint: str) -> dict[str, dict[str, torch.Tensor]]:
    """What megatron-core's own Float16Module, and after it ``.bfloat16()``, leave of the fp32 kinds."""
    from megatron.core.transformer.module import Float16Module

    from glm5next_plugin.adapters import megatron as adapter

    adapter.initialize()
    provider = adapter.AutoBridge.from_hf_pretrained(checkpoint).to_megatron_provider()
    provider.apply_overrides_and_finalize(dtype=torch.bfloat16)
    models = provider.provide_distributed_model(wrap_with_ddp=False, mixed_precision_wrapper=None)
    wrapped = Float16Module(provider, models[0])
    found = {"Float16Module": {n: t.detach().clone() for n, t in _named_fp32([wrapped]).items()}}
    wrapped.bfloat16()
    found["bfloat16"] = {n: t.detach().clone() for n, t in _named_fp32([wrapped]).items()}
    return found


def error_of_build(layout: Layout, checkpoint: str, settings: dict[str, Any]) -> str:
    """The message of the error that building with these provider settings raises, or ``""``."""
    from glm5next_plugin.adapters import megatron as adapter
    from glm5next_plugin.errors import InputError

    adapter.initialize()
    provider = adapter.AutoBridge.from_hf_pretrained(checkpoint).to_megatron_provider()
    provider.finalize()
    for name, value in settings.items():
        setattr(provider, name, value)
    try:
        provider.provide(pre_process=True, post_process=True)
    except InputError as error:
        return str(error)
    return ""


def error_of_load(layout: Layout, checkpoint: str) -> str:
    """The message of the error that loading a checkpoint raises, or ``""``."""
    from glm5next_plugin.errors import InputError

    try:
        build(layout, checkpoint, ddp=False)
    except InputError as error:
        return str(error)
    return ""


def errors_of_an_incomplete_table(layout: Layout, checkpoint: str) -> dict[str, str]:
    """The errors of loading with a line taken out of the bridge's table, and with one that maps a tensor twice."""
    from glm5next_plugin.adapters.megatron.registration import register

    register()
    from glm5next_plugin.adapters.megatron import names as table

    errors = {}
    name, disk = "ffn_hc.scale", table.REPLICATED["ffn_hc.scale"]
    try:
        del table.REPLICATED[name]
        errors["unmapped"] = error_of_load(layout, checkpoint)
        table.REPLICATED[name] = table.REPLICATED["attn_hc.scale"]
        errors["unread"] = error_of_load(layout, checkpoint)
    finally:
        table.REPLICATED[name] = disk
    return errors


def logits_from_torch_dist(layout: Layout, checkpoint: str, weights: str, tokens: torch.Tensor) -> torch.Tensor | None:
    """Overwrite every weight, load a distributed checkpoint, and run; the logits, on the last stage."""
    from megatron.core.utils import unwrap_model

    from glm5next_plugin.adapters import megatron as adapter

    _, _, models = build(layout, checkpoint, ddp=False)
    for model in unwrap_model(models):
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data.fill_(0.5)
    adapter.load_torch_dist(models, weights)
    return _logits(models, tokens)


def logits_from_megatron_bridge(layout: Layout, weights: str, tokens: torch.Tensor) -> torch.Tensor | None:
    """Let Megatron-Bridge build the model of a distributed checkpoint and load it; the logits, on the last stage."""
    from glm5next_plugin.adapters import megatron as adapter

    adapter.initialize(layout.tp, layout.pp, layout.ep)
    from megatron.bridge.training.model_load_save import load_megatron_model
    from megatron.bridge.training.utils.checkpoint_utils import read_run_config, read_train_state

    for cached in (read_run_config, read_train_state):
        cached.cache_clear()  # both broadcast: a rank that remembers an earlier layout would not take part

    sizes = dict(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        sequence_parallel=layout.tp > 1,
        parallel_output=False,
    )
    models = load_megatron_model(weights, use_cpu_init=True, mp_overrides=sizes)
    return _logits(models, tokens)


def _logits(models: list, tokens: torch.Tensor) -> torch.Tensor | None:
    """Logits of a batch through the pipeline, on the last stage."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    kept = []

    def step(iterator, model):
        next(iterator)
        output = model(input_ids=tokens, position_ids=None, attention_mask=None)
        return output, lambda output: (kept.append(output.clone()) or output.mean(), {})

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter([0]),
            model=models,
            num_microbatches=1,
            seq_length=tokens.shape[1],
            micro_batch_size=tokens.shape[0],
            forward_only=True,
        )
    return kept[0] if parallel_state.is_pipeline_last_stage() else None


def save_torch_dist(layout: Layout, checkpoint: str, weights: str) -> None:
    """Save the weights of a checkpoint as a distributed checkpoint."""
    from glm5next_plugin.adapters import megatron as adapter

    _, _, models = build(layout, checkpoint, ddp=False)
    adapter.save_torch_dist(models, weights)


def mlp_with_large_preactivations(layout: Layout, checkpoint: str) -> dict[str, Any]:
    """Dense, shared and routed MLP with fc1 outputs of +-50: outputs, what plain maths gives, input gradients."""
    from megatron.core.utils import unwrap_model

    _, provider, models = build(layout, checkpoint, ddp=False)
    (model,) = unwrap_model(models)
    moe = model.decoder.layers[3].mlp
    found = {}
    for name, mlp in (
        ("dense", model.decoder.layers[0].mlp),
        ("shared", moe.shared_experts),
        ("routed", moe.experts.local_experts[0]),
    ):
        half = mlp.linear_fc1.weight.shape[0] // 2
        fc1 = torch.zeros_like(mlp.linear_fc1.weight)
        # gate rows read input 0, up rows input 1
        fc1[:half, 0], fc1[half:, 1] = 1.0, 1.0
        mlp.linear_fc1.weight.data.copy_(fc1)
        x = torch.zeros(4, 1, provider.hidden_size)
        x[:, 0, 0] = torch.tensor([50.0, 50.0, -50.0, 3.0])
        x[:, 0, 1] = torch.tensor([50.0, -50.0, 50.0, -2.0])
        x.requires_grad_()
        if name == "routed":
            output, _ = moe.experts(x[:, 0], torch.tensor([4] + [0] * 15), torch.ones(4))
            output = output.unsqueeze(1)
        else:
            output = mlp(x)
            output = output[0] if isinstance(output, tuple) else output
        output.sum().backward()
        found[name] = dict(
            output=output.detach().squeeze(1),
            down_rows=mlp.linear_fc2.weight.detach().sum(1),
            gradient=x.grad[:, 0, :2].clone(),
        )
    return found


def documents_after_change(layout: Layout, checkpoint: str, lengths: list[int], changed: int) -> dict[str, Any]:
    """Logits and embedding-input gradients of packed documents, before and after one document's tokens change."""
    from megatron.core.utils import unwrap_model

    _, _, models = build(layout, checkpoint, ddp=False)
    (model,) = unwrap_model(models)
    boundaries = torch.tensor([0, *lengths]).cumsum(0).tolist()
    tokens = torch.randint(0, 119, (1, sum(lengths)), generator=torch.Generator().manual_seed(4))
    other = tokens.clone()
    start, end = boundaries[changed], boundaries[changed + 1]
    other[0, start:end] = (other[0, start:end] + 7) % 119
    runs = []
    for ids in (tokens, other):
        embedded = model.embedding(ids, None).detach().requires_grad_()
        logits = model(
            input_ids=ids,
            position_ids=None,
            attention_mask=None,
            decoder_input=embedded,
            packed_seq_params=PackedBatch([torch.zeros(length) for length in lengths]).parameters(),
        )
        (logits * direction(logits.shape, 1)).sum().backward()
        runs.append((logits.detach()[0], embedded.grad[:, 0]))
    return {"boundaries": boundaries, "before": runs[0], "after": runs[1]}


def experts_without_tokens(layout: Layout, checkpoint: str) -> dict[str, Any]:
    """One token goes to 4 of 16 experts: loss, and the gradients of the idle experts of this rank."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import unwrap_model

    _, _, models = build(layout, checkpoint)
    output = models[0](input_ids=torch.tensor([[5]]), position_ids=None, attention_mask=None)
    (output * direction(output.shape, 0)).mean().backward()
    finalize_model_grads(models)
    (model,) = unwrap_model(models)
    gradients = {
        name: parameter.main_grad.abs().max().item()
        for name, parameter in model.named_parameters()
        if ".local_experts." in name
    }
    return {"finite": bool(output.isfinite().all()), "gradients": gradients}


def stock_rounding_of_bias(layout: Layout, checkpoint: str) -> torch.Tensor:
    """Experts that a bf16 model with the checkpoint's biases chooses, and what fp64 chooses: ``[2, tokens, k]``."""
    from megatron.core.utils import unwrap_model

    _, provider, models = build(layout, checkpoint, dtype="bfloat16")
    (model,) = unwrap_model(models)
    router = model.decoder.layers[3].mlp.router
    x = torch.randn(64, 1, provider.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    _, routing_map = router(x)
    logits = x[:, 0].double() @ router.weight.double().T
    expected = (logits.sigmoid() + router.expert_bias.double()).topk(provider.moe_router_topk).indices
    chosen = routing_map.nonzero()[:, 1].view(64, -1)
    return torch.stack([chosen, expected.sort().values])


def log_probs_at(layout: Layout, checkpoint: str, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probs ``[s - 1]`` of the tokens after the first, by the trainer's operator."""
    from glm5next_plugin.ops.log_probs import token_log_probs

    _, provider, models = build(layout, checkpoint, ddp=False)
    with torch.no_grad():
        logits = models[0](input_ids=tokens, position_ids=None, attention_mask=None)
    return token_log_probs(logits[0, :-1], tokens[0, 1:], temperature=temperature, vocab_size=provider.vocab_size)
