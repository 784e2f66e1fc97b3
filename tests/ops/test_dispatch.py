import pytest
import torch

from glm5next_plugin import hookspecs, plugins
from glm5next_plugin.ops import dispatch
from glm5next_plugin.ops.dispatch import BackendError, Operator, register_backend, set_backend
from glm5next_plugin.ops.rms_norm import rms_norm
from glm5next_plugin.ops.validation import ShapeError


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Registrations and choices of a test stay in it; no plugins but those that the test brings."""
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)
    for name in ("_operators", "_backends", "_chosen"):
        monkeypatch.setattr(dispatch, name, dict(getattr(dispatch, name)))
    monkeypatch.setattr(dispatch, "_plugins_loaded", False)
    monkeypatch.setattr(plugins, "registry", plugins.Registry)
    dispatch._parse_choices.cache_clear()
    yield
    dispatch._parse_choices.cache_clear()


@pytest.fixture
def double():
    """An operator of the test; the reference doubles, a backend ``tripled`` triples."""

    def reference(x):
        """Twice x."""
        return 2 * x

    operator = Operator("double", reference)
    register_backend("double", "tripled", lambda: lambda x: 3 * x)
    return operator


def test_reference_runs_without_a_choice(double):
    assert double(5) == 10


def test_environment_chooses_each_operator_by_name(double, monkeypatch):
    monkeypatch.setenv("GLM5NEXT_BACKEND", " double = tripled , rms_norm=reference")
    assert double(5) == 15
    assert torch.equal(rms_norm(torch.ones(1, 4), torch.ones(4), 0.0), torch.ones(1, 4))


def test_set_backend_goes_before_the_environment_and_can_be_taken_back(double, monkeypatch):
    monkeypatch.setenv("GLM5NEXT_BACKEND", "double=tripled")
    set_backend("double", "reference")
    assert double(5) == 10
    set_backend("double", None)
    assert double(5) == 15


def test_operator_carries_the_docstring_and_name_of_its_reference(double):
    assert double.__doc__ == "Twice x."
    assert repr(double) == "<operator double, backend reference>"


def test_loader_is_called_once_and_only_on_use(double):
    calls = []
    register_backend("double", "lazy", lambda: calls.append("loaded") or (lambda x: 4 * x))
    set_backend("double", "lazy")
    assert calls == []
    assert [double(1), double(2)] == [4, 8]
    assert calls == ["loaded"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("kdda=tripled", "GLM5NEXT_BACKEND: no operator 'kdda'; there are .*kda, kda_gate"),
        ("double=quadrupled", "operator 'double' has no backend 'quadrupled'; there are reference, tripled"),
        ("double", "GLM5NEXT_BACKEND has 'double'; needed: operator=backend"),
        ("double=", "GLM5NEXT_BACKEND has 'double='; needed: operator=backend"),
        ("double=tripled,double=reference", "GLM5NEXT_BACKEND names operator 'double' twice"),
    ],
)
def test_setting_that_cannot_be_met_is_an_error(double, monkeypatch, setting, message):
    monkeypatch.setenv("GLM5NEXT_BACKEND", setting)
    with pytest.raises(BackendError, match=message):
        double(5)


def test_set_backend_refuses_unknown_operators_and_backends(double):
    with pytest.raises(BackendError, match="no operator 'triple'"):
        set_backend("triple", "tripled")
    with pytest.raises(BackendError, match="operator 'double' has no backend 'fla'; there are reference, tripled"):
        set_backend("double", "fla")
    assert double(5) == 10


def test_unsupported_call_is_an_error_that_says_why(double):
    register_backend(
        "double", "even", lambda: lambda x: 2 * x, supports=lambda x: None if x % 2 == 0 else f"x is {x}, odd"
    )
    set_backend("double", "even")
    assert double(4) == 8
    with pytest.raises(
        BackendError, match="backend 'even' of operator 'double' does not support this call: x is 5, odd"
    ):
        double(5)


def test_backend_whose_library_is_missing_is_an_error_that_names_it(double):
    def load():
        raise ImportError("No module named 'fast_kernels'")

    register_backend("double", "fast", load)
    set_backend("double", "fast")
    with pytest.raises(
        BackendError, match="'fast' of operator 'double' cannot be loaded: No module named 'fast_kernels'"
    ):
        double(5)


@pytest.mark.parametrize("name", ["reference", "", "a=b", "a,b"])
def test_unusable_backend_names_are_refused(double, name):
    with pytest.raises(BackendError, match="needed: letters, digits"):
        register_backend("double", name, lambda: None)


def test_second_backend_of_one_name_is_refused(double):
    with pytest.raises(BackendError, match="operator 'double' has a backend 'tripled' already"):
        register_backend("double", "tripled", lambda: None)


def test_backend_for_an_unknown_operator_is_refused():
    with pytest.raises(BackendError, match="no operator 'flash'"):
        register_backend("flash", "fast", lambda: None)


def test_arguments_are_checked_before_a_backend_sees_them():
    register_backend("rms_norm", "unchecked", lambda: lambda x, weight, eps: x)
    set_backend("rms_norm", "unchecked")
    with pytest.raises(ShapeError, match=r"rms_norm: weight has shape \[3\]; needed: \[h\] = \[4\]"):
        rms_norm(torch.ones(2, 4), torch.ones(3), 1e-5)


@pytest.fixture
def plugin(monkeypatch):
    """A plugin of another distribution with a backend for ``rms_norm``; gives what it was asked with."""
    asked = []

    class ThirdParty:
        @hookspecs.hookimpl
        def glm5next_register_kernels(self, register):
            asked.append(register)
            register("rms_norm", "sevens", lambda: lambda x, weight, eps: torch.full_like(x, 7))

    found = plugins.Registry()
    found.register("third-party", ThirdParty())
    monkeypatch.setattr(plugins, "registry", lambda: found)
    return asked


def test_backend_of_a_plugin_runs_where_the_environment_names_it(plugin, monkeypatch):
    monkeypatch.setenv("GLM5NEXT_BACKEND", "rms_norm=sevens")
    for _ in range(2):
        assert torch.equal(rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5), torch.full((2, 4), 7.0))
    assert plugin == [register_backend]


def test_backend_of_a_plugin_runs_where_the_process_chooses_it(plugin):
    set_backend("rms_norm", "sevens")
    assert torch.equal(rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5), torch.full((2, 4), 7.0))


def test_plugins_are_not_asked_while_the_reference_runs(plugin):
    rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5)
    assert plugin == []


def test_description_asks_the_plugins_once(plugin):
    for _ in range(2):
        described = {entry.operator: entry for entry in dispatch.describe_backends()}
        assert described["rms_norm"] == dispatch.OperatorBackends("rms_norm", "reference", ("reference", "sevens"))
    assert plugin == [register_backend]


def test_description_lists_every_operator_with_its_backends(plugin, monkeypatch):
    monkeypatch.setenv("GLM5NEXT_BACKEND", "rms_norm=sevens")
    described = {entry.operator: entry for entry in dispatch.describe_backends()}
    assert described["rms_norm"] == dispatch.OperatorBackends("rms_norm", "sevens", ("reference", "sevens"))
    assert described["kda"] == dispatch.OperatorBackends("kda", "reference", ("reference",))
    assert sorted(described) == [
        "clamped_swiglu",
        "experts",
        "gated_rms_norm",
        "hc_post",
        "hc_pre",
        "kda",
        "kda_gate",
        "kda_step",
        "key_norm",
        "pool_keys",
        "pool_keys_step",
        "rms_norm",
        "route",
        "router_logits",
        "select_pools",
        "select_pools_step",
        "short_conv",
        "short_conv_step",
        "sparse_mla",
        "sparse_mla_step",
        "token_log_probs",
    ]


def test_description_refuses_a_choice_that_cannot_be_met(monkeypatch):
    monkeypatch.setenv("GLM5NEXT_BACKEND", "kda=missing")
    with pytest.raises(BackendError, match="operator 'kda' has no backend 'missing'"):
        dispatch.describe_backends()
