"""Adam steps on a device: the distributed optimizer with overlap, and its state on the CPU."""

import pytest
from safetensors import safe_open

from glm5next_plugin.checkpoint.synthetic import make_checkpoint
from glm5next_plugin.recipes import variants
from tests.megatron.conftest import INITIALIZATION
from tests.megatron.process_pool import Layout
from tests.megatron.test_training import BATCHES, OVERLAPPED, STEPS

DISTRIBUTED = Layout(ddp=tuple(OVERLAPPED.items()))
OFFLOADED = dict(optimizer_cpu_offload=True, optimizer_offload_fraction=1.0, use_precision_aware_optimizer=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    architecture = variants.tiny(vocab_size=128, index_n_heads=16)
    return make_checkpoint(
        tmp_path_factory.mktemp("gpu") / "checkpoint", architecture, seed=3, dtype="float32", init=INITIALIZATION
    )


@pytest.fixture(scope="module")
def before(checkpoint):
    weights = {}
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as stored:
            weights |= {name: stored.get_tensor(name) for name in stored.keys()}
    return weights


@pytest.fixture(scope="module")
def trained(checkpoint):
    """``trained(layout, ...)``: the answer of :func:`tests.megatron.training_runs.train`, made once."""
    from tests.megatron.training_runs import train

    made = {}

    def answer(layout=Layout(), **settings):  # noqa: B008 - a frozen dataclass
        key = (layout, tuple(sorted(settings.items())))
        if key not in made:
            made[key] = train(layout, str(checkpoint), BATCHES, **STEPS, **settings)
        return made[key]

    return answer


def require_same_move(found, expected, before, limit=1e-3):
    """``||dW_a - dW_b|| / ||dW_b||`` of every parameter that moved."""
    errors = {}
    for name, weight in expected["weights"].items():
        moved = weight.float() - before[name].to(weight.dtype).float()
        if moved.any():
            errors[name] = float((found["weights"][name].float() - weight.float()).norm() / moved.norm())
        else:
            assert found["weights"][name].equal(weight), name
    assert errors
    worst = max(errors, key=errors.get)
    assert errors[worst] <= limit, (worst, errors[worst])


def test_distributed_optimizer_with_overlap(trained, before):
    require_same_move(trained(DISTRIBUTED), trained(), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloaded_optimizer(trained, before, dtype):
    """State and steps on the CPU lead where those on the device lead."""
    on_device, offloaded = trained(DISTRIBUTED, dtype=dtype), trained(DISTRIBUTED, dtype=dtype, **OFFLOADED)
    assert on_device["masters"] == offloaded["masters"] == ["torch.float32"]
    assert on_device["state_devices"] == ["cuda"] and offloaded["state_devices"] == ["cpu"]
    require_same_move(offloaded, on_device, before)
