"""Direct and cached reads and writes against what Python's own files hold."""

import io
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm5next_plugin.checkpoint import files
from glm5next_plugin.checkpoint.files import BLOCK, ReadFile, WriteFile, aligned_memory

SMALL_BUFFER = 4 * BLOCK  # so that runs of a few blocks fill it several times
SIZE = 12 * BLOCK
around_blocks = st.builds(lambda block, offset: max(0, block * BLOCK + offset), st.integers(0, 9), st.integers(-2, 2))
places = st.one_of(around_blocks, st.integers(0, 10 * BLOCK))
many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["direct", "cached"])
def access(request, monkeypatch, tmp_path):
    """Both ways of opening; "direct" only counts where the file system has it."""
    monkeypatch.setattr(files, "_BUFFER_BYTES", SMALL_BUFFER)
    if request.param == "cached":
        monkeypatch.setattr(files, "_open_direct", lambda path, flags: None)
    else:
        probe = tmp_path / "probe"
        probe.touch()
        descriptor = files._open_direct(probe, os.O_RDONLY)
        if descriptor is None:
            pytest.skip("this file system has no direct access (O_DIRECT)")
        os.close(descriptor)
    return request.param


def content(nbytes: int, seed: int) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (nbytes,), dtype=torch.uint8, generator=generator).numpy().tobytes()


@many
@given(runs=st.lists(st.tuples(places, st.lists(st.integers(0, 3 * BLOCK), max_size=4)), max_size=5))
def test_runs_of_bytes_land_where_they_are_put(access, tmp_path, runs):
    path, plain = tmp_path / "written", bytearray(SIZE * 2)
    path.write_bytes(plain)
    target = WriteFile(path)
    for seed, (place, sizes) in enumerate(runs):
        target.seek(place)
        for size in sizes:
            assert target.tell() == place
            data = content(size, seed)
            target.write(data)
            plain[place : place + size] = data
            place += size
    target.close()
    assert path.read_bytes() == plain


@many
@given(cut=st.integers(1, SIZE - 1), pieces=st.lists(st.integers(1, 2 * BLOCK), min_size=1, max_size=12))
def test_two_writers_may_meet_within_a_block(access, tmp_path, cut, pieces):
    """Written in turns, as two workers of a conversion do."""
    path, data = tmp_path / "shared", content(SIZE, 3)
    path.write_bytes(bytes(SIZE))
    writers = [[WriteFile(path, 0), 0, cut], [WriteFile(path, cut), cut, SIZE]]
    while any(place < end for _, place, end in writers):
        for size in pieces:
            for writer in writers:
                target, place, end = writer
                target.write(data[place : min(place + size, end)])
                target.flush()
                writer[1] = min(place + size, end)
    for target, _, _ in writers:
        target.close()
    assert path.read_bytes() == data


@many
@given(start=places, nbytes=st.one_of(st.just(0), around_blocks, st.integers(0, 3 * BLOCK)))
def test_reading_at_any_place(access, tmp_path, start, nbytes):
    data = content(SIZE + 5, 1)  # ends within a block
    path = tmp_path / "read"
    path.write_bytes(data)
    source, into = ReadFile(path), aligned_memory(SIZE * 2)
    try:
        for memory in (None, into):
            if start + nbytes > len(data):
                with pytest.raises(EOFError, match=f"the file ends {min(nbytes, start + nbytes - len(data))} bytes"):
                    source.read(start, nbytes, memory)
            else:
                read = source.read(start, nbytes, memory)
                assert read.shape == (nbytes,)
                assert read.numpy().tobytes() == data[start : start + nbytes]
    finally:
        source.close()


def test_memory_to_read_into_starts_at_a_block(access, tmp_path):
    path = tmp_path / "read"
    path.write_bytes(bytes(BLOCK))
    source = ReadFile(path)
    with pytest.raises(ValueError, match="aligned_memory"):
        source.read(0, 10, aligned_memory(BLOCK)[1:])
    source.close()


def test_torch_saves_into_a_run(access, tmp_path):
    """As the tensors of a .distcp file are written: one archive behind another."""
    path, tensors, starts = tmp_path / "archive", [torch.randn(1000), torch.randn(7, 3)], []
    path.touch()
    target = WriteFile(path)
    for tensor in tensors:
        starts.append(target.tell())
        torch.save(tensor, target)
    starts.append(target.tell())
    target.close()
    data = path.read_bytes()
    for tensor, start, end in zip(tensors, starts[:-1], starts[1:], strict=True):
        assert torch.load(io.BytesIO(data[start:end])).equal(tensor)


def test_a_full_disk_is_told_and_the_file_closed(access, tmp_path):
    """/dev/full takes no byte."""
    target = WriteFile("/dev/full")
    before = len(os.listdir("/proc/self/fd"))
    target.write(b"some")
    with pytest.raises(OSError, match="No space left"):
        target.close()
    assert len(os.listdir("/proc/self/fd")) < before
