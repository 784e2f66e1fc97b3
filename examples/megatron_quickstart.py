"""Load a checkpoint into stock Megatron, run it, write it back: python megatron_quickstart.py CHECKPOINT OUT"""

import sys

import torch

from glm5next_plugin.adapters.megatron import AutoBridge, initialize, save_checkpoint

if __name__ == "__main__":
    checkpoint, out = sys.argv[1:3]
    initialize()
    bridge = AutoBridge.from_hf_pretrained(checkpoint)
    provider = bridge.to_megatron_provider()
    provider.finalize()
    model = provider.provide_distributed_model(wrap_with_ddp=False)
    logits = model[0](input_ids=torch.tensor([[1, 2, 3, 4]]), position_ids=None, attention_mask=None)
    print(f"logits {tuple(logits.shape)}, next token {logits[0, -1].argmax().item()}")
    save_checkpoint(bridge, model, out)
