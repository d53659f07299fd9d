"""A recipe that is written to be edited is the one that it was written from."""

import subprocess
import sys
from pathlib import Path

import pytest
from outputs import refusal
from test_foreign import CONVERTED

from curax import config as cf
from curax.commands import foreign, new
from curax.settings import config_paths, recipes

SHIPPED = [*recipes.recipes()]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def written(*words):
    """The config of the file that `curax new mine` writes, and its text."""
    assert new.main(["mine", *words]) == 0
    return cf.load("mine"), Path("configs/mine.py").read_text()


def same(one, other):
    return (
        config_paths.changes(config_paths.describe(one), config_paths.describe(other))
        == []
    )


@pytest.mark.first(10)
@pytest.mark.parametrize("recipe", SHIPPED)
def test_a_new_recipe_is_the_one_it_was_made_from_with_all_that_is_said_in_it(recipe):
    config, text = written("--from", recipe)
    assert same(config, cf.load(recipe))
    source = recipes.recipes()[recipe].read_text()
    assert text.endswith(source.replace(f"configs/{recipe}.py", "configs/mine.py"))


def test_what_is_set_is_in_the_file_and_in_the_config(capsys):
    recipe = "gsm8k_qwen3_0p6b"
    words = ["steps=9", 'model.path=it\'s "here"']
    words += [
        "sampling.off_policy=off_policy.truncated_ratio",
        "advantage=advantage.leave_one_out",
        "sampling.off_policy.cap=2",
        "task.train=a.jsonl",
    ]
    config, text = written("--from", recipe, "--set", *words)
    assert same(config, cf.override(cf.load(recipe), words))
    assert "load, override\n" in text
    assert '        "sampling.off_policy.cap=2",\n' in text
    assert "thinking=bool(recipe.reflection)" in text  # a copy, not a list of values
    again = new.main(["more", "--from", "mine", "--set", "steps=10"])
    assert again == 0
    assert same(cf.load("more"), cf.override(config, {"steps": 10}))
    assert Path("configs/more.py").read_text().count(new.MADE) == 1
    assert "To run it: curax train more\n" in capsys.readouterr().out


def test_functions_of_a_user_are_found_from_the_new_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    Path("near.py").write_text("def half(reward, exists):\n    return reward / 2\n")
    Path("own.py").write_text(
        "import curax\nfrom near import half\n\n\ndef whole(reward, exists):\n"
        "    return reward\n\n\ndef get_config():\n"
        "    credit = {'advantage': whole}\n"
        "    return curax.override(curax.load('rloo'), credit)\n"
    )
    try:
        config, _ = written("--from", "own.py", "--set", "seed=4")
        assert config_paths.describe(config)["advantage"] == {
            "function": "config_mine.whole"
        }
        words = ["--from", "rloo", "--set", "advantage=near.py:half"]
        assert new.main(["theirs", *words]) == 0
        assert cf.load("theirs").advantage(3.0, True) == 1.5
    finally:
        sys.modules.pop("near", None)


@pytest.mark.parametrize("name", ["rloo", "elsewhere"])
def test_a_file_may_take_the_name_of_a_recipe_and_stands_for_it(name, capsys):
    assert new.main([name, "--from", "rloo", "--set", "steps=3"]) == 0
    assert ("stands in place" in capsys.readouterr().out) == (name == "rloo")
    assert cf.load(name).steps == 3
    assert new.main([name, "--from", "rloo", "--out", "deep/er"]) == 0
    assert f"curax train deep/er/{name}.py\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "given", [given for given, _ in CONVERTED], ids=[str(g) for g, _ in CONVERTED]
)
def test_a_configuration_of_trl_becomes_a_file_of_ours(given, tmp_path):
    given = {"max_steps": 2000, "bf16": True, **given}
    text = "".join(f"{key}: {value}\n" for key, value in given.items())
    Path("grpo.yaml").write_text(text)
    config, text = written("--from", "trl", "grpo.yaml", "--set", "seed=3")
    want = cf.override(foreign.of_trl(given).config(), {"seed": 3})
    assert same(config, want)
    assert "- not read, without a counterpart: bf16\n" in text
    assert "group_size=" in text


def test_what_trl_becomes_is_laid_out_as_our_own_files_are():
    options = "temperature: .7\ntop_p: .9\ntop_k: 20\nbeta: .1\nmax_grad_norm: 0\n"
    Path("grpo.yaml").write_text(f"{options}top_entropy_quantile: .2\n{'no' * 60}: 1\n")
    _, text = written("--from", "trl", "grpo.yaml", "--set", "steps=3", "kl=none")
    ruff, root = Path(sys.executable).with_name("ruff"), Path(__file__).parents[1]
    for words in (["check"], ["format", "--check"]):
        subprocess.run(
            [ruff, *words, "--stdin-filename", root / "configs" / "mine.py", "-"],
            input=text.encode(),
            check=True,
            cwd=root,
            capture_output=True,
        )


def test_a_function_with_a_decorator_or_tabs_takes_what_is_set():
    Path("own.py").write_text(
        "import curax\nfrom functools import cache\n\n\n@cache\ndef get_config():\n"
        "\treturn curax.load('rloo')\n"
    )
    config, _ = written("--from", "own.py", "--set", "steps=7")
    assert same(config, cf.override(cf.load("rloo"), {"steps": 7}))


def test_no_name_in_a_file_of_trl_becomes_code():
    Path("grpo.yaml").write_text('"\\"\\"\\"\\nraise SystemExit\\n": 3\n')
    _, text = written("--from", "trl", "grpo.yaml")
    assert "\nraise" not in text


BAD = {
    "../mine --from rloo": "NAME=../mine must be letters, digits, _ and -",
    "_mine --from rloo": "NAME=_mine must be letters",
    "mine.py --from rloo": "NAME=mine.py must be letters",
    "mine": "the following arguments are required: --from",
    "mine --from rlo": "rlo: there is no such file, nor recipe; did you mean rloo",
    "mine --from trl": "--from trl is no recipe, nor trl and a file; write",
    "mine --from rloo grpo": "--from rloo grpo is no recipe, nor trl and a file",
    "mine --from trl no.yaml": "no.yaml cannot be read (No such file",
    "mine --from rloo --set stepz=4": "stepz=4: the config has no option 'stepz'; did",
    "mine --from rloo --set steps=many": "steps=many: expected",
    "mine --from rloo --out own.py/x": "--out own.py/x cannot be written to",
    "mine --from own.py --set steps=4": "own.py has not one return in get_config()",
    "mine --from line.py --set steps=4": "line.py has not one return in get_config()",
    "mine --from beside.py": "beside.py cannot be copied: configs/mine.py:7:",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_a_sentence_and_leaves_nothing(words):
    begin = "import curax\nfrom pathlib import Path\ndef get_config():\n"
    two = "    if not curax:\n        return 3\n    return curax.load('rloo')\n"
    Path("own.py").write_text(begin + two)
    own = "    return curax.load(Path(__file__).with_name('near.py'))\n"
    Path("beside.py").write_text(begin + own)
    Path("near.py").write_text(begin + "    return curax.load('rloo')\n")
    line = "import curax\ndef get_config(): return curax.load('rloo')\n"
    Path("line.py").write_text(line)
    said = refusal(new.main, *words.split())
    assert said.startswith(f"curax.new: {BAD[words]}")
    names = {path.name for path in Path().iterdir()}
    assert names == {"own.py", "beside.py", "near.py", "line.py"}


def test_a_file_that_reads_what_is_beside_it_is_to_stay_there():
    Path("demo").mkdir()
    text = "import curax\nfrom pathlib import Path\nHERE = Path(__file__).parent\n"
    text += "def get_config():\n    config = curax.load({})\n"
    text += (
        '    return curax.override(config, {{"memory.load": str(HERE / "near.py")}})\n'
    )
    near = 'HERE / "near.py"'
    Path("demo/words.py").write_text(text.format('"rloo"'))
    Path("demo/near.py").write_text(text.format('"rloo"'))
    Path("demo/more.py").write_text(text.format(near))
    said = refusal(new.main, "mine", "--from", "demo/words.py")
    assert said == (
        "curax.new: demo/words.py cannot be copied: memory.load would be "
        "configs/near.py, not demo/near.py; add --out demo, to have it beside what it "
        "reads.\n"
    )
    said = refusal(new.main, "mine", "--from", "demo/more.py")
    assert said.startswith("curax.new: demo/more.py cannot be copied: configs/mine.py:")
    assert said.endswith("; add --out demo, to have it beside what it reads.\n")
    assert not Path("configs").exists()
    for name in ("words", "more"):
        words = [name + "2", "--from", f"demo/{name}.py", "--out", "demo"]
        assert new.main(words) == 0
        assert same(cf.load(f"demo/{name}2.py"), cf.load(f"demo/{name}.py"))


def test_a_file_that_is_there_is_not_written_over():
    Path("configs").mkdir()
    Path("configs/mine.py").symlink_to("nowhere")
    said = "curax.new: configs/mine.py is there; take another name, or remove it.\n"
    assert refusal(new.main, "mine", "--from", "rloo") == said
