"""Random streams."""

import itertools

from glm5next_plugin.bringup.seeds import stream_seed


def test_every_run_step_and_purpose_has_a_stream_of_its_own():
    streams = list(itertools.product(range(3), range(30), ("prompts", "sampling")))
    assert len({stream_seed(*stream) for stream in streams}) == len(streams)


def test_a_seed_is_the_same_in_every_process_and_fits_a_torch_generator():
    # sha256("0 1 prompts") starts with 98ec3cfebc62936a; half of it fits 63 bits
    assert stream_seed(0, 1, "prompts") == 0x98EC3CFEBC62936A // 2 < 2**63
