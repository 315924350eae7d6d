import hashlib
import textwrap

import pytest
from scoring import loaded, opened

from rlgen.errors import DataError, RewardError
from rlgen.rewards.builtin import exact_match

__all__ = ["opened"]


@pytest.fixture
def write(tmp_path):
    def write_file(source, name="rewards.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return path

    return write_file


def test_a_built_in():
    reward, one = loaded("exact_match", {"answer"}, weight=0.5)
    assert (reward.label, reward.entry.weight, one.function) == ("exact_match", 0.5, exact_match)
    assert not reward.of_group and not one.facts.is_async


def test_a_function_of_a_file_keeps_the_hash_of_the_file(write):
    path = write("def brevity(completion, limit=3):\n    return -len(completion) / limit\n")
    reward, one = loaded(f"{path}:brevity", args={"limit": 2}, name="short")
    assert reward.label == "short" and reward.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert one.function(**reward.arguments({"completion": "abcd", "step": 3})) == -2.0


def test_a_function_of_a_module():
    reward, one = loaded("rlgen.rewards.builtin:regex_match", args={"pattern": "a"})
    assert one.function(**reward.arguments({"completion": "cat"})) == 1.0


def test_a_function_of_a_module_keeps_the_hash_of_the_file_behind_it(write, tmp_path, monkeypatch, opened):
    (tmp_path / "judges").mkdir()
    write("", name="judges/__init__.py")
    monkeypatch.syspath_prepend(tmp_path)  # workers find what the trainer finds

    def hashed(source):
        files = write(source, name="judges/short.py"), tmp_path / "judges/__init__.py"
        (reward,) = opened([{"use": "judges.short:f"}], set()).rewards  # imported by a new worker
        hashes = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
        return reward.sha256 == hashlib.sha256(hashes.encode()).hexdigest(), reward.sha256

    found, first = hashed("def f(completion): return 0.25\n")
    assert found
    found, edited = hashed("def f(completion): return 0.5\n")
    assert found and edited != first


def test_the_hash_of_a_reward_covers_the_modules_beside_it(write, tmp_path, monkeypatch, opened):
    (tmp_path / "parts").mkdir()
    write("", name="parts/__init__.py")
    write("import digits_helper, parts.inner\ndef f(completion): return digits_helper.VALUE\n")
    write("def g(completion): return 1.0\n", name="other.py")  # another reward of the folder
    monkeypatch.syspath_prepend(tmp_path)  # as PYTHONPATH does

    def hashed(value, inner, beside):
        write(f"VALUE = {value}\n", name="digits_helper.py")
        write(f"VALUE = {inner}\n", name="parts/inner.py")
        write(f"VALUE = {beside}\n", name="never_imported.py")
        first, second = opened([{"use": f"{tmp_path}/other.py:g"}, {"use": f"{tmp_path}/rewards.py:f"}], set()).rewards
        assert first.sha256 == hashlib.sha256((tmp_path / "other.py").read_bytes()).hexdigest()
        return second.sha256

    before = hashed(0.25, 1, 1)
    assert before == hashed(0.25, 1, 2) and before not in (helper := hashed(0.75, 1, 1), inner := hashed(0.25, 2, 1))
    assert helper != inner


def test_a_file_may_define_dataclasses(write):
    path = write("""
        from __future__ import annotations
        from dataclasses import dataclass

        @dataclass
        class Point:
            x: float

        def f(completion):
            return Point(2.0).x
        """)
    assert loaded(f"{path}:f")[1].function(completion="") == 2.0


@pytest.mark.parametrize(
    ("signature", "of_group", "is_async"),
    [
        ("def f(completion)", False, False),
        ("def f(completions)", True, False),
        ("def f(prompts, **kwargs)", True, False),
        ("async def f(completion)", False, True),
        ("async def f(completions)", True, True),
    ],
)
def test_the_signature_decides_the_kind(write, signature, of_group, is_async):
    reward, one = loaded(f"{write(f'{signature}: return None')}:f")
    assert (reward.of_group, one.facts.is_async) == (of_group, is_async)


def test_arguments_are_what_the_function_names(write):
    path = write("def some(completion, step): ...\ndef all_(completion, **rest): ...\n")
    available = {"completion": "c", "step": 4, "answer": "7"}
    assert loaded(f"{path}:some", {"answer"})[0].arguments(available) == {"completion": "c", "step": 4}
    everything = loaded(f"{path}:all_", {"answer"}, args={"k": 1})[0].arguments(available)
    assert everything == {**available, "k": 1}


@pytest.mark.parametrize(
    ("error", "signature", "columns", "args", "said"),
    [
        (DataError, "def f(completion, anser)", {"answer"}, {}, ["`anser`", "did you mean `answer`?"]),
        (DataError, "def f(completions, prompt)", set(), {}, ["`prompt`", "did you mean `prompts`?"]),
        (DataError, "def f(completion, limit)", set(), {}, ["`limit`"]),
        (RewardError, "def f(completion, limit=1)", set(), {"limt": 2}, ["`limt`", "limit"]),
        (RewardError, "def f(completion)", set(), {"completion": "x"}, ["`completion`"]),
        (RewardError, "def f(completion, /)", set(), {}, ["`completion` is positional-only"]),
    ],
)
@pytest.mark.fault(20)
def test_a_parameter_that_cannot_be_filled_is_an_error(write, proof, error, signature, columns, args, said):
    with pytest.raises(error) as caught:
        loaded(f"{write(f'{signature}: return 1.0')}:f", columns, args=args)
    assert all(part in str(caught.value) for part in (*said, "rewards.py:f"))
    assert caught.value.exit_code == (4 if error is DataError else 5)
    proof(str(caught.value)[-80:])


def test_a_parameter_with_a_default_need_not_be_filled(write):
    reward, one = loaded(f"{write('def f(completion, target=None): return target')}:f")
    assert one.function(**reward.arguments({"completion": ""})) is None
    reward, one = loaded(f"{write('def f(completion, target=None): return target')}:f", {"target"})
    assert one.function(**reward.arguments({"completion": "", "target": 5})) == 5


def test_a_missing_file_module_or_function(write, tmp_path):
    path = write("def brevity(completion): return 1.0\n")
    with pytest.raises(RewardError, match="did you mean `brevity`"):
        loaded(f"{path}:brevty")
    with pytest.raises(RewardError, match=r"nowhere\.py does not exist"):
        loaded(f"{tmp_path}/nowhere.py:f")
    with pytest.raises(RewardError, match="no_such_package_anywhere"):
        loaded("no_such_package_anywhere.rewards:f")
