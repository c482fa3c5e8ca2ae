import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.models import components, find

ROOT = Path(__file__).parents[3]
PREAMBLE = "from torch import nn\nfrom hvdtrain.models.component import Component\n"


@pytest.fixture(autouse=True)
def in_a_folder_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    find._import_module.cache_clear()
    for name in ("own", "package", "package.own"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def write(text: str, path: str = "own.py") -> None:
    file = Path(path)
    file.parent.mkdir(exist_ok=True)
    file.write_text(PREAMBLE + text)


def refusal(model: str, patch_size: int | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        components(model, 10, 32, patch_size)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_listing_and_checking_names_imports_no_torch() -> None:
    program = (
        "import sys, hvdtrain.models as models\n"
        "assert models.MODEL_NAMES[:2] == ('cnn', 'resnet18')\n"
        "models.check_name('cnn')\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_a_users_model_is_found_in_the_current_folder() -> None:
    write("def build(classes, image_size):\n return [Component('only', nn.Flatten)]\n")
    assert [component.name for component in components("own:build", 10, 32)] == ["only"]


def test_a_users_model_may_be_in_a_package_and_return_pairs() -> None:
    write(
        "def build(classes, image_size):\n"
        " return [('a', nn.Flatten), ('b', lambda: nn.Linear(3 * image_size**2, classes))]\n",
        "package/own.py",
    )
    assert [part.name for part in components("package.own:build", 10, 32)] == ["a", "b"]


def test_a_users_model_gets_the_patch_size_if_it_has_that_parameter() -> None:
    write(
        "def build(classes, image_size, patch_size=2):\n"
        " return [(f'p{patch_size}', nn.Flatten)]\n"
        "def plain(classes, image_size):\n return [('a', nn.Flatten)]\n"
    )
    assert components("own:build", 10, 32)[0].name == "p2"
    assert components("own:build", 10, 32, 8)[0].name == "p8"
    expected = "model 'own:plain' has no patches: leave out the patch size 8"
    assert refusal("own:plain", 8) == expected
    assert refusal("cnn", 8) == "model 'cnn' has no patches: leave out the patch size 8"
    assert len(components("vit_tiny", 10, 32, 8)) == 26


NAMED = """from functools import partial, wraps
def named(values):
 return [("_".join(f"{k}-{v}" for k, v in values.items() if k != "kwargs"), nn.Flatten)]
"""


@pytest.mark.parametrize(
    ("parameters", "bound"),
    [
        ("num_classes=10, base_width=16", "num_classes-20_base_width-16"),
        ("num_classes=10, weights=None", "num_classes-20_weights-None"),
        ("image_size, num_classes", "image_size-32_num_classes-20"),
        ("*, weights=None, classes", "weights-None_classes-20"),
        ("width=3", "width-3"),
        ("classes=1, **kwargs", "classes-20"),
    ],
)
def test_parameters_get_the_values_of_their_names(parameters: str, bound: str) -> None:
    write(f"{NAMED}def build({parameters}):\n return named(locals())\n")
    assert components("own:build", 20, 32)[0].name == bound


def test_whatever_can_be_called_is_bound_by_its_parameters() -> None:
    write(
        f"{NAMED}def three(depth, classes, image_size):\n return named(locals())\n"
        "first, last = partial(three, 7), partial(three, depth=7)\n"
        "class Net(nn.Linear):\n"
        " def __init__(self, num_classes=10, width=4):\n  super().__init__(width, num_classes)\n"
        "def inner(*, weights=None, **kwargs):\n return named({'weights': weights} | kwargs)\n"
        "@wraps(inner)\n"  # torchvision's functions take weights as the first argument, too
        "def vision(*args, **kwargs):\n"
        " return inner(**dict(zip(['weights', 'progress'], args)), **kwargs)\n"
    )
    assert components("own:first", 20, 32)[0].name == "depth-7_classes-20_image_size-32"
    assert components("own:last", 20, 32)[0].name == "depth-7_classes-20_image_size-32"
    assert components("own:Net", 20, 32)[0].build().get_parameter("weight").shape == (20, 4)
    assert components("own:vision", 20, 32)[0].name == "weights-None_num_classes-20"


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ("k", "missing a required argument: 'k'"),
        ("num_classes, width", "missing a required argument: 'width'"),
        ("nclass, width", "missing a required argument: 'nclass'"),
        ("k, patch_size", "missing a required argument: 'k'"),
        ("*, k, size", "missing a required argument: 'k'"),
        ("classes, /, width=2", "'classes' parameter is positional only"),
        ("*args, **kwargs", "*args hides its parameters"),
    ],
)
def test_a_function_that_requires_something_else_is_refused(parameters: str, reason: str) -> None:
    write(f"def build({parameters}):\n return []\n")
    message = refusal("own:build")
    assert message.startswith("model 'own:build' cannot take classes and image_size by name")
    assert f"({reason}" in message
    assert message.endswith("of any shape, and give others a default")


def test_unknown_names_bring_the_nearest_ones() -> None:
    assert refusal("resnet_18") == (
        "unknown model 'resnet_18': did you mean resnet18 or resnet50? use one of cnn, "
        "resnet18, resnet50, vit_tiny, vit_b16, cct_2, cct_6, "
        "torchvision:NAME or timm:NAME, or package.module:function for a model of your own"
    )
    assert refusal("").startswith("unknown model '': use one of cnn, resnet18, resnet50,")


@pytest.mark.parametrize(
    "model", ["a/own:build", "own:", ":build", "a:b:c", ".a:b", "own-1.py:build"]
)
def test_a_malformed_reference_is_refused(model: str) -> None:
    write("def build(classes, image_size):\n return [Component('only', nn.Flatten)]\n")
    assert refusal(model).startswith(f"model {model!r} is not of the form package.module:function")


def test_a_users_model_may_be_named_by_its_file(tmp_path: Path) -> None:
    write("def build(classes, image_size):\n return [Component('only', nn.Flatten)]\n")
    for model in ("own.py:build", f"{tmp_path}/own.py:build"):
        assert [component.name for component in components(model, 10, 32)] == ["only"]
    assert refusal("other.py:build") == (
        "model 'other.py:build': there is no file other.py: correct the path"
    )
    write("", "own2/own.py")
    assert "another module has the name own: rename the file" in refusal("own2/own.py:build")
    write("def build(classes, image_size):\n return 1 / 0\n", "own3.py")
    assert "run python -c \"import sys; sys.path.insert(0, '.'); import own3 as m" in refusal(
        "own3.py:build"
    )


@pytest.mark.parametrize("model", ["cnn", "own:build"])
def test_impossible_class_counts_and_sizes_are_refused(model: str) -> None:
    with pytest.raises(UsageError, match="classes 0 is not valid: it must be at least 1"):
        components(model, 0, 32)
    with pytest.raises(UsageError, match="image size -1 is not valid"):
        components(model, 10, -1)


def test_a_missing_module_is_named() -> None:
    assert refusal("own:build") == (
        "model 'own:build': there is no module 'own' in this folder or on PYTHONPATH: "
        "run from the folder that holds own, or correct the name"
    )
    write("", "package/other.py")
    assert "there is no module 'package.own' in this folder" in refusal("package.own:build")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import nosuchlibrary\n", "ModuleNotFoundError: No module named 'nosuchlibrary'"),
        ("def build(:\n", "SyntaxError: "),
        ("raise ValueError('one\\ntwo')\n", "ValueError: one: to see"),
        ("raise SystemExit(7)\n", "SystemExit: 7: to see"),
    ],
)
def test_a_module_that_fails_to_import_says_why_and_how_to_see(text: str, reason: str) -> None:
    write(text)
    message = refusal("own:build")
    assert message.startswith(f"model 'own:build': importing it failed with {reason}")
    assert message.endswith('to see where, run python -c "import own"')


def test_a_missing_function_brings_the_nearest_ones() -> None:
    write("def build(classes, image_size): ...\nnumber = 3\n")
    assert refusal("own:bild") == "module 'own' has no function 'bild': did you mean build?"
    expected = "module 'own' has no function 'number': define it, or name another"
    assert refusal("own:number") == expected


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("def build(classes, image_size):\n assert classes == 3, 'no'\n", "AssertionError: no"),
        ("def build(classes, image_size):\n raise KeyError\n", "KeyError"),
    ],
)
def test_a_function_that_raises_says_why_and_how_to_see(body: str, reason: str) -> None:
    write(body)
    message = refusal("own:build")
    assert message.startswith(f"model 'own:build' failed with {reason}: to see where,")
    assert re.search(r'run python -c "import own as m; m.build\(\w+=10, \w+=32\)"$', message)


def test_a_users_own_usage_error_is_passed_on() -> None:
    write(
        "from hvdtrain.errors import UsageError\n"
        "def build(classes, image_size):\n raise UsageError('use 5 classes')\n"
    )
    assert refusal("own:build") == "use 5 classes"


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ("None", " returned a NoneType: it must return a list of Component(name, build)"),
        ("{}", " returned a dict: it must return a list of Component(name, build), or a"),
        ("[]", " returned no component: it must return a list"),
        ("[nn.Flatten()]", ": its list holds a Flatten: it must return a list"),
        ("[('a', nn.Flatten, 3)]", ": its list holds a tuple: it must return a list"),
        ("[('a', nn.Flatten())]", ": component 'a' holds a Flatten where a function that builds"),
        ("[('a b', nn.Flatten)]", ": component name 'a b' is not valid"),
        ("[('a', nn.Flatten)] * 2", ": two components are called 'a': give them different"),
        (
            "[('a', nn.Flatten), ('a.b', nn.Flatten)]",
            ": components 'a' and 'a.b' would share parameter names: rename one",
        ),
    ],
)
def test_what_is_not_a_list_of_components_is_refused(returned: str, reason: str) -> None:
    write(f"def build(classes, image_size):\n return {returned}\n")
    assert refusal("own:build").startswith(f"model 'own:build'{reason}")
