"""Damaged checkpoint files end in one error or in tensors, never in a traceback or a hang; no code of theirs runs."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import dataclasses
import functools
import io
import itertools
import json
import logging
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5next_plugin.adapters.megatron.convert import convert, open_source
from glm5next_plugin.architecture import ConfigError
from glm5next_plugin.checkpoint.inspection import inspect_source
from glm5next_plugin.checkpoint.synthetic import make_checkpoint
from glm5next_plugin.errors import InputError
from glm5next_plugin.recipes import variants
from tests.command import GLM5NEXT

from .editing import INDEX

SECONDS = 5.0  # for one input, which takes some milliseconds
GIGABYTE = 2**30
# kind -> batches of inputs, and inputs of a batch at least; a batch follows from kind and number
INPUTS = {
    "header bytes": (4, 40),
    "header fields": (8, 26),
    "header documents": (1, 30),
    "header names": (1, 39),
    "cut shards": (4, 28),
    "places of shards": (1, 10),
    "index bytes": (2, 60),
    "index entries": (1, 70),
    "config bytes": (4, 40),
    "config numbers": (21, 55),
    "config fields": (4, 40),
    "config schedules": (1, 12),
    "metadata bytes": (4, 40),
    "metadata records": (10, 17),
    "metadata boxes": (1, 4),
    "metadata pickles": (1, 99),
    "metadata paths": (1, 9),
    "stream bytes": (4, 40),
    "stream directory": (1, 100),
    "stream pickles": (1, 12),
    "cut torch_dist": (1, 60),
    "torch_dist documents": (1, 60),
    "carried bytes": (2, 40),
    "carried entries": (1, 90),
    "marker": (1, 10),
}
METADATA, BACKEND, STREAMS = "release/.metadata", "release/metadata.json", "release/__0_0.distcp"
CARRIED_INDEX, MARKER = "hf/carried.index.json", "latest_checkpointed_iteration.txt"


@dataclasses.dataclass(frozen=True)
class Damage:
    """One input: a file of a whole checkpoint, and the bytes that replace it or what makes something else of it."""

    name: str
    file: str
    content: bytes | Callable[[Path], None]


# ---------------------------------------------------------------------- what has to hold
class OverTime(BaseException):
    """No Exception, so that nothing that is tested catches it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def over(number, frame):
        raise OverTime(f"more than {seconds} s")

    handler, started = signal.signal(signal.SIGALRM, over), time.monotonic()
    outer, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if outer:  # the limit of pytest-timeout, which has the same clock
            signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - started), 0.01))


@contextlib.contextmanager
def damaged(checkpoint: Path, damage: Damage) -> Iterator[None]:
    file = checkpoint / damage.file
    whole = file.read_bytes()
    try:
        place(file, damage)
        yield
    finally:
        file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink(missing_ok=True)
        file.write_bytes(whole)


def place(file: Path, damage: Damage) -> None:
    if isinstance(damage.content, bytes):
        file.write_bytes(damage.content)
    else:
        file.unlink()
        damage.content(file)


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def outcome(checkpoint: Path, damage: Damage) -> str:
    """``read`` or ``refused``, or what must not be."""
    before = peak_memory()
    try:
        with damaged(checkpoint, damage), time_limit(SECONDS):
            source = open_source(checkpoint)
            source.faults()
            inspect_source(source)
            source.check()
            for name in source.names():
                source.tensor(name)
        found = "read"
    except (InputError, ConfigError):
        found = "refused"
    except (Exception, OverTime) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        found = f"{type(error).__name__} in {frame.name} ({Path(frame.filename).name}:{frame.lineno}): {error!s:.200}"
    grown = peak_memory() - before
    return found if grown < GIGABYTE else f"{grown / GIGABYTE:.1f} GiB, then {found:.300}"


def require(checkpoint: Path, kind: str, damages: list[Damage], allowed: tuple[str, ...] = ("read", "refused")) -> None:
    assert len(damages) >= INPUTS[kind][1]
    found = {damage.name: outcome(checkpoint, damage) for damage in damages}
    bad = [f"{name} -> {result}" for name, result in found.items() if result not in allowed]
    assert len(found) == len(damages) and not bad, "\n".join([f"{len(bad)} of {len(found)} inputs", *bad])


def require_refused(checkpoint: Path, kind: str, damages: list[Damage]) -> None:
    require(checkpoint, kind, damages, ("refused",))


def batches(kind: str):
    return pytest.mark.parametrize("batch", range(INPUTS[kind][0]))


# ---------------------------------------------------------------------- whole checkpoints
def small() -> Any:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 32)
    sizes |= dict.fromkeys(("vocab_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16)
    sizes |= dict.fromkeys(("qk_head_dim", "v_head_dim"), 16)
    return variants.demo(
        num_hidden_layers=2,
        dsa_layers=[1],
        first_k_dense_replace=1,
        n_routed_experts=2,
        num_experts_per_tok=1,
        index_n_heads=2,
        index_head_dim=8,
        vision_config=dict(out_hidden_size=32),
        **sizes,
    )


@pytest.fixture(scope="module")
def bf16(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("fuzz") / "bf16", small(), seed=1, vision=True, mtp=True)


@pytest.fixture(scope="module")
def released(bf16) -> Path:
    """FP8 in four shards; a test changes one file at a time and puts it back."""
    target = bf16.parent / "released"
    convert(bf16, target, to="released", fp8=True, max_shard_bytes=40_000)
    assert len(shards(target)) == 4
    return target


@pytest.fixture(scope="module")
def torch_dist(bf16) -> Path:
    """The same in the other format, with nothing in it that differs from run to run."""
    target = bf16.parent / "torch_dist"
    convert(bf16, target)
    metadata = pickle.loads((target / METADATA).read_bytes())
    metadata.storage_meta = None
    (target / METADATA).write_bytes(pickle.dumps(metadata, 4))
    return target


@pytest.fixture(scope="module", autouse=True)
def less_than_a_gigabyte(released, torch_dist):
    before = peak_memory()
    yield
    assert peak_memory() - before < GIGABYTE


def shards(checkpoint: Path, folder: str = "") -> list[str]:
    return [f"{folder}{file.name}" for file in sorted((checkpoint / folder).glob("*.safetensors"))]


# ---------------------------------------------------------------------- damage to any file
def disturbed(raw: bytes, chance: random.Random, first: int = 0, last: int | None = None) -> bytes:
    """A copy with one to four bytes or runs between two places changed, taken out, put in or doubled."""
    changed, last = bytearray(raw), len(raw) if last is None else last
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(first, last)
        run = slice(at, at + chance.choice((1, 1, 1, 2, 8, 100)))
        match chance.randrange(6):
            case 0:
                changed[at : at + 1] = bytes([changed[at] ^ 1 << chance.randrange(8)]) if at < len(changed) else b""
            case 1:
                changed[run] = chance.randbytes(len(changed[run]))
            case 2:
                del changed[run]
            case 3:
                changed[at:at] = chance.randbytes(chance.randint(1, 8))
            case 4:
                changed[at:at] = changed[run]
            case _:
                changed[at : at + 1] = chance.choice((b"-", b"9", b'"', b"[", b"]", b"{", b"}", b",", b"\xff", b"\x00"))
    return bytes(changed)


def of_bytes(kind: str, batch: int, checkpoint: Path, places: list[tuple[str, int, int]]) -> list[Damage]:
    """A batch of files, each disturbed between two places."""
    found = []
    for number in range(INPUTS[kind][1]):
        chance = random.Random(f"{kind} {batch} {number}")
        file, first, last = chance.choice(places)
        content = disturbed((checkpoint / file).read_bytes(), chance, first, last)
        found.append(Damage(f"{kind} {batch}.{number} of {file}", file, content))
    return found


DEEP = 100_000
NO_OBJECTS = {
    "nothing": b"",
    "a beginning": b'{"weight_map": {"a": ',
    "null": b"null",
    "a number": b"3",
    "a string": b'"text"',
    "NaN": b"NaN",
    "an empty list": b"[]",
    "an empty object": b"{}",
    "a list of pairs": b"[[1, 2]]",
    "a list of lists": b"[[[1], 2], [{}, 2]]",
    "deep lists": b"[" * DEEP,
    "deep lists that end": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP,
    "deep objects that end": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "digits": b"1" * 5000,
    "a key with digits": b'{"weight_map": ' + b"1" * 5000 + b"}",
    "no UTF-8": b'{"\xff\xfe": "\xc0\x80"}',
    "UTF-16": '{"weight_map": {}}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "zeros": b"\x00" * 100,
}
# JSON in the place of a value; None takes key and value away
VALUES = (
    None, "-1", "0", "1000000000", "1" + "0" * 30, "9" * 400, "9" * 4300, "1" * 5000, "0.5", "1e400", "NaN",
    "-Infinity", "null", "true", '"3"', '"\\ud800"', "[]", "[[1]]", "{}", "[1000000000, 0]", "[" * DEEP + "]" * DEEP,
)  # fmt: skip
Keys = tuple[str | int, ...]


def with_values(document: Any, values: dict[Keys, str | None]) -> bytes:
    """The JSON of a document with other values at these places."""
    changed, marks = copy.deepcopy(document), {}
    for number, (keys, value) in enumerate(values.items()):
        holder = functools.reduce(lambda level, key: level[key], keys[:-1], changed)
        if value is None:
            del holder[keys[-1]]
        else:
            holder[keys[-1]] = f"place {number}"
            marks[f'"place {number}"'] = value
    text = json.dumps(changed)
    for mark, value in marks.items():
        text = text.replace(mark, value)
    return text.encode()


def documents(file: str, wrap: Callable[[bytes], bytes] = lambda raw: raw) -> list[Damage]:
    return [Damage(f"{name} in {file}", file, wrap(raw)) for name, raw in NO_OBJECTS.items()]


def values(checkpoint: Path, file: str, keys: Keys) -> list[Damage]:
    document = json.loads((checkpoint / file).read_text())
    return [
        Damage(f"{keys} of {file} is {value!s:.20} ({number})", file, with_values(document, {keys: value}))
        for number, value in enumerate(VALUES)
    ]


# ---------------------------------------------------------------------- headers of safetensors files
def split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and tensors of a file."""
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), raw[end:]


def joined(header: bytes, tensors: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + tensors


def headers_end(checkpoint: Path, file: str) -> int:
    return 8 + int.from_bytes((checkpoint / file).read_bytes()[:8], "little")


SHAPES_AND_OFFSETS = (
    "[0]", "[0, 0]", "[5, 3]", "[-1, 1]", "[0, 1.0]", "[0, true]", "[1000000000, 2, 0]", "[0, 1" + "0" * 30 + "]",
    f"[{'9' * 4300}, {'9' * 4300}]", f"[0, {'9' * 4300}]", "[" + "0, " * 5000 + "0]",
)  # fmt: skip
FIELDS: tuple[Keys, ...] = (
    ("dtype",), ("shape",), ("data_offsets",), ("shape", 0), ("data_offsets", 0), ("data_offsets", 1), (),
)  # fmt: skip


def header_fields(batch: int, checkpoint: Path, files: list[str]) -> list[Damage]:
    """Every value in one place of a tensor's entry, or in that of ``__metadata__``; tensors by chance."""
    found = []
    for number, value in enumerate(VALUES + SHAPES_AND_OFFSETS):
        chance = random.Random(f"header fields {batch} {number}")
        file = chance.choice(files)
        header, tensors = split((checkpoint / file).read_bytes())
        name = chance.choice(sorted(header.keys() - {"__metadata__"}))
        keys = (name, *FIELDS[batch]) if batch < len(FIELDS) else ("__metadata__",)
        content = joined(with_values(header, {keys: value}), tensors)
        found.append(Damage(f"header fields {batch}.{number}: {keys} of {file} is {value!s:.20}", file, content))
    return found


STACKED = "model.language_model.layers.1.mlp.experts.gate_up_proj"


def entry(dtype: str, shape: str, *offsets: int) -> str:
    return f'{{"dtype": "{dtype}", "shape": {shape}, "data_offsets": {list(offsets)}}}'


def header_documents(file: str) -> list[Damage]:
    """Headers that are no object of tensors, and objects with what no writer puts in."""
    headers = {
        "a list with a number for a name": '[[1, [["dtype", "U8"], ["shape", [1]], ["data_offsets", [0, 1]]]]]',
        "a list with null for a name": '[[null, {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}]]',
        "the same name twice": f'{{"a": {entry("U8", "[1]", 0, 1)}, "a": {entry("U8", "[1]", 0, 1)}}}',
        "a name twice, apart": f'{{"a": {entry("U8", "[1]", 0, 1)}, "a": {entry("U8", "[0]", 1, 1)}}}',
        "a surrogate for a name": f'{{"\\ud800": {entry("U8", "[1]", 0, 1)}}}',
        "a billion experts without values": f'{{"{STACKED}": {entry("BF16", "[1000000000, 2, 0]", 0, 0)}}}',
        "experts without number": f'{{"{STACKED}": {entry("BF16", "[" + "9" * 30 + ", 2, 0]", 0, 0)}}}',
        "no experts": f'{{"{STACKED}": {entry("BF16", "[0, 2, 4]", 0, 0)}}}',
        "experts of no shape": f'{{"{STACKED}": {entry("U8", "[]", 0, 1)}}}',
        "a size of 8000 digits": f'{{"a": {entry("F64", f"[{'9' * 4000}, {'9' * 4000}]", 0, 1)}}}',
        "many sizes": f'{{"a": {entry("F64", f"[{', '.join(['9' * 4000] * 100)}]", 0, 1)}}}',
        "an FP8 matrix with endless rows": f'{{"lm_head.weight": {entry("F8_E4M3", f"[{'9' * 400}, 0]", 0, 0)}, '
        f'"lm_head.weight_scale_inv": {entry("F32", "[0, 0]", 0, 0)}}}',
        "deep metadata": '{"__metadata__": ' + "[" * DEEP + "]" * DEEP + "}",
    }
    # as many bytes as they tell of, so that it is not the length that is wrong
    ends = {name: b"" if "0, 0]}" in text else b"\x00" for name, text in headers.items()}
    found = [Damage(f"{name} in {file}", file, joined(text.encode(), ends[name])) for name, text in headers.items()]
    lengths = {length: length.to_bytes(8, "little") + b"{}" for length in (0, 1, 3, 10**8, 10**8 + 1, 2**63, 2**64 - 1)}
    found += [Damage(f"a header of {length} bytes in {file}", file, raw) for length, raw in lengths.items()]
    return found + documents(file, joined)


NAMES = (
    "", "\x00", "\ud800", "a" * 10**6, "../a", "lm_head.weight", "lm_head.weight_scale_inv", STACKED,
    "model.layers.0.self_attn.conv1d.weight", "model.language_model.layers.99999999999.norm", "__metadata__",
    "model.language_model.layers." + "9" * 5000 + ".input_layernorm.weight", "model.language_model.layers.\u00b2.norm",
)  # fmt: skip


def header_names(checkpoint: Path) -> list[Damage]:
    """A tensor under another name."""
    found = []
    for number, name in itertools.product(range(3), NAMES):
        chance = random.Random(f"header names {number} {name!a}")
        file = chance.choice(shards(checkpoint))
        header, tensors = split((checkpoint / file).read_bytes())
        old = chance.choice(sorted(header.keys() - {"__metadata__"}))
        renamed = {name if key == old else key: value for key, value in header.items()}
        content = joined(json.dumps(renamed).encode(), tensors)
        found.append(Damage(f"header names {number}: {old} of {file} is {name[:60]!a}", file, content))
    return found


@batches("header bytes")
def test_header_with_other_bytes_is_refused_or_read(released, batch):
    places = [(file, 0, headers_end(released, file)) for file in shards(released)]
    places += [(file, 0, 8) for file in shards(released)]
    require(released, "header bytes", of_bytes("header bytes", batch, released, places))


@batches("header fields")
def test_header_with_another_value_is_refused_or_read(released, batch):
    require(released, "header fields", header_fields(batch, released, shards(released)))


@batches("header documents")
def test_header_that_describes_no_tensors_is_refused(released, batch):
    require_refused(released, "header documents", header_documents(shards(released)[1]))


@batches("header names")
def test_header_with_another_name_is_refused(released, batch):
    require_refused(released, "header names", header_names(released))


# ---------------------------------------------------------------------- shards
def cuts(checkpoint: Path, file: str, kind: str) -> list[Damage]:
    """A shard cut around its boundaries, at random places, and with bytes after its end."""
    raw, chance = (checkpoint / file).read_bytes(), random.Random(f"{kind} {file}")
    header, first = split(raw)[0], headers_end(checkpoint, file)
    starts = [first + value["data_offsets"][0] for name, value in header.items() if name != "__metadata__"]
    sizes = {0, 1, 7, 8, 9, first - 1, first, first + 1, len(raw) - 1, *starts}
    sizes |= {chance.randrange(len(raw)) for _ in range(16)}
    found = [Damage(f"{file} cut to {size} bytes", file, raw[:size]) for size in sorted(sizes)]
    more = (b"\x00", b"\x00" * 8, b"\xff" * 4096, raw)
    return found + [Damage(f"{file} with {len(end)} bytes more", file, raw + end) for end in more]


OTHER_PLACES: dict[str, Callable[[Path], None]] = {
    "nothing": lambda file: None,
    "a directory": lambda file: file.mkdir(),
    "a dangling link": lambda file: file.symlink_to("nowhere"),
    "a link to itself": lambda file: file.symlink_to(file.name),
    "a link to a directory": lambda file: file.symlink_to("."),
    "a pipe": os.mkfifo,
}


def places_of(file: str) -> list[Damage]:
    return [Damage(f"{what} in the place of {file}", file, make) for what, make in OTHER_PLACES.items()]


@batches("cut shards")
def test_shard_that_is_cut_or_too_long_is_refused(released, batch):
    require_refused(released, "cut shards", cuts(released, shards(released)[batch], "cut shards"))


@batches("places of shards")
def test_something_else_in_the_place_of_a_file_is_refused(released, batch):
    require_refused(released, "places of shards", places_of(shards(released)[2]) + places_of(INDEX))


# ---------------------------------------------------------------------- index
HOLDERS = (
    "", ".", "..", "/", "/etc/hostname", "../a.safetensors", "a/b.safetensors", "a\\b.safetensors", "a.safetensors/",
    "\x00", "a\x00.safetensors", "\ud800.safetensors", "a" * 300, "a" * 10**6, "config.json", "nowhere.safetensors",
)  # fmt: skip


def index_entries(checkpoint: Path, file: str) -> list[Damage]:
    """Other values for the map, for one holder, and holders that are no files beside it."""
    index = json.loads((checkpoint / file).read_text())
    name = sorted(index["weight_map"])[3]
    found = documents(file) + values(checkpoint, file, ("weight_map",)) + values(checkpoint, file, ("weight_map", name))
    for holder, everywhere in itertools.product(HOLDERS, (False, True)):
        changed = dict.fromkeys(index["weight_map"], holder) if everywhere else index["weight_map"] | {name: holder}
        which = "every tensor" if everywhere else name
        content = json.dumps({"weight_map": changed}).encode()
        found.append(Damage(f"{which} of {file} lies in {holder[:60]!a} ({len(holder)})", file, content))
    pairs = {
        "a name twice": b'{"weight_map": {"a": "model-00001-of-00004.safetensors", "a": "b"}}',
        "the map twice": b'{"weight_map": {"a": "b"}, "weight_map": 3}',
        "a list for a map": b'{"weight_map": [["a", "b"], [1, "b"], [null, "c"]]}',
        "a list in a list for a map": b'{"weight_map": [[["a"], "b"]]}',
        "a surrogate for a name": b'{"weight_map": {"\\ud800": "b"}}',
    }
    return found + [Damage(f"{what} in {file}", file, raw) for what, raw in pairs.items()]


@batches("index bytes")
def test_index_with_other_bytes_is_refused_or_read(released, batch):
    places = [(INDEX, 0, (released / INDEX).stat().st_size)]
    require(released, "index bytes", of_bytes("index bytes", batch, released, places))


@batches("index entries")
def test_index_with_other_entries_is_refused(released, batch):
    require_refused(released, "index entries", index_entries(released, INDEX))


# ---------------------------------------------------------------------- config.json
CONFIG = "config.json"
TEXT, LINEAR = ("text_config",), ("text_config", "linear_attn_config")


def fields(level: Any, above: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Every key of nested objects with its value, the objects among them."""
    for key, value in level.items():
        yield (*above, key), value
        if isinstance(value, dict):
            yield from fields(value, (*above, key))


def config_numbers(batch: int, checkpoint: Path) -> list[Damage]:
    """One value in the place of each number of the config."""
    config, value = json.loads((checkpoint / CONFIG).read_text()), VALUES[batch]
    return [
        Damage(f"config numbers {batch}: {keys} is {value!s:.20}", CONFIG, with_values(config, {keys: value}))
        for keys, old in fields(config)
        if type(old) in (int, float)
    ]


def config_fields(batch: int, checkpoint: Path) -> list[Damage]:
    """Two fields of the config by chance, objects and lists among them, with values by chance."""
    found, config = [], json.loads((checkpoint / CONFIG).read_text())
    leaves = [keys for keys, old in fields(config) if not isinstance(old, dict)]
    for number in range(INPUTS["config fields"][1]):
        chance = random.Random(f"config fields {batch} {number}")
        # of objects only one, as the other field might be in it
        objects = [keys for keys, old in fields(config) if isinstance(old, dict)]
        places = chance.sample(leaves, 2) if number % 4 else [chance.choice(objects)]
        changes = {keys: chance.choice(VALUES) for keys in places}
        described = {keys: f"{value!s:.20}" for keys, value in changes.items()}
        found.append(Damage(f"config fields {batch}.{number}: {described}", CONFIG, with_values(config, changes)))
    return found


def config_schedules(checkpoint: Path) -> list[Damage]:
    """Counts beyond any model, with the lists that would contradict them taken out."""
    config = json.loads((checkpoint / CONFIG).read_text())
    layers, kda = (*TEXT, "num_hidden_layers"), (*LINEAR, "kda_layers")
    lists = ("layer_types", "mlp_layer_types", "indexer_types")
    no_lists: dict[Keys, str | None] = dict.fromkeys(((*TEXT, key) for key in lists), None)
    # each of these alone might be possible
    changes = [{(*TEXT, "n_routed_experts"): "5000", (*TEXT, "num_nextn_predict_layers"): "5000"}]
    for count in ("1000000000", "1" + "0" * 30, "9" * 4300):
        changes += [
            no_lists | {layers: count},
            no_lists | {layers: count, kda: "[]", (*LINEAR, "full_attn_layers"): None},
            {(*TEXT, "n_routed_experts"): count},
            {(*TEXT, "num_nextn_predict_layers"): count},
            {("vision_config", "depth"): count},
            {(*TEXT, "qk_head_dim"): count, (*TEXT, "qk_nope_head_dim"): count},
        ]
    return [
        Damage(f"config schedules {number}: {str(change)[:200]}", CONFIG, with_values(config, change))
        for number, change in enumerate(changes)
    ]


@batches("config bytes")
def test_config_with_other_bytes_is_refused_or_read(released, batch):
    places = [(CONFIG, 0, (released / CONFIG).stat().st_size)]
    require(released, "config bytes", of_bytes("config bytes", batch, released, places))


@batches("config numbers")
def test_config_with_another_value_for_a_number_is_refused_or_read(released, batch):
    require(released, "config numbers", config_numbers(batch, released))


@batches("config fields")
def test_config_with_other_fields_is_refused_or_read(released, batch):
    require(released, "config fields", config_fields(batch, released))


@batches("config schedules")
def test_config_with_more_layers_or_experts_than_can_be_is_refused(released, batch):
    damages = config_schedules(released) + documents(CONFIG)
    require_refused(released, "config schedules", damages)


# ---------------------------------------------------------------------- torch_dist: metadata
WRONG = (
    None, -1, 2**70, 10**5000, 1.5, float("nan"), "x", "a\x00b", "../x", "a" * 5000, b"x", [], {}, (), (-1,), ("a",),
    (2**70,), [float("nan")], torch.float16,
)  # fmt: skip
RECORDS: dict[str, Callable[[Any, Any, Any, Any], None]] = {
    "size": lambda metadata, tensor, info, wrong: object.__setattr__(tensor, "size", wrong),
    "properties": lambda metadata, tensor, info, wrong: object.__setattr__(tensor, "properties", wrong),
    "dtype": lambda metadata, tensor, info, wrong: object.__setattr__(tensor.properties, "dtype", wrong),
    "chunks": lambda metadata, tensor, info, wrong: object.__setattr__(tensor, "chunks", wrong),
    "sizes of a chunk": lambda metadata, tensor, info, wrong: object.__setattr__(tensor.chunks[0], "sizes", wrong),
    "file": lambda metadata, tensor, info, wrong: object.__setattr__(info, "relative_path", wrong),
    "offset": lambda metadata, tensor, info, wrong: object.__setattr__(info, "offset", wrong),
    "length": lambda metadata, tensor, info, wrong: object.__setattr__(info, "length", wrong),
    "record": lambda metadata, tensor, info, wrong: metadata.state_dict_metadata.update({KEY: wrong}),
    "name": lambda metadata, tensor, info, wrong: metadata.state_dict_metadata.update({hashable(wrong): tensor}),
}
KEY = "decoder.layers.0.attn_hc.fn"  # [24, 128]


def hashable(value: Any) -> Any:
    return value if type(value).__hash__ else repr(value)


def parts(checkpoint: Path) -> tuple[Any, Any, Any, Any]:
    """Metadata, and of one tensor its record, its place in the storage and what lies there."""
    metadata = pickle.loads((checkpoint / METADATA).read_bytes())
    tensor = metadata.state_dict_metadata[KEY]
    index = next(index for index in metadata.storage_data if index.fqn == KEY)
    return metadata, tensor, index, metadata.storage_data[index]


def metadata_records(batch: int, checkpoint: Path) -> list[Damage]:
    """Wrong values in one place of the metadata."""
    found, (what, put) = [], list(RECORDS.items())[batch]
    for number, wrong in enumerate(WRONG):
        metadata, tensor, _, info = parts(checkpoint)
        put(metadata, tensor, info, wrong)
        content = pickle.dumps(metadata, 4)
        # digits of a number this long cannot be printed
        shown = type(wrong).__name__ if isinstance(wrong, int) else f"{wrong!r:.20}"
        found.append(Damage(f"metadata records {batch}.{number}: {what} is {shown}", METADATA, content))
    return found


def metadata_boxes(checkpoint: Path) -> list[Damage]:
    """As many values as the tensor has, but in a box that lies elsewhere or has other dimensions."""
    found = []
    for number, (offsets, sizes) in enumerate(
        [
            ((0,), (24 * 128,)),
            ((24, 0), (24, 128)),
            ((-1, 0), (24, 128)),
            ((0, 0, 0), (1, 24, 128)),
            ((0, 0), (128, 24)),
        ]
    ):
        metadata, tensor, index, info = parts(checkpoint)
        tensor.chunks[0].offsets, tensor.chunks[0].sizes = torch.Size(offsets), torch.Size(sizes)
        del metadata.storage_data[index]
        metadata.storage_data[dataclasses.replace(index, offset=torch.Size(offsets))] = info
        found.append(Damage(f"metadata boxes {number}: {sizes} at {offsets}", METADATA, pickle.dumps(metadata, 4)))
    return found


class Call:
    """Pickles as a call, which whoever loads it makes."""

    def __init__(self, function: Any, *arguments: Any):
        self.call = function, arguments

    def __reduce__(self):
        return self.call

    def __call__(self):
        """For pickle alone, which asks whether the called can be."""


def harmful(marker: Path) -> dict[str, Call]:
    """Calls that leave a file."""
    path, code = str(marker), f"open({str(marker)!r}, 'w').close()"
    system = Call(getattr, Call(__import__, "os"), "system")
    return {
        "os.system": Call(os.system, f"touch {path}"),
        "eval": Call(eval, code),
        "exec": Call(exec, code),
        "open": Call(open, path, "w"),
        "subprocess": Call(subprocess.call, ["touch", path]),
        "functools.partial": Call(functools.partial(open, path, "w")),
        "getattr of a module": Call(system, f"touch {path}"),
        "getattr of builtins": Call(Call(getattr, Call(__import__, "builtins"), "eval"), code),
        "pickle.loads": Call(pickle.loads, pickle.dumps(Call(eval, code))),
        "torch.load": Call(
            functools.partial(torch.load, weights_only=False), Call(io.BytesIO, saved(Call(os.system, f"touch {path}")))
        ),
        "copyreg": Call(copyreg._reconstructor, logging.FileHandler, logging.FileHandler, path),
        "pathlib": Call(Path.touch, marker),
    }


def saved(value: Any) -> bytes:
    """What ``torch.save`` writes."""
    memory = io.BytesIO()
    torch.save(value, memory)
    return memory.getvalue()


def stream_with(call: Call, size: int) -> bytes:
    """What ``torch.save`` writes of a call beside a tensor, made as long as is needed."""
    room = size - len(saved((torch.zeros(1), call, b"")))
    # records start at multiples of 64 bytes, so that a stream grows in steps
    streams = (saved((torch.zeros(1), call, b"x" * more)) for more in range(room - 128, room + 128, 16))
    return next(stream for stream in streams if len(stream) == size)


def metadata_pickles(checkpoint: Path, marker: Path) -> list[Damage]:
    """Harmful calls for the metadata, and within it."""
    found = []
    for (what, call), protocol in itertools.product(harmful(marker).items(), (0, 2, 4)):
        for where in ("all", "storage_meta", "a tensor"):
            metadata, *_ = parts(checkpoint)
            metadata.storage_meta = call if where == "storage_meta" else None
            if where == "a tensor":
                metadata.state_dict_metadata[KEY] = call
            content = pickle.dumps(call if where == "all" else metadata, protocol)
            found.append(Damage(f"{what} for {where}, protocol {protocol}", METADATA, content))
    return found


def stream_pickles(checkpoint: Path, marker: Path) -> list[Damage]:
    """Harmful calls in the stream of a tensor, which keeps its length."""
    *_, info = parts(checkpoint)
    whole, found = (checkpoint / STREAMS).read_bytes(), []
    for what, call in harmful(marker).items():
        stream = stream_with(call, info.length)
        content = whole[: info.offset] + stream + whole[info.offset + info.length :]
        found.append(Damage(f"{what} in a stream", STREAMS, content))
    return found


@pytest.fixture
def marker(tmp_path) -> Path:
    return tmp_path / "marker"


def test_harmful_pickles_do_harm_where_they_are_loaded_without_care(marker):
    for what, call in harmful(marker).items():
        pickle.loads(pickle.dumps(call))
        assert marker.exists(), what
        marker.unlink()
        torch.load(io.BytesIO(stream_with(call, 7721)), weights_only=False)
        assert marker.exists(), what
        marker.unlink()


@batches("metadata pickles")
def test_harmful_pickle_in_the_metadata_is_refused_and_not_run(torch_dist, marker, batch):
    damages = metadata_pickles(torch_dist, marker)
    # anything of pathlib becomes a string, so that its calls are harmless where nothing asks for them
    paths = [damage for damage in damages if damage.name.startswith("pathlib")]
    require_refused(torch_dist, "metadata pickles", [damage for damage in damages if damage not in paths])
    require(torch_dist, "metadata paths", paths)
    assert not marker.exists()


@batches("stream pickles")
def test_harmful_pickle_in_a_stream_is_refused_and_not_run(torch_dist, marker, batch):
    require_refused(torch_dist, "stream pickles", stream_pickles(torch_dist, marker))
    assert not marker.exists()


@batches("metadata bytes")
def test_metadata_with_other_bytes_is_refused_or_read(torch_dist, batch):
    places = [(METADATA, 0, (torch_dist / METADATA).stat().st_size)]
    require(torch_dist, "metadata bytes", of_bytes("metadata bytes", batch, torch_dist, places))


@batches("metadata records")
def test_metadata_with_wrong_records_is_refused_or_read(torch_dist, batch):
    require(torch_dist, "metadata records", metadata_records(batch, torch_dist))


@batches("metadata boxes")
def test_metadata_with_a_box_that_is_not_the_tensors_is_refused(torch_dist, batch):
    require_refused(torch_dist, "metadata boxes", metadata_boxes(torch_dist))


# ---------------------------------------------------------------------- torch_dist: other files
def frames(checkpoint: Path) -> list[tuple[str, int, int]]:
    """What is around the values in the streams, at both ends, and half as often the whole."""
    metadata, *_ = parts(checkpoint)
    streams = [info for info in metadata.storage_data.values() if f"release/{info.relative_path}" == STREAMS]
    found = []
    for info in streams:
        end = info.offset + info.length
        found += [(STREAMS, info.offset, info.offset + 600), (STREAMS, end - 900, end)]
    return found + [(STREAMS, info.offset, info.offset + info.length) for info in streams]


# of an entry of a zip archive's directory: where a field starts, and its bytes
ZIP_FIELDS = {
    "flags": (8, 2), "method": (10, 2), "checksum": (16, 4), "bytes in the archive": (20, 4), "bytes": (24, 4),
    "length of the name": (28, 2), "length of the rest": (30, 2), "length of the comment": (32, 2), "place": (42, 4),
    "name": (46, 8),
}  # fmt: skip


def stream_directory(checkpoint: Path) -> list[Damage]:
    """Other values in each field of the directory of a stream, which is a zip archive."""
    *_, info = parts(checkpoint)
    whole, found = (checkpoint / STREAMS).read_bytes(), []
    place, end = whole.index(b"PK\x01\x02", info.offset), info.offset + info.length
    while 0 <= place < end:
        for (what, (start, size)), value in itertools.product(ZIP_FIELDS.items(), (b"\xff", b"\x08", b"\x0c", b"\x0e")):
            field = slice(place + start, place + start + size)
            content = bytearray(whole)
            content[field] = value * size if value == b"\xff" else value.ljust(size, b"\x00")
            name = f"{what} at {place + start} of the directory of a stream is {bytes(content[field])!r}"
            found.append(Damage(name, STREAMS, bytes(content)))
        place = whole.find(b"PK\x01\x02", place + 1)
    return found


def torch_dist_cuts(checkpoint: Path) -> list[Damage]:
    """Files of every kind cut short."""
    chance, found = random.Random("cut torch_dist"), []
    for file in (METADATA, STREAMS, *shards(checkpoint, "hf/")):
        raw = (checkpoint / file).read_bytes()
        sizes = {0, 1, 2, 8, 9, len(raw) // 2, len(raw) - 1} | {chance.randrange(len(raw)) for _ in range(8)}
        found += [Damage(f"{file} cut to {size} bytes", file, raw[:size]) for size in sorted(sizes)]
    return found


def markers() -> list[Damage]:
    contents = {
        "nothing": b"",
        "zeros": b"\x00" * 10,
        "no UTF-8": b"\xff\xfe",
        "a negative number": b"-1",
        "a number of 300 digits": b"1" * 300,
        "a number of 5000 digits": b"1" * 5000,
        "superscript digits": "²".encode(),
        "other digits": "٣".encode(),
        "a path": b"../release",
        "two lines": b"release\nrelease",
        "an iteration that is not there": b"7",
    }
    return [Damage(f"{what} in the marker", MARKER, raw) for what, raw in contents.items()]


def torch_dist_documents(checkpoint: Path) -> list[Damage]:
    return documents(BACKEND) + documents("hf/config.json") + values(checkpoint, BACKEND, ("sharded_backend",))


@batches("stream bytes")
def test_stream_with_other_bytes_is_refused_or_read(torch_dist, batch):
    require(torch_dist, "stream bytes", of_bytes("stream bytes", batch, torch_dist, frames(torch_dist)))


@batches("stream directory")
def test_stream_with_another_directory_is_refused_or_read(torch_dist, batch):
    require(torch_dist, "stream directory", stream_directory(torch_dist))


@batches("cut torch_dist")
def test_cut_file_of_torch_dist_is_refused(torch_dist, batch):
    places = [damage for file in (STREAMS, shards(torch_dist, "hf/")[0]) for damage in places_of(file)]
    require_refused(torch_dist, "cut torch_dist", torch_dist_cuts(torch_dist) + places)


@batches("torch_dist documents")
def test_json_of_torch_dist_that_says_something_else_is_refused(torch_dist, batch):
    require_refused(torch_dist, "torch_dist documents", torch_dist_documents(torch_dist))


@batches("carried bytes")
def test_carried_file_with_other_bytes_is_refused_or_read(torch_dist, batch):
    files = shards(torch_dist, "hf/")
    places = [(file, 0, headers_end(torch_dist, file)) for file in files]
    places += [(CARRIED_INDEX, 0, (torch_dist / CARRIED_INDEX).stat().st_size)] * len(files)
    require(torch_dist, "carried bytes", of_bytes("carried bytes", batch, torch_dist, places))


@batches("carried entries")
def test_carried_file_with_other_entries_is_refused_or_read(torch_dist, batch):
    files = shards(torch_dist, "hf/")
    damages = index_entries(torch_dist, CARRIED_INDEX) + header_documents(files[0])
    damages += [damage for batch in range(len(FIELDS)) for damage in header_fields(batch, torch_dist, files)]
    require(torch_dist, "carried entries", damages)


@batches("marker")
def test_marker_that_names_no_iteration_is_refused(torch_dist, batch):
    require_refused(torch_dist, "marker", markers())


def test_more_than_a_thousand_inputs():
    assert sum(number * inputs for number, inputs in INPUTS.values()) >= 1000


# ---------------------------------------------------------------------- the real command
def not_finite(checkpoint: Path) -> Damage:
    """Right in every header; the fault shows when values are read, in a worker process."""
    file = shards(checkpoint)[0]
    raw, end = (checkpoint / file).read_bytes(), headers_end(checkpoint, file)
    return Damage("values that are not finite", file, raw[:end] + b"\xff" * (len(raw) - end))


def lost_frame(checkpoint: Path) -> Damage:
    """The same of torch_dist: a stream without its end."""
    *_, info = parts(checkpoint)
    raw, end = (checkpoint / STREAMS).read_bytes(), info.offset + info.length
    return Damage("a stream without its end", STREAMS, raw[: end - 900] + b"\x00" * 900 + raw[end:])


def picked(damages: list[Damage], name: str) -> Damage:
    return next(damage for damage in damages if name in damage.name)


COMMANDS: list[tuple[str, Callable[[Path, Path], Damage]]] = [
    ("released", lambda path, marker: picked(header_documents(shards(path)[0]), "deep lists that end")),
    ("released", lambda path, marker: picked(header_documents(shards(path)[0]), "a billion experts")),
    ("released", lambda path, marker: picked(header_documents(shards(path)[0]), "a number for a name")),
    ("released", lambda path, marker: picked(header_documents(shards(path)[0]), "a size of 8000 digits")),
    ("released", lambda path, marker: picked(header_names(path), "ud800")),
    ("released", lambda path, marker: picked(cuts(path, shards(path)[0], "cut shards"), "cut to 8 bytes")),
    ("released", lambda path, marker: picked(places_of(shards(path)[3]), "a directory")),
    ("released", lambda path, marker: picked(index_entries(path, INDEX), "a\\x00.safetensors")),
    ("released", lambda path, marker: picked(index_entries(path, INDEX), "deep objects that end")),
    ("released", lambda path, marker: picked(places_of(CONFIG), "a dangling link")),
    ("released", lambda path, marker: picked(config_schedules(path), "schedules 3")),
    ("released", lambda path, marker: picked(config_schedules(path), "schedules 1")),
    ("released", lambda path, marker: not_finite(path)),
    ("torch_dist", lambda path, marker: picked(metadata_pickles(path, marker), "os.system for all")),
    ("torch_dist", lambda path, marker: picked(stream_pickles(path, marker), "functools.partial")),
    ("torch_dist", lambda path, marker: picked(metadata_records(5, path), "a\\x00b")),
    ("torch_dist", lambda path, marker: picked(torch_dist_cuts(path), f"{METADATA} cut")),
    ("torch_dist", lambda path, marker: picked(index_entries(path, CARRIED_INDEX), "is 0 (2)")),
    ("torch_dist", lambda path, marker: picked(markers(), "no UTF-8")),
    ("torch_dist", lambda path, marker: lost_frame(path)),
]


@pytest.mark.parametrize("number", range(20))
def test_command_answers_a_damaged_checkpoint_with_one_line(released, torch_dist, marker, tmp_path, number):
    kind, damage_of = COMMANDS[number]
    source = shutil.copytree(released if kind == "released" else torch_dist, tmp_path / "source")
    target = tmp_path / "beside" / "target"
    target.parent.mkdir()
    damage = damage_of(source, marker)
    place(source / damage.file, damage)
    command = [GLM5NEXT, "convert", str(source), str(target)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2, f"{damage.name}: {run.stderr[-2000:]}"
    # what reports how far it got when the fault showed is no message
    messages = [line for line in run.stderr.splitlines() if not line.startswith("writing: ")]
    assert len(messages) == 1 and messages[0].startswith("glm5next: error: "), f"{damage.name}: {run.stderr}"
    assert "Traceback" not in run.stdout + run.stderr
    assert not list(target.parent.iterdir()) and not marker.exists(), damage.name
