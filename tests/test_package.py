"""The distribution: what importing costs, what is packed, what is declared, and the wheel in a fresh environment."""

import ast
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from glm5next_plugin import versions

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = {"glm5next_plugin": ROOT / "glm5next_plugin", "glm5next_plugin.adapters": ROOT / "adapters"}
FRAMEWORKS = {"megatron", "sglang", "verl", "miles", "ray", "transformer_engine", "fla", "tilelang"}
HEAVY = FRAMEWORKS | {"torch", "transformers", "triton", "numpy", "matplotlib", "safetensors"}


def source_modules() -> dict[str, Path]:
    """Dotted name -> file of every module, by the two source folders."""
    modules = {}
    for package, folder in SOURCES.items():
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            modules[".".join((package, *(part for part in parts if part != "__init__")))] = file
    return modules


def imported_names(tree: ast.AST, package: str) -> set[str]:
    """Absolute dotted names of the import statements in ``tree``; relative ones are resolved against ``package``."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            names.add(".".join([*base, *filter(None, [node.module])]))
    return names


def module_imports(name: str, file: Path) -> set[str]:
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    return imported_names(ast.parse(file.read_text()), package)


@pytest.mark.parametrize(
    "module",
    [
        "glm5next_plugin",
        "glm5next_plugin.architecture",
        "glm5next_plugin.plugins",
        "glm5next_plugin.cli.main",
        "glm5next_plugin.adapters",
        "glm5next_plugin.adapters.megatron.plugin",
    ],
)
def test_importing_loads_neither_torch_nor_a_framework(module):
    code = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "glm5next_plugin" in loaded
    assert HEAVY.isdisjoint(loaded)


def test_operators_load_torch_alone():
    code = "import sys, glm5next_plugin.ops; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in loaded
    assert (FRAMEWORKS | {"transformers"}).isdisjoint(loaded)


def test_every_folder_with_an_init_is_listed_as_a_package():
    packages = {name for name, file in source_modules().items() if file.name == "__init__.py"}
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(packages)


def test_every_module_lies_in_a_package():
    folders = {file.parent for file in source_modules().values()}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_no_module_outside_the_adapters_imports_a_framework():
    offenders = {
        name: framework
        for name, file in source_modules().items()
        if not name.startswith("glm5next_plugin.adapters") and not name.startswith("glm5next_plugin.ops.kernels")
        for framework in sorted({imported.split(".")[0] for imported in module_imports(name, file)} & FRAMEWORKS)
    }
    assert offenders == {}


def test_transformers_is_imported_by_functions_only_outside_hf_config():
    offenders = []
    for name, file in source_modules().items():
        top_level = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        roots = {imported.split(".")[0] for imported in imported_names(ast.Module(top_level, []), name)}
        if "transformers" in roots and not name.startswith(("glm5next_plugin.adapters.", "glm5next_plugin.hf_config")):
            offenders.append(name)
    assert offenders == []


def test_no_adapter_imports_another_unless_it_composes_them():
    composes = {"verl": {"megatron", "sglang"}, "miles": {"megatron", "sglang"}}
    offenders = []
    for name, file in source_modules().items():
        if not name.startswith("glm5next_plugin.adapters."):
            continue
        adapter = name.split(".")[2]
        for imported in module_imports(name, file):
            parts = imported.split(".")
            if parts[:2] == ["glm5next_plugin", "adapters"] and len(parts) > 2:
                if parts[2] not in {adapter} | composes.get(adapter, set()):
                    offenders.append((name, imported))
    assert offenders == []


def requirements_of(*extras: str) -> list[Requirement]:
    lines = list(PROJECT["project"]["dependencies"])
    for extra in extras:
        lines += PROJECT["project"]["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def test_every_imported_distribution_is_declared():
    imports = [imported for name, file in source_modules().items() for imported in module_imports(name, file)]
    third_party = {imported.split(".")[0] for imported in imports} - sys.stdlib_module_names - {"glm5next_plugin"}
    offered_by = importlib.metadata.packages_distributions()
    declared = {canonicalize_name(r.name) for r in requirements_of(*PROJECT["project"]["optional-dependencies"])}
    declared.add("transformer-engine")  # comes with GPU images; stood in for where it is absent
    undeclared = [
        root
        for root in sorted(third_party)
        if declared.isdisjoint(canonicalize_name(name) for name in offered_by.get(root, [root]))
    ]
    assert undeclared == []


def pinned() -> dict[str, str]:
    lines = (ROOT / "requirements/cpu.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_pinned_list_is_sorted_and_has_no_address():
    names = list(pinned())
    assert names == sorted(names)
    for file in sorted((ROOT / "requirements").iterdir()):
        text = file.read_text()
        assert "://" not in text and "index-url" not in text and "find-links" not in text, file.name


def test_pinned_list_meets_the_requirements_of_the_package_megatron_and_tests():
    pins = pinned()
    wanted = [r for r in requirements_of("megatron", "dev") if r.name != "ruff"]
    unmet = [str(r) for r in wanted if r.name not in pins or not r.specifier.contains(pins[r.name])]
    assert unmet == []


def test_table_of_supported_versions_says_what_the_metadata_says():
    rows = [row for row in (*versions.SUPPORTED, *versions.COMPANIONS.values()) if not row.optional]
    for row in rows:
        lines = (
            PROJECT["project"]["optional-dependencies"][row.extra] if row.extra else PROJECT["project"]["dependencies"]
        )
        declared = {r.name: r.specifier for r in map(Requirement, lines)}
        declared[versions.PYTHON] = SpecifierSet(PROJECT["project"]["requires-python"])
        assert declared[row.distribution] == SpecifierSet(row.specifier), row.distribution


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Wheel built from the sdist, both from a copy of the sources, so that no build output lands in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    for folder in ("glm5next_plugin", "adapters"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert len(list(out.glob("*.tar.gz"))) == 1
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def fresh_environment(wheel, tmp_path_factory) -> Path:
    """A virtual environment with the wheel; dependencies come from this one's folder, its editable install does not.

    A path in a .pth file is searched, but the .pth files in it (one of which is the editable install's) are not read.
    """
    venv = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    site_packages = venv / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv


def run_fresh(venv: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(venv / "bin" / command[0]), *command[1:]], cwd=venv, env=environment, capture_output=True, text=True
    )


def test_wheel_holds_exactly_the_modules_and_the_license(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        name.replace(".", "/") + ("/__init__.py" if file.name == "__init__.py" else ".py")
        for name, file in source_modules().items()
    }
    assert {name for name in packed if name.endswith(".py")} == modules
    assert any(name.endswith("licenses/LICENSE") for name in packed)


def test_wheel_gives_the_command_with_its_help_and_version(fresh_environment):
    shown = run_fresh(fresh_environment, "glm5next", "--help")
    assert shown.returncode == 0
    assert all(command in shown.stdout for command in ("doctor", "convert", "bringup"))
    version = run_fresh(fresh_environment, "glm5next", "--version")
    assert version.stdout == f"glm5next-plugin {importlib.metadata.version('glm5next-plugin')}\n"


def test_wheel_passes_its_own_doctor(fresh_environment):
    result = run_fresh(fresh_environment, "glm5next", "doctor", "--json")
    diagnosis = json.loads(result.stdout)
    assert diagnosis["faults"] == []
    assert [(a["name"], a["state"]) for a in diagnosis["adapters"]] == [("megatron", "ready")]
    assert result.returncode == 0


def test_wheel_imports_from_its_own_folder_and_offers_its_entry_points(fresh_environment):
    code = """
import importlib.metadata, json
import glm5next_plugin.adapters.megatron.plugin
entries = importlib.metadata.entry_points(group="glm5next.adapters")
print(json.dumps([glm5next_plugin.adapters.__file__, {entry.name: entry.load().__name__ for entry in entries}]))
"""
    result = run_fresh(fresh_environment, "python", "-c", code)
    assert result.returncode == 0, result.stderr
    file, entries = json.loads(result.stdout)
    assert Path(file).is_relative_to(fresh_environment)
    assert entries == {"megatron": "glm5next_plugin.adapters.megatron.plugin"}
